# hpcgpu run --gpus sim:2 examples/libraries/optuna_study.py
"""A study of Optuna whose trials are tasks.

The study stays with the client, so workers need no database. To go on with it later, give create_study a storage.
"""

from __future__ import annotations

import argparse
import sys

import optuna
from distributed import Client

TRIALS, AT_ONCE = 48, 4


def objective(x: float, y: float) -> float:
    """Return the loss of a trial; put your training here: it has a worker's GPU as CUDA's current device."""
    return (x - 2) ** 2 + (y + 1) ** 2


def compute(client: Client) -> dict[str, float]:
    """Return the best parameters; each round suggests from the results of all earlier rounds."""
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1))
    for _ in range(TRIALS // AT_ONCE):
        trials = [study.ask() for _ in range(AT_ONCE)]
        points = [(t.suggest_float("x", -10, 10), t.suggest_float("y", -10, 10)) for t in trials]
        losses = client.gather([client.submit(objective, *point, pure=False) for point in points])
        for trial, loss in zip(trials, losses, strict=True):
            study.tell(trial, loss)
    return dict(study.best_params)


def main() -> int:
    """Return 0 if the best trial is near the minimum."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with Client() as client:  # the cluster's line: the run's cluster, or distributed's LocalCluster
        best = compute(client)
    print(f"best of {TRIALS} trials: x = {best['x']:.2f}, y = {best['y']:.2f}; the minimum is at x = 2, y = -1")
    return int(objective(**best) > 2)


if __name__ == "__main__":
    sys.exit(main())

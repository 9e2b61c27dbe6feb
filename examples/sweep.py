"""A sweep of hyper-parameters: each trial is a task on one GPU; results come as they are ready, into a file.

hpcgpu run --gpus sim:4 --nthreads 1 examples/sweep.py --grid rate=0.01,0.1 --grid steps=10,100
sbatch jobscripts/slurm-sweep.sbatch examples/sweep.py --cupy --grid rate=0.01,0.1 --grid steps=10,100,1000

The trial is gradient descent on a least-squares problem; put yours in its place. Started again with the same file,
it goes on with the trials that are not in it: so a job that met its time limit loses those alone that were running.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, as_completed

Trial = dict[str, float]


def train(trial: Trial, cupy: bool) -> float:
    """Return the loss after so many ``steps`` at a learning ``rate``."""
    if cupy:
        from cupy import asarray
    else:
        from hpcgpu.sim import asarray
    random = np.random.default_rng(0)
    features = random.standard_normal((2000, 50))
    true = random.standard_normal(50)
    x, y, found = asarray(features), asarray(features @ true), asarray(np.zeros(50))
    for _ in range(int(trial.get("steps", 100))):
        found = found - trial.get("rate", 0.1) * (x.T @ (x @ found - y)) / len(features)
    return float(((x @ found - y) ** 2).mean().get())


def grid(texts: list[str]) -> list[Trial]:
    """Return the combinations of ``name=value,value,...``."""
    axes: dict[str, list[float]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        try:
            axes[name] = [float(value) for value in values.split(",")]
        except ValueError:
            equals = ""
        if not (name and equals):
            raise SystemExit(f"--grid {text!r}: allowed is a name with numbers, rate=0.01,0.1")
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def main() -> int:
    """Return 0 if there is a best trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", action="append", default=[], metavar="NAME=VALUE,...", help="may be repeated")
    parser.add_argument("--results", type=Path, default=Path("sweep.jsonl"), help="one line of JSON for each trial")
    parser.add_argument("--cupy", action="store_true", help="real GPUs, through CuPy")
    options = parser.parse_args()
    trials = grid(options.grid or ["rate=0.001,0.01,0.1", "steps=10,100"])
    results: list[dict[str, Any]] = []
    if options.results.exists():
        results = [json.loads(line) for line in options.results.read_text().splitlines()]
    known = [result["trial"] for result in results]
    with Client() as client, options.results.open("a") as lines:
        todo = [trial for trial in trials if trial not in known]
        gpus = len(client.nthreads())
        print(f"{len(todo)} of {len(trials)} trials to do, on {gpus} GPUs")
        tasks = {client.submit(train, trial, options.cupy, pure=False): trial for trial in todo}
        for task in as_completed(tasks):
            result = {"trial": tasks[task], "loss": task.result()}
            print(json.dumps(result), file=lines, flush=True)
            results.append(result)
    best = min((r for r in results if r["trial"] in trials), key=lambda r: r["loss"])
    print(f"best of {len(trials)}: {' '.join(f'{k}={v:g}' for k, v in best['trial'].items())}, loss {best['loss']:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

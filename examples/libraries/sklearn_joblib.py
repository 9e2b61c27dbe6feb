# hpcgpu run --gpus sim:2 examples/libraries/sklearn_joblib.py
"""A grid search of scikit-learn by joblib.

joblib has a backend for Dask, and registers it when it is named. --gpu fits cuML's classifier on real GPUs.
"""

from __future__ import annotations

import argparse
import sys

import joblib
from distributed import Client
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV


def compute(client: Client, gpu: bool = False) -> dict[float, float]:
    """Return the mean accuracy for each inverse strength of the regularization."""
    if gpu:
        from cuml.svm import SVC
    else:
        from sklearn.svm import SVC
    x, y = load_digits(return_X_y=True)
    search = GridSearchCV(SVC(gamma=0.001), {"C": [0.01, 0.1, 1.0, 10.0]}, cv=4)
    with joblib.parallel_config("dask", client=client):
        search.fit(x[:1000], y[:1000])
    scores = search.cv_results_["mean_test_score"]
    return dict(zip(map(float, search.cv_results_["param_C"]), map(float, scores), strict=True))


def main() -> int:
    """Return 0 if a good classifier was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="real GPUs; needs cuML")
    options = parser.parse_args()
    with Client() as client:  # the cluster's line: the run's cluster, or distributed's LocalCluster
        scores = compute(client, options.gpu)
    print("\n".join(f"C = {c:5}: {score:.4f}" for c, score in scores.items()))
    return int(max(scores.values()) < 0.94)


if __name__ == "__main__":
    sys.exit(main())

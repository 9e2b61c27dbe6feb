# hpcgpu run --gpus sim:2 examples/libraries/xgboost_trees.py
"""Boosted trees with XGBoost.

Without GPUs on every kind of cluster; --gpu trains on real GPUs, from CuPy's arrays.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client
from xgboost import dask as dxgb


def compute(client: Client, gpu: bool = False) -> np.ndarray[Any, Any]:
    """Return the predictions of trees that were trained on all workers."""
    random = da.random.default_rng(1)
    x = random.integers(0, 64, size=(20_000, 6), chunks=(5_000, 6)).astype("float32")
    if gpu:
        from cupy import asarray

        x = x.map_blocks(asarray)
    y = x[:, 0] * (x[:, 1] > 31) - 2 * x[:, 2]
    x, y = client.persist([x, y])  # made once, for training and prediction
    data = dxgb.DaskDMatrix(client, x, y)
    params = {"objective": "reg:squarederror", "max_depth": 6, "eta": 0.3, "device": "cuda" if gpu else "cpu"}
    trained = dxgb.train(client, params, data, num_boost_round=20, evals=[(data, "train")], verbose_eval=False)
    rmse = trained["history"]["train"]["rmse"]
    print(f"root mean square error {rmse[0]:.2f} after 1 round, {rmse[-1]:.2f} after {len(rmse)}")
    predicted = dxgb.predict(client, trained, x).compute()
    return np.asarray(predicted.get() if gpu else predicted)


def main() -> int:
    """Return 0 if the predictions are near the function that was learned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="real GPUs; needs CuPy")
    options = parser.parse_args()
    with Client() as client:  # the cluster's line: the run's cluster, or distributed's LocalCluster
        predicted = compute(client, options.gpu)
    print(f"{len(predicted)} predictions, mean {predicted.mean():.3f}")
    return int(not -60 < predicted.mean() < -35)


if __name__ == "__main__":
    sys.exit(main())

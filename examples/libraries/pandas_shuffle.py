# hpcgpu run --gpus sim:2 examples/libraries/pandas_shuffle.py
"""Data frames of pandas, joined and grouped by a p2p shuffle.

--gpu takes cuDF's frames on real GPUs, by Dask's own setting.
"""

from __future__ import annotations

import argparse
import sys

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
from distributed import Client

KEYS = 5_000


def orders(part: int) -> pd.DataFrame:
    """Return a partition of orders, always the same ones."""
    random = np.random.default_rng(part)
    return pd.DataFrame({"customer": random.integers(0, KEYS, 20_000), "price": random.integers(1, 100, 20_000)})


def compute(client: Client, gpu: bool = False) -> pd.DataFrame:
    """Return the customers of each country and what they have paid: all rows of a customer meet on one worker."""
    customers = pd.DataFrame({"customer": np.arange(KEYS), "country": np.arange(KEYS) % 7})
    with dask.config.set({"dataframe.backend": "cudf" if gpu else "pandas", "dataframe.shuffle.method": "p2p"}):
        left = dd.from_map(orders, range(8), meta=orders(0).iloc[:0])
        right = dd.from_pandas(customers, npartitions=4)
        if gpu:
            left, right = left.to_backend("cudf"), right.to_backend("cudf")
        joined = left.merge(right, on="customer", how="inner")
        sums = joined.groupby("country").agg({"price": "sum", "customer": "count"}).compute()
    return (sums.to_pandas() if gpu else sums).sort_index()


def main() -> int:
    """Return 0 if no order was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu", action="store_true", help="real GPUs; needs cuDF")
    options = parser.parse_args()
    with Client() as client:  # the cluster's line: the run's cluster, or distributed's LocalCluster
        sums = compute(client, options.gpu)
    print(sums)
    return int(sums["customer"].sum() != 8 * 20_000)


if __name__ == "__main__":
    sys.exit(main())

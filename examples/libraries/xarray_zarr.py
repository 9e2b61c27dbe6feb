# hpcgpu run --gpus sim:2 examples/libraries/xarray_zarr.py
"""Monthly means of a Zarr store with xarray.

All nodes must see --store. --gpu computes on real GPUs: cupy-xarray wraps each block as CuPy's array.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import dask.array as da
import numpy as np
import xarray as xr
from distributed import Client


def write(store: Path) -> None:
    """Write two years of temperatures, made by the workers, in chunks of a month or so."""
    days = np.arange("2024-01-01", "2026-01-01", dtype="datetime64[D]").astype("datetime64[ns]")
    noise = da.random.default_rng(1).normal(scale=3, size=(len(days), 60, 120), chunks=(30, 60, 120))
    season = 15 - 10 * np.cos(2 * np.pi * np.arange(len(days)) / 365.25)
    temperature = xr.DataArray(noise + season[:, None, None], dims=("time", "lat", "lon"), coords={"time": days})
    xr.Dataset({"temperature": temperature}).to_zarr(store, mode="w", consolidated=False)


def compute(client: Client, store: Path, gpu: bool = False) -> xr.DataArray:
    """Return the mean of each month over all years and places."""
    if gpu:
        import cupy_xarray  # noqa: F401 # adds the accessor
    write(store)
    data = xr.open_zarr(store, consolidated=False)["temperature"]
    data = data.cupy.as_cupy() if gpu else data
    means = data.groupby("time.month").mean().compute()
    return means.cupy.as_numpy() if gpu else means


def main() -> int:
    """Return 0 if July is the warmest month and January the coldest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", type=Path, default=Path("temperature.zarr"))
    parser.add_argument("--gpu", action="store_true", help="real GPUs; needs cupy-xarray")
    options = parser.parse_args()
    with Client() as client:  # the cluster's line: the run's cluster, or distributed's LocalCluster
        means = compute(client, options.store, options.gpu)
    by_month = means.mean(("lat", "lon")).values
    print(" ".join(f"{value:.1f}" for value in by_month))
    return int((by_month.argmin(), by_month.argmax()) not in ((0, 6), (11, 6)))


if __name__ == "__main__":
    sys.exit(main())

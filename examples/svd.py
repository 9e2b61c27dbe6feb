"""Tall-and-skinny SVD on the GPUs of a cluster, checked on the host.

hpcgpu run --gpus sim:4 examples/svd.py                 # four simulated GPUs, on this machine
hpcgpu launch examples/svd.py --cupy                    # real ones, in an allocation
sbatch jobscripts/slurm.sbatch examples/svd.py --cupy   # the same as a batch job
"""

from __future__ import annotations

import argparse
import sys

import dask.array as da
import numpy as np
from distributed import Client

import hpcgpu
from hpcgpu.sim import asarray, register


def main() -> int:
    """Return 0 if the singular values are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--cupy", action="store_true", help="real GPUs, through CuPy")
    options = parser.parse_args()
    if options.cupy:
        from cupy import asarray as to_device
    else:
        register()
        to_device = asarray

    with Client() as client:
        print(hpcgpu.bindings(client))
        x = da.random.default_rng(1).random((options.rows, 100), chunks=(10_000, 100))
        # kept, so that all of it is there at once: Dask may fuse a block with its QR, and no block is stored then
        _, s, _ = da.linalg.svd(x.map_blocks(to_device).persist())
        found = s.compute().get()
        expected = np.sqrt(np.linalg.eigvalsh((x.T @ x).compute())[::-1])
        worst = float(np.max(np.abs(found - expected) / expected))
        print(f"100 singular values of {options.rows} x 100: largest relative difference {worst:.1e}")
        print(f"spilled: {hpcgpu.memory(client).moved}")
        return 0 if worst < 1e-8 else 1


if __name__ == "__main__":
    sys.exit(main())

"""A computation that goes on after its job was requeued, or ended at its time limit, and was submitted again.

hpcgpu run --gpus sim:4 examples/checkpoint.py --folder run1
sbatch --requeue jobscripts/slurm.sbatch examples/checkpoint.py --cupy --folder /scratch/me/run1
"""

from __future__ import annotations

import argparse
from typing import Any

import dask.array as da
from distributed import Client

from hpcgpu import Checkpoint


def main() -> int:
    """Return 0 if the result is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="run1", help="of the checkpoint; all nodes see it")
    parser.add_argument("--size", type=int, default=2000, help="rows of the matrix")
    parser.add_argument("--chunks", type=int, default=8, help="in each dimension")
    parser.add_argument("--cupy", action="store_true", help="real GPUs, through CuPy")
    options = parser.parse_args()
    chunk = max(options.size // options.chunks, 1)
    x = da.random.default_rng(1).random((options.size, options.size), chunks=chunk).map_blocks(_to_device, options.cupy)
    with Client(), Checkpoint(options.folder) as checkpoint:
        before = {row.name: row.done for row in checkpoint.progress().rows}.get("product", 0)
        product = checkpoint.persist(x @ x.T, name="product")
        trace = float(da.trace(product).map_blocks(_to_host).compute())
        squares = float((x**2).sum().map_blocks(_to_host).compute())
        checkpoint.flush()
        print(f"{before} chunks were there\n{checkpoint.progress()}")
    print("the trace is right" if abs(trace - squares) < 1e-6 * squares else f"{trace} is not {squares}")
    return int(abs(trace - squares) >= 1e-6 * squares)


def _to_device(block: Any, cupy: bool) -> Any:
    if cupy:
        from cupy import asarray
    else:
        from hpcgpu.sim import asarray
    return asarray(block)


def _to_host(block: Any) -> Any:
    return block.get() if hasattr(block, "get") else block


if __name__ == "__main__":
    raise SystemExit(main())

"""A computation that goes on where it was when its job ended: at its time limit, by a requeue, or by a kill.

hpcgpu run --gpus sim:4 examples/resume.py --folder run1
sbatch --requeue jobscripts/slurm.sbatch --requeue examples/resume.py --cupy --folder /scratch/me/run1
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from distributed import Client

from hpcgpu import Checkpoint


def main() -> int:
    """Return 0 if the result is right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="run1", help="of the checkpoint; all nodes see it")
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=0.0, help="that each chunk takes longer")
    parser.add_argument("--ran", default="", help="a file that gets a line for each chunk that is computed")
    parser.add_argument("--cupy", action="store_true", help="real GPUs, through CuPy")
    options = parser.parse_args()
    x = da.arange(options.chunks, chunks=1).map_blocks(
        _step, options.cupy, options.seconds, options.ran, chunks=(1 << 16,), dtype=float, meta=np.empty(0)
    )
    with Client(), Checkpoint(options.folder) as checkpoint:
        before = {row.name: row.done for row in checkpoint.progress().rows}.get("x", 0)
        print(f"{before} of {options.chunks} chunks are there", flush=True)
        x = checkpoint.persist(x, name="x")
        total = float(x.map_blocks(_to_host, dtype=float).sum().compute())
        print(checkpoint.progress())
    right = sum(float(np.sqrt(np.arange(1 << 16) + number).sum()) for number in range(options.chunks))
    print("the sum is right" if abs(total - right) < 1e-9 * right else f"{total} is not {right}")
    return int(abs(total - right) >= 1e-9 * right)


def _step(block: Any, cupy: bool, seconds: float, ran: str) -> Any:
    if cupy:
        from cupy import asarray
    else:
        from hpcgpu.sim import asarray
    time.sleep(seconds)
    if ran:
        with Path(ran).open("a") as file:
            file.write(f"{block[0]}\n")
    return asarray(np.sqrt(np.arange(1 << 16) + block[0]))


def _to_host(block: Any) -> Any:
    return block.get() if hasattr(block, "get") else block


if __name__ == "__main__":
    raise SystemExit(main())

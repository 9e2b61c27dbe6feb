"""What only a GPU can tell, in measurements of less than 30 s each: ``python benchmarks/gpu_first_hour.py NAME ...``.

``order``: wrong results of kernels that are late on a stream of their own, while their arrays are spilled, dropped and
brought up. ``rescues``: allocations of one library that need the memory of another one's values. ``full``: what a
process can still do on a device that is full. ``pool``: who holds memory before and after spilling. ``errors``: what
becomes of a worker after an illegal address, and of a graph that is captured during spilling. ``copies``: bytes per
second of the store's copies, beside a bare ``cuMemcpyAsync`` and CuPy's. ``pinned``: what page-locked memory costs.
``lag``: how late the event loop is while kernels run. ``contexts``: which processes open the GPU; forks. ``torch``:
a model's tensors. ``shared``: two workers on one GPU; resident memory without cuda.bindings. ``small``: 10,000 small
arrays. ``killed``: when a killed process's memory is free. ``starts``: from nothing to the first result. ``waiting``:
CPU time of a thread that waits for the device. ``peers``: another process's page-locked memory, and its device memory
by CUDA IPC: reads, seconds to open and close, and what is left when that process ends. ``memcheck``: the store's tests
under NVIDIA's compute-sanitizer.

The second hour: ``lost``: whose errors tell that the GPU is lost. ``lock``: pages locked by cuMemHostAlloc and as the
store does, and the launches that wait for it. ``stage``: copies beyond that memory. ``mixed``: spilling of many sizes.
``stall``: allocations while the store gives memory back under a kernel. ``jax``: what JAX takes, and which of its
arrays count. ``ucx``: device memory between two workers. ``beside``: spilling by dask-cuda's worker, and by hpcgpu's.

One JSON line per figure. Without a GPU or a library the value is null, and ``why`` says what is missing. A measurement
may leave an error on the device: each one is a process of its own.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Mapping

import _first_hour

ROOMS: Mapping[str, str] = {
    **dict.fromkeys(("order", "copies", "pinned", "small", "waiting"), "_first_hour_copies"),
    **dict.fromkeys(("rescues", "full", "pool", "torch", "shared"), "_first_hour_memory"),
    "peers": "_first_hour_peers",
    **dict.fromkeys(("lost", "jax", "lock", "stage", "mixed", "stall", "ucx", "beside"), "_second_hour"),
    **dict.fromkeys(("errors", "lag", "contexts", "killed", "starts", "memcheck"), "_first_hour_processes"),
}


def main(names: list[str]) -> int:
    """Measure what is named, or all, each in a process of its own; return the worst exit code."""
    if unknown := [name for name in names if name not in ROOMS]:
        sys.exit(f"no such measurement: {', '.join(unknown)}; there are {', '.join(ROOMS)}")
    if len(names) == 1:
        if why := _first_hour.why_no_gpu():
            _first_hour.say(names[0], names[0], why, "")
            return 0
        getattr(importlib.import_module(ROOMS[names[0]]), names[0])()
        return 0
    return max(subprocess.run([sys.executable, __file__, name]).returncode for name in names or ROOMS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

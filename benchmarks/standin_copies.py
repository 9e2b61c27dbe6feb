"""Copies between a GPU and the host, counted on the stand-in for NVIDIA's driver: no GPU is needed.

In the environment of ``make cupy``: ``.venv-cupy/bin/python benchmarks/standin_copies.py``. One JSON line per figure.
The stand-in (``tests/support/fake_cuda.c``) has finished what it is asked about, as a fast GPU has. ``calls``: calls of
the driver for one copy. ``cpu_us``: CPU time of the process for one copy, with that of the copy itself. ``locks``:
calls that lock host memory. ``longest_ms``: how long one of these kept all other calls waiting, launches of kernels
among them. CuPy's own ``get`` and ``set`` stand beside the store's copies, on the same stand-in.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _first_hour import MIB, say

KIB = 2**10
SUPPORT = Path(__file__).parents[1] / "tests/support"
MOVES, ROUNDS = 200, 2000


def empty(nbytes: int) -> np.ndarray:
    """Return memory for a copy."""
    return np.empty(nbytes, np.uint8)


def figures(driver: Any, case: str, who: str, copy: Callable[[], object], rounds: int) -> None:
    """Say what one copy takes."""
    copy()
    before, begin_s = driver.count("calls"), time.process_time()
    for _ in range(rounds):
        copy()
    cpu_us = (time.process_time() - begin_s) / rounds * 1e6
    say(case, "calls", (driver.count("calls") - before) / rounds, "calls", who=who, runs=rounds)
    say(case, "cpu_us", cpu_us, "us", who=who, runs=rounds)


def mixed(driver: Any, by: Any, pointer: int) -> None:
    """Say how often memory is locked while 200 arrays of 1 to 8 MiB move down and go again, in 64 MiB."""
    random, roots = np.random.default_rng(0), list[np.ndarray]()
    by._host.limit_bytes = 64 * MIB
    before = driver.count("locks")
    for _ in range(MOVES):
        while sum(root.nbytes for root in roots) > 40 * MIB:
            del roots[random.integers(len(roots))]
        roots.append(by.to_host(pointer, int(random.integers(MIB, 8 * MIB)), empty))
    say("200 moves of 1 to 8 MiB", "locks", driver.count("locks") - before, "calls")


def measure() -> None:
    """Measure in this process, which has the stand-in."""
    sys.path.insert(0, str(SUPPORT))
    import cupy
    from fake_cuda import Standin

    from hpcgpu.spill.devices.copies import DriverCopies

    driver, by = Standin(), DriverCopies(0)
    stream = cupy.cuda.Stream(non_blocking=True)
    for name, nbytes, rounds in (("64 KiB", 64 * KIB, ROUNDS), ("4 MiB", 4 * MIB, 200), ("128 MiB", 128 * MIB, 5)):
        array, host = cupy.empty(nbytes, "u1"), np.zeros(nbytes, np.uint8)
        pointer, root = int(array.data.ptr), by.to_host(int(array.data.ptr), nbytes, empty)
        figures(driver, f"{name} down", "hpcgpu", lambda p=pointer, n=nbytes: by.to_host(p, n, empty), rounds)
        figures(driver, f"{name} up", "hpcgpu", lambda p=pointer, r=root: by.to_device(r, p, 0), rounds)
        figures(driver, f"{name} down", "CuPy", lambda a=array: a.get(stream=stream), rounds)
        figures(driver, f"{name} up", "CuPy", lambda a=array, h=host: a.set(h, stream=stream), rounds)
        del array, root
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
    pointer = int(cupy.empty(160 * MIB, "u1").data.ptr)
    mixed(driver, DriverCopies(0), pointer)
    say("all of these", "longest_ms", driver.count("longest") / 1000, "ms")


def main() -> int:
    """Measure in a process that finds the stand-in first."""
    if sys.argv[1:] == ["here"]:
        measure()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library = ["-shared", "-fPIC", "-O1", "-pthread", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"]
        subprocess.run(["gcc", *library, str(SUPPORT / "fake_cuda.c")], check=True)
        env = {**os.environ, "LD_LIBRARY_PATH": folder, "FAKE_CUDA_PROMPT": "1", "FAKE_CUDA_BYTES": str(512 * MIB)}
        return subprocess.run([sys.executable, __file__, "here"], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

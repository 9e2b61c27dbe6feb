"""Copies between a GPU and the host, counted on the stand-in for NVIDIA's driver: no GPU is needed.

In the environment of ``make cupy``, which ``python scripts/bench.py standin_copies`` takes. The stand-in
(``tests/support/fake_cuda.c``) has finished what it is asked about, as a fast GPU has. CuPy's own ``get`` and ``set``
stand beside the store's copies, on the same stand-in; its ``get`` copies straight to ordinary memory, for which a real
driver has stages of its own.

``calls``
    Calls of the driver for one copy.
``cpu_us``
    CPU time of the process for one copy, with that of the copy itself; the two take turns in each run.
``locks``
    Calls that lock host memory, while 200 arrays of 1 to 8 MiB move down and go again, in 64 MiB.
``largest_mib``, ``untouched_mib``
    The most memory that one such call has locked, and how much of all of it the kernel had to make under the driver's
    lock, which keeps all other calls waiting, launches of kernels among them.

One JSON line per figure: the median of five runs, each in a process of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _figures
import numpy as np

KIB, MIB = 2**10, 2**20
SUPPORT = Path(__file__).parents[1] / "tests/support"
SIZES = (("64 KiB", 64 * KIB, 2000), ("4 MiB", 4 * MIB, 200), ("128 MiB", 128 * MIB, 5))  # and how many copies
MOVES, MIXED = 200, "200 moves of 1 to 8 MiB"
UNITS = {"calls": "calls", "cpu_us": "us", "locks": "calls", "largest_mib": "MiB", "untouched_mib": "MiB"}


def empty(nbytes: int) -> np.ndarray:
    """Return memory for a copy."""
    return np.empty(nbytes, np.uint8)


def say(case: str, who: str, measure: str, value: float) -> None:
    """Print a value of this process's run."""
    print(json.dumps([case, who, measure, value]), flush=True)


def figures(driver: Any, case: str, who: str, copy: Callable[[], object], rounds: int) -> None:
    """Say what one copy takes."""
    copy()
    before, begin_s = driver.count("calls"), time.process_time()
    for _ in range(rounds):
        copy()
    say(case, who, "cpu_us", (time.process_time() - begin_s) / rounds * 1e6)
    say(case, who, "calls", (driver.count("calls") - before) / rounds)


def mixed(driver: Any, by: Any, pointer: int) -> None:
    """Say what is locked while many arrays move."""
    random, roots = np.random.default_rng(0), list[np.ndarray]()
    by._host.limit_bytes = 64 * MIB
    before, made = driver.count("locks"), driver.count("untouched")
    for _ in range(MOVES):
        while sum(root.nbytes for root in roots) > 40 * MIB:
            del roots[random.integers(len(roots))]
        roots.append(by.to_host(pointer, int(random.integers(MIB, 8 * MIB)), empty))
    say(MIXED, "hpcgpu", "locks", driver.count("locks") - before)
    say(MIXED, "hpcgpu", "untouched_mib", (driver.count("untouched") - made) / MIB)
    say(MIXED, "hpcgpu", "largest_mib", driver.count("largest") / MIB)


def measure() -> None:
    """Measure in this process, which has the stand-in."""
    sys.path.insert(0, str(SUPPORT))
    import cupy
    from fake_cuda import Standin

    from hpcgpu.spill.devices.copies import DriverCopies

    driver, by = Standin(), DriverCopies(0)
    stream = cupy.cuda.Stream(non_blocking=True)
    for name, nbytes, rounds in SIZES:
        array, host = cupy.empty(nbytes, "u1"), np.zeros(nbytes, np.uint8)
        pointer, root = int(array.data.ptr), by.to_host(int(array.data.ptr), nbytes, empty)
        figures(driver, f"{name} down", "hpcgpu", lambda p=pointer, n=nbytes: by.to_host(p, n, empty), rounds)
        figures(driver, f"{name} down", "CuPy", lambda a=array: a.get(stream=stream), rounds)
        figures(driver, f"{name} up", "hpcgpu", lambda p=pointer, r=root: by.to_device(r, p, 0), rounds)
        figures(driver, f"{name} up", "CuPy", lambda a=array, h=host: a.set(h, stream=stream), rounds)
        del array, root
        gc.collect()
        cupy.get_default_memory_pool().free_all_blocks()
    mixed(driver, DriverCopies(0), int(cupy.empty(160 * MIB, "u1").data.ptr))


def main() -> None:
    """Measure in processes that find the stand-in first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        measure()
        return
    found: dict[tuple[str, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = ["-shared", "-fPIC", "-O1", "-pthread", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1"]
        subprocess.run(["gcc", *library, str(SUPPORT / "fake_cuda.c")], check=True)
        env = {**os.environ, "LD_LIBRARY_PATH": folder, "FAKE_CUDA_PROMPT": "1", "FAKE_CUDA_BYTES": str(512 * MIB)}
        for _ in range(options.runs):
            argv = [sys.executable, __file__, "--here"]
            done = subprocess.run(argv, env=env, check=True, stdout=subprocess.PIPE, text=True)
            for line in done.stdout.splitlines():
                *key, value = json.loads(line)
                found.setdefault(tuple(key), []).append(value)
    for (case, who, name), values in found.items():
        _figures.report("standin_copies", case, who, name, values, UNITS[name])


if __name__ == "__main__":
    main()

"""What the measurements of ``gpu_first_hour.py`` share: figures, late kernels, a store, a device with little room."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MIB, GIB = 2**20, 2**30
LATE = r"""
extern "C" __global__ void late_copy(const unsigned char *from, unsigned char *to, long long n, long long wait_ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); while (now - begin < wait_ns);
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * (long long)blockDim.x)
        to[i] = from[i];
}
"""
HOLD = """
import sys
from cuda.bindings import driver as d
def call(name, *a):
    status, *values = getattr(d, name)(*a)
    if status: sys.exit(f"{name}: {status.name}")
    return values[0] if len(values) == 1 else values
call("cuInit", 0)
call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
free, total = call("cuMemGetInfo")
call("cuMemAlloc", int(free - LEAVE) if LEAVE >= 0 else int(-LEAVE))
print("held", flush=True)
sys.stdin.read()
"""


def say(case: str, measure: str, value: float | str, unit: str, *, who: str = "hpcgpu", runs: int = 1) -> None:
    """Print a figure; text in place of a value says why there is none."""
    figure = {"bench": "gpu_first_hour", "case": case, "who": who, "measure": measure, "unit": unit}
    if isinstance(value, str):
        figure |= {"value": None, "runs": 0, "why": value}
    else:
        figure |= {"value": float(f"{value:.5g}") if math.isfinite(value) else None, "runs": runs}
    print(json.dumps(figure), flush=True)


def why_no_gpu() -> str:
    """Return why nothing can be measured here; asked in a process of its own, since this one may fork yet."""
    source = "import cupy; cupy.zeros(1).get(); from cuda.bindings import driver"
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    return "" if done.returncode == 0 else f"not measured: {(done.stderr.strip() or 'it crashed').splitlines()[-1]}"


def lacks(case: str, module: str, unit: str = "") -> bool:
    """Tell whether a library is not installed, and say so."""
    if importlib.util.find_spec(module) is not None:
        return False
    say(case, module, f"not measured: {module} is not installed", unit, who=module)
    return True


@contextlib.contextmanager
def store(device_limit: float | str, memory_limit: int | None = None, **options: Any) -> Iterator[Any]:
    """Give a store of its own."""
    from hpcgpu.spill import GpuSpillBuffer

    with tempfile.TemporaryDirectory() as folder:
        made = GpuSpillBuffer(device_limit, memory_limit, folder, quiet=True, **options)
        try:
            yield made
        finally:
            made.close()


def spill_all(spilling: Any) -> None:  # a store
    """Let an allocation that nobody can have move all down, without waiting for room."""
    from hpcgpu.spill.devices.cuda import CudaDevice

    hook: Any = CudaDevice.current(0).on_alloc_failure
    while hook.evict(2**50):
        pass
    spilling.settle(20)


def filled(nbytes: int, value: int) -> Any:  # CuPy's
    """Return an array without a kernel or a copy."""
    import cupy

    array = cupy.empty(nbytes, "u1")
    array.data.memset(value, nbytes)
    return array


def late_copy(source: Any, target: Any, stream: Any, wait_s: float) -> None:  # CuPy's
    """Start a kernel that waits on the device, and then copies bytes."""
    import cupy

    kernel = cupy.RawKernel(LATE, "late_copy")
    with stream:
        kernel((32,), (256,), (source.view("u1"), target.view("u1"), source.nbytes, int(wait_s * 1e9)))


def spin(stream: Any, wait_s: float) -> None:  # CuPy's
    """Keep a stream busy."""
    import cupy

    byte = cupy.empty(2, "u1")
    late_copy(byte[:1], byte[1:], stream, wait_s)


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def nvml_used_bytes() -> int:
    """Return the memory in use of the first GPU, of all processes."""
    return int(_nvml_memory().used)


def nvml_total_bytes() -> int:
    """Return the memory of the first GPU."""
    return int(_nvml_memory().total)


def _nvml_memory() -> Any:
    import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))


def resident_bytes() -> int:
    """Return this process's resident memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def held(leave_bytes: int) -> Iterator[subprocess.Popen[str]]:
    """Let another process hold all device memory but so much; or, if it is less than 0, so much of it."""
    argv = [sys.executable, "-c", HOLD.replace("LEAVE", str(leave_bytes))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if not process.stdout or process.stdout.readline() != "held\n":
                raise RuntimeError("the process that is to hold device memory has failed")
            yield process
        finally:
            process.kill()

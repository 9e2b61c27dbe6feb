"""Measurements of workers and other processes: see ``gpu_first_hour.py``."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from _first_hour import GIB, MIB, held, lacks, say, seconds, spin

SLOWNESS = float(os.environ.get("HPCGPU_SLOWNESS") or 1)  # as of tests on a busy machine
BAD = r"""
extern "C" __global__ void bad(unsigned char *p) { p[(1ll << 44) + threadIdx.x] = 1; }
"""
ERRORS = """
import json, time, cupy, numpy as np
import _first_hour_processes as m
from distributed import Client, wait
from hpcgpu import LocalGPUCluster

if __name__ == "__main__":
    with LocalGPUCluster() as cluster, Client(cluster) as client:
        values = client.map(m.block, range(20))
        wait(values)
        pids = client.run(m.pid)
        text, begin = "", time.perf_counter()
        try:
            client.submit(m.break_it, retries=0).result(timeout=10)
        except Exception as e:
            text = f"{type(e).__name__}: {e}"
        told_s, good_s = time.perf_counter() - begin, -1.0
        while time.perf_counter() - begin < 15:
            try:
                ok = client.submit(m.last, values[3], pure=False).result(timeout=3) == 3
                good_s = time.perf_counter() - begin if ok else -2.0
                break
            except Exception as e:
                text += f" | {type(e).__name__}: {e}"
                time.sleep(0.2)
        new = list(client.run(m.pid).values()) != list(pids.values())
    print(text[:3000])
    print(json.dumps({"told_s": told_s, "next_result_s": good_s, "new_worker": float(new)}))
"""
LAG = """
import json, time
import _first_hour_processes as m
import spill
from distributed import Client, LocalCluster, wait
from hpcgpu.spill.distributed.plugin import SpillPlugin
from hpcgpu.spill import GpuSpillBuffer

if __name__ == "__main__":
    data = (GpuSpillBuffer, {"device_memory_limit": "1GiB"})
    with LocalCluster(n_workers=2, threads_per_worker=2, data=data, dashboard_address=":0") as cluster, \\
            Client(cluster) as client:
        client.register_plugin(SpillPlugin(), name="hpcgpu")
        first, second = sorted(client.scheduler_info()["workers"])
        values = client.map(m.tiny, range(100), workers=[first], pure=False)
        buffers = client.map(m.buffer, range(100), workers=[first], pure=False)
        wait([*values, *buffers])
        assert all(future.status == "finished" for future in [*values, *buffers])
        out = {}
        for case in ("a peer asks", "buffers are deleted"):
            client.run(spill.start_ticking, 0.002)
            busy = client.submit(m.keep_busy, 2.0, workers=[first], pure=False)
            time.sleep(0.2)
            if case == "a peer asks":
                assert client.submit(m.total, values, workers=[second], pure=False).result(20) == sum(range(100))
            else:
                del buffers
            busy.result(20)
            late = client.run(spill.stop_ticking)
            for name, worker in (("asked", first), ("asking", second)):
                ms = [1000 * s for s in sorted(late[worker])]
                out[f"{case}, {name}"] = {"lag_p99_ms": ms[int(0.99 * len(ms))], "lag_max_ms": ms[-1]}
    print(json.dumps(out))
"""
CONTEXTS = """
import json, os, pynvml, psutil
import _first_hour_processes as m
from distributed import Client, wait
from hpcgpu import LocalGPUCluster

if __name__ == "__main__":
    with LocalGPUCluster() as cluster, Client(cluster) as client:
        futures = client.map(m.block, range(4))
        wait(futures)
        workers = set(client.run(m.pid).values())
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pids = {p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        mode = pynvml.nvmlDeviceGetComputeMode(handle)
    print(json.dumps({"processes": len(pids), "workers": len(workers), "other": len(pids - workers), "mode": mode}))
"""
FORKS = """
import json, os, sys
import pynvml
pynvml.nvmlInit(); pynvml.nvmlDeviceGetCount()
for name in ("torch", "rmm"):
    try:
        __import__(name)
    except ImportError:
        pass
child = os.fork()
if not child:
    import cupy
    pynvml.nvmlInit()
    ok = pynvml.nvmlDeviceGetCount() > 0 and int(cupy.full(10, 3).sum()) == 30
    if "torch" in sys.modules:
        ok = ok and int(sys.modules["torch"].ones(4, device="cuda").sum()) == 4
    os._exit(0 if ok else 1)
print(json.dumps({"works": float(os.waitpid(child, 0)[1] == 0)}))
"""
START = """
import json, time
begin = time.perf_counter()
def since():
    global begin
    took, begin = time.perf_counter() - begin, time.perf_counter()
    return took
out = {}
from cuda.bindings import driver
out["import_bindings_s"] = since()
driver.cuInit(0); out["init_s"] = since()
_, device = driver.cuDeviceGet(0)
_, context = driver.cuDevicePrimaryCtxRetain(device); driver.cuCtxSetCurrent(context); out["context_s"] = since()
import cupy; out["import_cupy_s"] = since()
x = cupy.arange(1000); (x * 2).sum().get(); out["first_kernels_s"] = since()
print(json.dumps(out))
"""
FIRST_TASK = """
import time
from distributed import Client
import _first_hour_processes as m
if __name__ == "__main__":
    with Client() as client:
        print(client.submit(m.last, client.submit(m.block, 5)).result())
"""


def printed(source: str, *, limit_s: float = 25.0, **env: str) -> dict[str, Any] | str:
    """Run a program that prints JSON last, and return that; text: why there is none."""
    argv, folder = [sys.executable, "-c", source], str(Path(__file__).parent)
    paths = os.pathsep.join((folder, os.environ.get("PYTHONPATH", "")))
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=limit_s * SLOWNESS,
            env={**os.environ, "PYTHONPATH": paths, **env},
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {limit_s:.0f} s"
    sys.stderr.write(done.stderr)
    if done.returncode:
        return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def say_all(case: str, found: dict[str, Any] | str, units: dict[str, str], who: str = "hpcgpu") -> None:
    """Say each figure of a program, or why there is none."""
    for measure, unit in units.items():
        say(case, measure, f"failed: {found}" if isinstance(found, str) else found[measure], unit, who=who)


def block(i: int) -> Any:  # CuPy's
    """Return an array; a task of these measurements, as those that follow."""
    import cupy

    return cupy.asarray(np.full(MIB, i, "u1"))


def last(array: Any) -> int:  # CuPy's
    """Return the last value."""
    return int(array[-1])


def pid() -> int:
    """Return the worker's process."""
    return os.getpid()


def break_it() -> None:
    """Write to an illegal address."""
    import cupy

    cupy.RawKernel(BAD, "bad")((1,), (32,), (cupy.zeros(1, "u1"),))
    cupy.cuda.Device().synchronize()


def errors() -> None:
    """Break a worker's context; capture a graph while the store spills."""
    units = {"told_s": "s", "next_result_s": "s, -1: none in 15 s", "new_worker": "1: yes"}
    say_all("a task writes to an illegal address", printed(ERRORS, limit_s=35), units)
    for who, module in {"CuPy": "cupy", "torch": "torch"}.items():
        case = f"a graph of {who} is captured during spilling"
        if not lacks(case, module):
            source = f"import _first_hour_processes as m; m.capture_{module}()"
            say_all(case, printed(source), {"captured": "1: yes", "wrong_results": "of 8", "trouble": "entries"})


def capture_cupy() -> None:
    """Capture a graph of CuPy in the strictest way, while the store moves values down."""
    import cupy

    stream, array = cupy.cuda.Stream(non_blocking=True), cupy.zeros(MIB, "f4")

    def capture() -> None:
        with stream:
            cupy.multiply(array, 2, out=array)
            stream.synchronize()
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            time.sleep(1.0)
            cupy.multiply(array, 2, out=array)
            stream.end_capture().launch()
            stream.synchronize()

    _captured(capture)


def capture_torch() -> None:
    """Capture a graph of torch while the store moves values down."""
    import torch

    graph, array = torch.cuda.CUDAGraph(), torch.zeros(MIB, device="cuda")
    array *= 2
    torch.cuda.synchronize()

    def capture() -> None:
        with torch.cuda.graph(graph):
            time.sleep(1.0)
            array.mul_(2)
        graph.replay()
        torch.cuda.synchronize()

    _captured(capture)


def _captured(capture: Any) -> None:
    from _first_hour import store

    with store("2MiB") as spilling:
        arrays = [block(i) for i in range(8)]
        for i, array in enumerate(arrays):
            spilling[i] = array
        del array
        arrays.clear()  # from here on the spill thread moves them
        captured = 1.0
        try:
            capture()
        except Exception as e:  # of either library
            captured = 0.0
            print(f"the capture failed: {type(e).__name__}: {e}", file=sys.stderr)
        spilling.settle(10)
        wrong = 0
        for i in range(8):
            try:
                wrong += last(spilling[i]) != i
            except Exception as e:  # that a value is lost is a result here
                wrong += 1
                print(f"value {i}: {type(e).__name__}: {e}", file=sys.stderr)
        print(json.dumps({"captured": captured, "wrong_results": wrong, "trouble": len(spilling.trouble)}))


def tiny(i: int) -> Any:  # CuPy's
    """Return 100 KB."""
    import cupy

    return cupy.asarray(np.full(100_000, i, "u1"))


def buffer(i: int) -> Any:  # cuda.core's
    """Return a Buffer of cuda.core."""
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    return device.allocate(100_000 + i, stream=device.default_stream)


def total(arrays: Sequence[Any]) -> int:
    """Return the sum of the last values."""
    return sum(map(last, arrays))


def keep_busy(wait_s: float) -> None:
    """Keep the device busy, and wait for it."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    spin(stream, wait_s)
    stream.synchronize()


def lag() -> None:
    """Say how late the event loops are, as benchmarks/spill.py does."""
    found = printed(LAG, limit_s=30)
    units = {"lag_p99_ms": "ms", "lag_max_ms": "ms"}
    if isinstance(found, str):
        say_all("event loops during kernels of 2 s", found, units)
        return
    for case, figures in found.items():
        say_all(f"{case}, during a kernel of 2 s", figures, units)


def contexts() -> None:
    """Say which processes open the GPU, and whether a child can after NVML, torch and RMM were imported."""
    units = {"processes": "processes", "workers": "processes", "other": "processes", "mode": "NVML's number"}
    say_all("processes with a context", printed(CONTEXTS), units)
    say_all("NVML, torch, RMM; a fork; NVML, CUDA, torch", printed(FORKS), {"works": "1: yes"})


def killed() -> None:
    """Kill a process that holds most of the device; say when as much can be allocated again."""
    import cupy

    free = cupy.cuda.runtime.memGetInfo()[0]
    nbytes = int(0.75 * free)
    with held(-nbytes) as process:
        begin = time.perf_counter()
        process.send_signal(signal.SIGKILL)
        process.wait()
        ended_s = time.perf_counter() - begin
        while True:
            try:
                cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(nbytes))
                break
            except cupy.cuda.runtime.CUDARuntimeError:
                if time.perf_counter() - begin > 25:
                    say("SIGKILL of a process", "free_again_s", "failed: not within 25 s", "s")
                    return
                time.sleep(0.005)
        say(f"SIGKILL of a process with {nbytes / GIB:.0f} GiB", "ended_s", ended_s, "s")
        say(f"SIGKILL of a process with {nbytes / GIB:.0f} GiB", "free_again_s", time.perf_counter() - begin, "s")


def starts() -> None:
    """Say what a first result takes: with nothing compiled before, and with CuPy's kernels in its cache."""
    names = ("import_bindings_s", "init_s", "context_s", "import_cupy_s", "first_kernels_s")
    with tempfile.TemporaryDirectory() as folder:
        for case in ("a new process, CuPy's cache empty", "a new process, CuPy's cache filled"):
            say_all(case, printed(START, CUPY_CACHE_DIR=folder), dict.fromkeys(names, "s"), who="CUDA and CuPy")
        script = Path(folder) / "script.py"
        script.write_text(FIRST_TASK)
        argv = [sys.executable, "-m", "hpcgpu", "run", str(script)]
        paths = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
        env = {**os.environ, "PYTHONPATH": paths}
        took_s = seconds(lambda: subprocess.run(argv, env=env, timeout=40, check=True, stdout=sys.stderr))
        say("hpcgpu run to the end of a first task's script", "wall_s", took_s, "s")


def memcheck() -> None:
    """Run tests of the store under NVIDIA's compute-sanitizer."""
    program = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if program is None:
        say("memcheck", "errors", "not measured: compute-sanitizer is not here", "errors", who="compute-sanitizer")
        return
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "50"]
    tests = ["-k", "not script", "tests/gpu/spill/test_spill_gpu.py"]
    argv = [program, "--tool", "memcheck", "--report-api-errors", "no", "--print-limit", "20", *pytest, *tests]
    done = subprocess.run(argv, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=55, check=False)
    sys.stderr.write(done.stdout + done.stderr)
    counts = [
        line.split("ERROR SUMMARY:")[1].split()[0] for line in done.stdout.splitlines() if "ERROR SUMMARY:" in line
    ]
    found: float | str = float(counts[-1]) if counts else "failed: no summary; see the log"
    say("tests/gpu/spill/test_spill_gpu.py", "errors", found, "errors", who="compute-sanitizer")
    say("tests/gpu/spill/test_spill_gpu.py", "exit_code", float(done.returncode), "exit code", who="compute-sanitizer")

"""Measurements of what is new since the first hour on a GPU: see ``gpu_first_hour.py``."""

from __future__ import annotations

import asyncio
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from _first_hour import GIB, MIB, filled, lacks, nvml_total_bytes, say, seconds, spill_all, spin, store
from _first_hour_processes import printed, say_all

from hpcgpu.spill.devices import copies as copies_module
from hpcgpu.spill.devices.copies import DriverCopies
from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.storage.segments import PAGE_BYTES

PORTABLE = 1
RESULTS, LIMIT = 24, 8  # of beside, in its unit
LOST = """
import json, cupy
from hpcgpu.host.cuda_driver import lasting_error
from hpcgpu.spill.devices.copies import is_lasting
from _first_hour_processes import BAD
from _second_hour import USES
out = {}
try:
    cupy.RawKernel(BAD, "bad")((1,), (32,), (cupy.zeros(1, "u1"),)); cupy.cuda.Device().synchronize()
except Exception as e:
    print(type(e), e)
for name, use in USES.items():
    try:
        use(); out[name] = -1.0
    except ImportError:
        out[name] = -2.0
    except Exception as e:
        print(name, type(e).__module__, type(e).__name__, e)
        out[name] = float(is_lasting(e))
out["driver"] = float(bool(lasting_error()))
print(json.dumps(out))
"""
JAX = """
import json, time, pynvml as n
n.nvmlInit(); h = n.nvmlDeviceGetHandleByIndex(0); used = lambda: n.nvmlDeviceGetMemoryInfo(h).used / 2**30
before = used()
import jax, jax.numpy as np
from hpcgpu.spill.devices.cuda import is_device_array
x = np.ones((16384, 16384), np.float32); x.block_until_ready()
out = {"taken_gib": used() - before}
f = jax.jit(lambda y: jax.lax.fori_loop(0, 60, lambda i, z: z @ x / 16384, y)); f(x).block_until_ready()
y = f(x); begin = time.perf_counter(); out["is_counted"] = float(is_device_array(y))
out["asking_s"] = time.perf_counter() - begin
y.block_until_ready(); out["work_s"] = time.perf_counter() - begin
out["is_bfloat16_counted"] = float(is_device_array(y.astype(np.bfloat16)))
print(json.dumps(out))
"""
UCX = """
import json, time
import numpy as np
import _second_hour as m
from distributed import Client, wait
from hpcgpu import LocalGPUCluster

if __name__ == "__main__":
    out = {"u1_arrives": 0.0, "records_arrive": 0.0, "answers_after_s": -1.0}
    with LocalGPUCluster(gpus=1, workers_per_gpu=2, protocol="ucx", dashboard=False, quiet=True) as c, \\
            Client(c, timeout=40) as client:
        client.wait_for_workers(2, timeout=40)
        a, b = sorted(client.nthreads())
        for name, dtype in (("u1_arrives", "u1"), ("records_arrive", [("x", "<f4"), ("y", "<i4")])):
            x = client.submit(m.made, dtype, workers=[a]); wait(x)
            try:
                kind, total = client.submit(m.looked_at, x, workers=[b], retries=0).result(timeout=20)
                out[name] = float(kind == str(np.dtype(dtype)) and total == (1 << 20) // 256 * sum(range(256)))
            except BaseException as e:
                print(dtype, "does not arrive:", type(e).__name__, str(e)[:150])
        x = client.submit(m.spun, 8.0, workers=[a]); wait(x, timeout=30)
        y = client.submit(np.shape, x, workers=[b]); time.sleep(0.2); begin = time.time()
        client.run(m.nothing, workers=[a]); out["answers_after_s"] = time.time() - begin
    print(json.dumps(out))
"""
BESIDE = """
import json
import _second_hour as m

if __name__ == "__main__":
    print(json.dumps(m.spilled_by(WHO, UNIT)))
"""


def made(dtype: Any) -> Any:  # CuPy's
    """Return an array of a dtype; a task of these measurements, as those that follow."""
    import cupy

    return cupy.asarray(np.arange(1 << 20, dtype="u1").view(dtype))


def looked_at(array: Any) -> tuple[str, int]:
    """Return dtype and sum of the bytes."""
    return str(array.dtype), int(array.get().view("u1").sum())


def spun(wait_s: float) -> Any:  # CuPy's
    """Return an array that the device is busy with."""
    import cupy

    spin(cupy.cuda.Stream.null, wait_s)
    return filled(MIB, 1)


def nothing() -> int:
    """Return at once."""
    return 0


def large(i: int, nbytes: int) -> Any:  # CuPy's
    """Return a result."""
    return filled(nbytes, i % 251)


def _core() -> object:
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    return device.allocate(1 << 24, stream=device.default_stream)


USES: Mapping[str, Callable[[], object]] = {
    "rmm": lambda: __import__("rmm").DeviceBuffer(size=1 << 24),
    "cuda.core": _core,
    "torch": lambda: __import__("torch").ones(9, device="cuda"),
    "numba": lambda: __import__("numba.cuda").cuda.device_array(1 << 22),
}


def lost() -> None:
    """Say whose errors tell a lost GPU by their number, and whether the driver tells it when it is asked."""
    unit = "1: yes; -1: no error, -2: not installed"
    say_all("after an illegal address", printed(LOST), {name: unit for name in (*USES, "driver")})


def jax() -> None:
    """Say what JAX takes of the GPU, and whether the store sees its arrays."""
    if not lacks("JAX's arrays", "jax"):
        units = {"taken_gib": "GiB", "is_counted": "1: yes", "asking_s": "s", "work_s": "s"}
        say_all("JAX's arrays", printed(JAX), units | {"is_bfloat16_counted": "1: yes"}, "JAX")


def lock() -> None:
    """Lock pages by cuMemHostAlloc, and as the store does; and say how long launches of another thread wait."""
    by = DriverCopies(0)
    with by.context():
        for nbytes in (64 * MIB, GIB):
            case = f"{nbytes // MIB} MiB"
            begin = time.perf_counter()
            pointer = int(by.call("cuMemHostAlloc", nbytes, PORTABLE))
            say(case, "cuMemHostAlloc_s", time.perf_counter() - begin, "s", who="CUDA")
            by.call("cuMemFreeHost", pointer)
            for threads in (1, 4, 8):
                _lock_by_threads(by, case, nbytes, threads)
    by._host.limit_bytes = 2 * GIB
    longest, took_s = _launches_during(lambda: [by._host.lock_ahead(GIB) for _ in range(GIB // (64 * MIB))])
    say("1 GiB as the store locks it", "took_s", took_s, "s")
    say("1 GiB as the store locks it", "longest_launch_ms", 1e3 * longest, "ms")


def _lock_by_threads(by: DriverCopies, case: str, nbytes: int, threads: int) -> None:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array, part = np.frombuffer(memory, np.uint8), nbytes // threads
    with ThreadPoolExecutor(threads) as pool:
        parts = [array[i * part : (i + 1) * part : PAGE_BYTES] for i in range(threads)]
        touch_s = seconds(lambda: list(pool.map(lambda each: each.fill(0), parts)))
    register_s = seconds(lambda: by.call("cuMemHostRegister", array.ctypes.data, nbytes, PORTABLE))
    by.call("cuMemHostUnregister", array.ctypes.data)
    say(case, f"touch_s by {threads} threads", touch_s, "s")
    say(case, f"register_s after {threads} threads", register_s, "s")


def _launches_during(work: Callable[[], object]) -> tuple[float, float]:
    """Return the longest launch on another stream during work, and how long that took."""
    import cupy

    times, over, array = [0.0], threading.Event(), filled(MIB, 1)

    def launch() -> None:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            while not over.is_set():
                times.append(seconds(lambda: array.data.memset_async(1, MIB, stream)))
                stream.synchronize()

    thread = threading.Thread(target=launch)
    thread.start()
    took_s = seconds(work)
    over.set()
    thread.join()
    return max(times), took_s


def stage() -> None:
    """Say how fast copies to ordinary memory are, as when no more page-locked memory may be had."""
    copies_module.PINNED_BYTES = 0
    by, nbytes = DriverCopies(0), min(GIB, DriverCopies(0).free_bytes // 2)
    host, array = np.zeros(nbytes, np.uint8), filled(nbytes, 3)
    pointer = int(array.data.ptr)
    for measure, call in {
        "down_gb_per_s": lambda: by.to_host(pointer, nbytes, lambda _: host),
        "up_gb_per_s": lambda: by.to_device(host, pointer, 0),
    }.items():
        say("copies by stages, memory in use", measure, nbytes / min(map(seconds, [call] * 4)) / 1e9, "GB/s", runs=4)


def mixed() -> None:
    """Spill arrays of one size, and of many sizes."""
    random, unit = np.random.default_rng(0), min(64 * MIB, DriverCopies(0).free_bytes // 400)
    for case, is_mixed in {"arrays of one size": False, "arrays of many sizes": True}.items():
        with store(1.0) as spilling:
            moved, took_s = 0, 0.0
            for _ in range(6):
                for i in range(20):
                    spilling[i] = filled(unit * (int(random.integers(1, 8)) if is_mixed else 4), i)
                before = spilling.counters["device_to_host"].nbytes
                took_s += seconds(lambda s=spilling: spill_all(s))
                moved += spilling.counters["device_to_host"].nbytes - before
            say(case, "down_gb_per_s", moved / took_s / 1e9, "GB/s", runs=6)


def stall() -> None:
    """Say how long allocations of CuPy take while the store gives free memory back under a kernel of 2 s."""
    import cupy

    with store(1.0) as spilling:
        spilling["a"] = filled(MIB, 1)
        kept = [filled(64 * MIB, 1) for _ in range(20)]
        kept.clear()
        spin(cupy.cuda.Stream(non_blocking=True), 2.0)
        longest_s, giving = 0.0, threading.Thread(target=CudaDevice.current(0).give_back)
        giving.start()
        while giving.is_alive():
            longest_s = max(longest_s, seconds(lambda: filled(3 * MIB, 1)))
            time.sleep(0.001)
    say("free memory goes back under a kernel of 2 s", "longest_allocation_s", longest_s, "s")


def ucx() -> None:
    """Say whether arrays reach another worker by UCX, and whether a sender under a kernel of 8 s answers."""
    if not lacks("two workers with ucx", "distributed_ucxx"):
        units = {"u1_arrives": "1: yes", "records_arrive": "1: yes", "answers_after_s": "s"}
        say_all("two workers with ucx", printed(UCX, limit_s=110.0), units, "UCX")


def beside() -> None:
    """Spill results of tasks, by a worker of hpcgpu and one of dask-cuda with the same device_memory_limit."""
    units = {"down_gb_per_s": "GB/s", "up_gb_per_s": "GB/s", "is_right": "1: yes"}
    unit = min(256 * MIB, nvml_total_bytes() // 16)
    case = f"{RESULTS} results of {unit // MIB} MiB above a limit of {LIMIT * unit // MIB} MiB"
    for who, module in (("hpcgpu", "hpcgpu"), ("LocalCUDACluster", "dask_cuda")):
        if not lacks(case, module, "GB/s"):
            program = BESIDE.replace("WHO", repr(who)).replace("UNIT", str(unit))
            say_all(case, printed(program, limit_s=60.0), units, who)


def spilled_by(who: str, unit: int) -> dict[str, float]:
    """Return the rates at which a cluster's worker spills what tasks return, and brings it up for others."""
    from distributed import Client, wait

    limits: dict[str, Any] = {"device_memory_limit": LIMIT * unit, "memory_limit": 4 * RESULTS * unit}
    if who == "hpcgpu":
        from hpcgpu import LocalGPUCluster

        made_cluster = LocalGPUCluster(gpus=1, dashboard=False, quiet=True, **limits)
    else:
        from dask_cuda import LocalCUDACluster

        made_cluster = LocalCUDACluster(n_workers=1, dashboard_address=None, **limits)
    number = RESULTS - LIMIT
    with made_cluster as cluster, Client(cluster) as client:
        client.submit(large, 0, unit, pure=False).result()  # the context, and what is compiled
        begin = time.perf_counter()
        futures = client.map(large, range(RESULTS), nbytes=unit, pure=False)
        wait(futures)
        if who == "hpcgpu":  # it moves while tasks run on, dask-cuda before a task is over
            client.run(settled)
        down_s = time.perf_counter() - begin
        begin = time.perf_counter()
        firsts = client.gather(client.map(_first, futures[:number], pure=False))
        up_s = time.perf_counter() - begin
    rates = {"down_gb_per_s": number * unit / down_s / 1e9, "up_gb_per_s": number * unit / up_s / 1e9}
    return {**rates, "is_right": float(firsts == list(range(number)))}


async def settled(dask_worker: Any) -> None:
    """Wait until the store has moved what it has to."""
    await asyncio.to_thread(dask_worker.data.settle)


def _first(array: Any) -> int:
    return int(array[:1].get()[0])

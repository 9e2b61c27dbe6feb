"""Measurements of copies and of their order: see ``gpu_first_hour.py``."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from _first_hour import GIB, MIB, filled, late_copy, resident_bytes, say, seconds, spill_all, spin, store

from hpcgpu.spill.devices import copies as copies_module
from hpcgpu.spill.devices.copies import DriverCopies

SIZES = {"64 KiB": 64 << 10, "1 MiB": MIB, "64 MiB": 64 * MIB, "1 GiB": GIB}
ROUNDS, LATE_S, ORDER_S = 33, 0.05, 20.0


def order() -> None:
    """Count results that are wrong."""
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    for case, one in {"dirty spill": _dirty, "clean drop": _clean, "copy up": _up}.items():
        wrong, rounds, end = 0, 0, time.monotonic() + ORDER_S / 3
        while rounds < ROUNDS and time.monotonic() < end:
            wrong += not one(cupy, stream, rounds % 100 + 1)
            rounds += 1
        say(f"{case} while a kernel runs", "wrong_results", wrong, f"of {rounds}", runs=rounds)


def _filled(cupy: Any, value: int) -> Any:
    array = cupy.asarray(np.full(MIB, value, "u1"))
    cupy.cuda.Device().synchronize()
    return array


def _dirty(cupy: Any, stream: Any, value: int) -> bool:
    """Spill an array into which a kernel has still to write."""
    with store("4MiB") as spilling:
        source, array = _filled(cupy, value), _filled(cupy, 0)
        late_copy(source, array, stream, LATE_S)
        spilling["a"] = array
        del array
        for i in range(8):
            spilling[i] = _filled(cupy, 200 + i)
        spilling.settle(20)
        return bool((spilling["a"].get() == value).all())


def _clean(cupy: Any, stream: Any, value: int) -> bool:
    """Drop an array with a copy in host memory that a kernel has still to read, and use its memory again."""
    with store("4MiB") as spilling:
        spilling["a"] = _filled(cupy, value)
        for i in range(5):
            spilling[i] = _filled(cupy, 200 + i)
        spilling.settle(20)
        for i in range(1, 5):
            del spilling[i]
        result = cupy.zeros(MIB, "u1")
        cupy.cuda.Device().synchronize()
        with spilling.using(["a"]):
            late_copy(spilling["a"], result, stream, LATE_S)
        gc.collect()
        for i in range(10, 14):
            spilling[i] = _filled(cupy, 200 + i)
            for j in range(10, i + 1):
                spilling[j]
            spilling.settle(20)
        others = [filled(MIB, 99) for _ in range(6)]
        stream.synchronize()
        cupy.cuda.Device().synchronize()
        del others
        return bool((result.get() == value).all())


def _up(cupy: Any, stream: Any, value: int) -> bool:
    """Read an array that comes up, at once and on another stream, while the device is busy."""
    with store("2MiB") as spilling:
        spilling["a"] = _filled(cupy, value)
        for i in range(6):
            spilling[i] = _filled(cupy, 200 + i)
        spilling.settle(20)
        result = cupy.zeros(MIB, "u1")
        cupy.cuda.Device().synchronize()
        spin(cupy.cuda.Stream.null, LATE_S)
        late_copy(spilling["a"], result, stream, 0.0)
        stream.synchronize()
        return bool((result.get() == value).all())


def copies() -> None:
    """Measure bytes per second in both directions, by size and by the kind of host memory."""
    import cupy

    locked = DriverCopies(0)
    copies_module.PINNED_BYTES = 0
    staged = DriverCopies(0)
    reused = np.zeros(GIB, "u1")
    for size, nbytes in SIZES.items():
        device, host = cupy.zeros(nbytes, "u1"), reused[:nbytes]
        pointer, bare = int(device.data.ptr), np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), "u1", nbytes)
        ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
            "bare cuMemcpyAsync": _bare(cupy, bare, pointer),
            "CuPy's get() and set()": (lambda d=device: d.get(), lambda d=device, h=host: d.set(h)),
        }
        for who, by, empty in (
            ("hpcgpu, page-locked", locked, _fresh),
            ("hpcgpu, staged to fresh memory", staged, _fresh),
            ("hpcgpu, staged to memory in use", staged, lambda n, h=host: h[:n]),
        ):
            root = by.to_host(pointer, nbytes, empty)
            ways[who] = (
                lambda b=by, p=pointer, n=nbytes, e=empty: b.to_host(p, n, e),
                lambda b=by, p=pointer, r=root: b.to_device(r, p, int(b.up_stream)),
            )
        for who, (down, up) in ways.items():
            for measure, call in (("down_gb_per_s", down), ("up_gb_per_s", up)):
                times = _times(call)
                say(size, measure, nbytes / median(times) / 1e9, "GB/s", who=who, runs=len(times))


def _fresh(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def _bare(cupy: Any, host: np.ndarray, pointer: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return the copies down and up as CUDA's runtime does them, between page-locked memory and the device."""
    stream, runtime = cupy.cuda.Stream(non_blocking=True), cupy.cuda.runtime

    def copy(to: int, source: int, kind: int) -> None:
        runtime.memcpyAsync(to, source, host.nbytes, kind, stream.ptr)
        stream.synchronize()

    return (
        lambda: copy(host.ctypes.data, pointer, runtime.memcpyDeviceToHost),
        lambda: copy(pointer, host.ctypes.data, runtime.memcpyHostToDevice),
    )


def _times(call: Callable[[], object], limit_s: float = 0.5) -> list[float]:
    call()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < limit_s and len(times) < 50):
        times.append(seconds(call))
        if sum(times) > 4 * limit_s:
            break
    return times


def pinned() -> None:
    """Measure page-locked memory: seconds, where it is counted, and what it does to another thread's launches."""
    import cupy

    by = DriverCopies(0)
    for size, nbytes in {"8 MiB": 8 * MIB, "64 MiB": 64 * MIB, "1 GiB": GIB, "4 GiB": 4 * GIB}.items():
        with _launching(cupy) as late_s, by.context():
            before, charged = resident_bytes(), _charged_bytes()
            begin = time.perf_counter()
            pointer = int(by.call("cuMemHostAlloc", nbytes, by.driver.CU_MEMHOSTALLOC_PORTABLE))
            say(size, "lock_s", time.perf_counter() - begin, "s")
            say(size, "resident_share", (resident_bytes() - before) / nbytes, "of the size")
            if charged is not None:
                say(size, "cgroup_share", ((_charged_bytes() or 0) - charged) / nbytes, "of the size")
            say(size, "unlock_s", seconds(lambda p=pointer: by.call("cuMemFreeHost", p)), "s")
        say(size, "launch_max_ms", 1000 * max(late_s), "ms", who="kernels of another thread", runs=len(late_s))


def _charged_bytes() -> int | None:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next((line[3:] for line in lines if line.startswith("0::")), "")
    file = Path(f"/sys/fs/cgroup{path}/memory.current")
    return int(file.read_text()) if path and file.exists() else None


@contextmanager
def _launching(cupy: Any) -> Iterator[list[float]]:
    """Launch small kernels in another thread; afterwards the list says how long each took until it was launched."""
    late_s, done, began = [0.0], threading.Event(), threading.Event()

    def launch() -> None:
        array, stream = cupy.zeros(1), cupy.cuda.Stream(non_blocking=True)
        with stream:
            cupy.add(array, 1, array)
            while not done.is_set():
                late_s.append(seconds(lambda: cupy.add(array, 1, array)))
                began.set()
                time.sleep(0.0005)
            stream.synchronize()

    thread = threading.Thread(target=launch)
    thread.start()
    began.wait(20)
    try:
        yield late_s
    finally:
        done.set()
        thread.join()


def small() -> None:
    """Measure what one of 10,000 small arrays costs, down and up."""
    import cupy

    count, begin = 10_000, time.perf_counter()
    for size, nbytes in {"500 B": 500, "4 KiB": 4096, "64 KiB": 65536}.items():
        if time.perf_counter() - begin > 12:
            say(f"10,000 arrays of {size}", "down_us", "not measured: the sizes before it took too long", "us")
            continue
        with store(1.0) as spilling:
            for i in range(count):
                spilling[i] = cupy.asarray(np.full(nbytes, i % 251, "u1"))
            cupy.cuda.Device().synchronize()
            down = seconds(lambda s=spilling: spill_all(s))
            left = spilling.tiers["device"]
            up = seconds(lambda s=spilling: [s[i] for i in range(count)])
            wrong = sum(int(spilling[i][-1]) != i % 251 for i in range(0, count, 97))
        say(f"10,000 arrays of {size}", "down_us", 1e6 * down / count, "us")
        say(f"10,000 arrays of {size}", "up_us", 1e6 * up / count, "us")
        say(f"10,000 arrays of {size}", "left_on_device", left, "B")
        say(f"10,000 arrays of {size}", "wrong_results", wrong, f"of {len(range(0, count, 97))}")


def waiting() -> None:
    """Measure what a wait for the device costs in CPU time, and how late its end is seen."""
    import cupy

    by, array, stream = DriverCopies(0), cupy.zeros(MIB, "u1"), cupy.cuda.Stream(non_blocking=True)
    spin(stream, 0.01)
    stream.synchronize()
    for wait_s in (0.2, 3.0):
        spin(stream, wait_s)
        cpu, begin = time.process_time(), time.perf_counter()
        by.to_host(int(array.data.ptr), MIB, _fresh)
        wall = time.perf_counter() - begin
        say(f"to_host waits for a kernel of {wait_s} s", "cpu_share", (time.process_time() - cpu) / wall, "of a core")
        say(f"to_host waits for a kernel of {wait_s} s", "late_ms", 1000 * (wall - wait_s), "ms")
    for name, flags in {"blocking event": {"block": True}, "spinning event": {}}.items():
        late_ms = []
        for _ in range(20):
            event = cupy.cuda.Event(disable_timing=True, **flags)
            begin = time.perf_counter()
            spin(stream, 0.02)
            event.record(stream)
            event.synchronize()
            late_ms.append(1000 * (time.perf_counter() - begin - 0.02))
        say(f"{name} after a kernel of 20 ms", "late_ms", median(late_ms), "ms", who="CUDA", runs=len(late_ms))
    say("cores of this process", "cores", len(os.sched_getaffinity(0)), "cores", who="the machine")

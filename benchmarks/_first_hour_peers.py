"""Measurements of device memory between two processes of one GPU: see ``gpu_first_hour.py``."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from _first_hour import GIB, MIB, say, seconds
from _first_hour_processes import printed, say_all

from hpcgpu.host import peer_memory
from hpcgpu.spill.devices.copies import DriverCopies

READ = """
import json, sys, time
import numpy as np
from hpcgpu.host import peer_memory
out, times = np.ones(NBYTES, "u1"), []
for _ in range(6):
    begin = time.perf_counter()
    try:
        peer_memory.read(PID, [(ADDRESS, out.data)])
    except OSError as e:
        print(e, file=sys.stderr)
        break
    times.append(time.perf_counter() - begin)
right = bool(times) and bool((out == 7).all())
print(json.dumps({"readable": float(right), "gb_per_s": NBYTES / min(times) / 1e9 if times else float("nan")}))
"""
# Exports an allocation of SIZE bytes that are all 7, and obeys: "free" frees it, and writes 9 to as much memory.
EXPORT = """
import ctypes, sys
from hpcgpu.spill.devices.copies import DriverCopies
by = DriverCopies(0)
with by.context():
    pointer = by.call("cuMemAlloc", SIZE)
    by.call("cuMemsetD8", pointer, 7, SIZE)
    by.call("cuCtxSynchronize")
    handle = by.call("cuIpcGetMemHandle", pointer)
    print(ctypes.string_at(handle.getPtr(), 64).hex(), flush=True)
    for line in sys.stdin:
        by.call("cuMemFree", pointer)
        pointer = by.call("cuMemAlloc", SIZE)
        by.call("cuMemsetD8", pointer, 9, SIZE)
        by.call("cuCtxSynchronize")
        print("freed", flush=True)
"""
IMPORT = "import _first_hour_peers as m; m.import_and_lose({how!r}, {nbytes})"


def peers() -> None:
    """Read page-locked memory of another process; open its device memory, and go on when that process ends or frees."""
    _say_page_locked()
    by = DriverCopies(0)
    with by.context():
        free = int(by.call("cuMemGetInfo"))
        pooled = by.call("cuMemAllocAsync", MIB, by.up_stream)
        status, _ = by.driver.cuIpcGetMemHandle(pooled)
        say("memory of a pool", "exported", float(int(status) == 0), "1: yes, 0: " + status.name, who="CUDA IPC")
        by.call("cuMemFreeAsync", pooled, by.up_stream)
    for size, nbytes in {
        "1 MiB": MIB,
        "64 MiB": 64 * MIB,
        "1 GiB": GIB,
        "a quarter of the GPU": free // 4,
    }.items():
        if nbytes < free // 3:
            _say_opened(by, size, nbytes)
    nbytes = min(256 * MIB, free // 8)
    for how in ("ends", "ends during a copy", "frees"):
        units = {"right": "1: yes, 0: other bytes, -1: an error", "status": "CUDA's number", "usable": "1: yes"}
        units |= {"kept_share": "of the size, until it is closed"}
        say_all(
            f"a peer {how} while its memory is open", printed(IMPORT.format(how=how, nbytes=nbytes)), units, "CUDA IPC"
        )


def _say_page_locked() -> None:
    by, nbytes = DriverCopies(0), 64 * MIB
    by.lock_at_most(2 * nbytes)
    peer_memory.allow(os.getpid())
    memories = {"page-locked memory": by._host.take(nbytes), "ordinary memory": np.empty(nbytes, np.uint8)}
    for case, memory in memories.items():
        memory[:] = 7
        source = READ.replace("NBYTES", str(nbytes)).replace("PID", str(os.getpid()))
        found = printed(source.replace("ADDRESS", str(memory.ctypes.data)))
        say_all(f"{case} of a peer", found, {"readable": "1: yes", "gb_per_s": "GB/s"})


@contextlib.contextmanager
def exported(by: DriverCopies, nbytes: int) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """Let another process export device memory; give the process, and the handle."""
    argv = [sys.executable, "-c", EXPORT.replace("SIZE", str(nbytes))]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            handle = by.driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), bytes.fromhex(process.stdout.readline()), 64)
            yield process, handle
        finally:
            process.kill()


def _say_opened(by: DriverCopies, size: str, nbytes: int) -> None:
    """Say what it takes to open an allocation, to copy up to 64 MiB of it, and to close it."""
    part, lazy = min(nbytes, 64 * MIB), 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    opens, closes, copies = list[float](), list[float](), list[float]()
    with by.context(), exported(by, nbytes) as (_, handle):
        target = by.call("cuMemAlloc", part)
        for _ in range(5):
            begin = time.perf_counter()
            source = by.call("cuIpcOpenMemHandle", handle, lazy)
            opens.append(time.perf_counter() - begin)
            for _ in range(3):
                begin = time.perf_counter()
                by.call("cuMemcpyDtoDAsync", target, source, part, by.up_stream)
                by.call("cuStreamSynchronize", by.up_stream)
                copies.append(time.perf_counter() - begin)
            closes.append(seconds(lambda s=source: by.call("cuIpcCloseMemHandle", s)))
        by.call("cuMemFree", target)
    for measure, times in {"open_first": opens[:1], "open_again": opens[1:], "close": closes}.items():
        say(f"{size} of a peer", f"{measure}_ms", 1e3 * min(times), "ms", who="CUDA IPC", runs=len(times))
    say(f"{size} of a peer", "copy_gb_per_s", part / min(copies) / 1e9, "GB/s", who="CUDA IPC", runs=len(copies))


def import_and_lose(how: str, nbytes: int) -> None:
    """Open a peer's memory and let the peer end, or free it; print whether bytes are right, and the context usable."""
    by, root = DriverCopies(0), np.zeros(nbytes, np.uint8)
    driver = by.driver
    with by.context(), exported(by, nbytes) as (process, handle):
        source, target = by.call("cuIpcOpenMemHandle", handle, 1), by.call("cuMemAlloc", nbytes)
        if how == "frees":
            print("free", file=process.stdin, flush=True)
            assert process.stdout
            process.stdout.readline()
        else:
            for _ in range(2000 * nbytes // (256 * MIB) if how == "ends during a copy" else 0):
                by.call("cuMemcpyDtoDAsync", target, source, nbytes, by.up_stream)
            process.kill()
            process.wait()
        statuses = [
            driver.cuMemcpyDtoDAsync(target, source, nbytes, by.up_stream)[0],
            driver.cuStreamSynchronize(by.up_stream)[0],
            driver.cuMemcpyDtoH(root.ctypes.data, target, nbytes)[0],
        ]
        time.sleep(0.7)  # so much later a killed process's memory is free
        before = driver.cuMemGetInfo()[1]
        closed = driver.cuIpcCloseMemHandle(source)[0]
        kept = (int(driver.cuMemGetInfo()[1] or 0) - int(before or 0)) / nbytes
        usable = not any(map(int, (driver.cuMemsetD8(target, 1, nbytes)[0], driver.cuCtxSynchronize()[0])))
        failed = [int(status) for status in statuses if int(status)]
        right = -1.0 if failed else float(bool((root == 7).all()))
        print(f"{how}: {[status.name for status in statuses]}, closed: {closed.name}", file=sys.stderr)
        found = {"right": right, "status": float(max(failed, default=0)), "usable": float(usable), "kept_share": kept}
        print(json.dumps(found), flush=True)
        os._exit(0)  # what a broken context says at the end is no result

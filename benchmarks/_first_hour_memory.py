"""Measurements of who has the device's memory: see ``gpu_first_hour.py``."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from _first_hour import GIB, MIB, filled, held, lacks, nvml_used_bytes, say, seconds, spill_all, store

from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.pools import evict_on_failure

# CUDA's context and its libraries take about 0.5 GiB of it.
ROOM_BYTES, PIECE_BYTES = 6 * GIB, 256 * MIB
PAIRS = (("cupy", "rmm"), ("torch", "rmm"), ("cupy", "torch"), ("torch", "cupy"), ("numba", "cupy"), ("rmm", "cupy"))


def _array(n: int) -> Any:  # CuPy's

    return filled(n, 1)


def _tensor(n: int) -> Any:  # torch's
    import torch

    return torch.ones(n, dtype=torch.uint8, device="cuda")


def _numba(n: int) -> Any:  # numba's
    from numba import cuda

    return cuda.to_device(np.ones(n, "u1"))


def _rmm(n: int) -> Any:  # RMM's
    import rmm

    return rmm.DeviceBuffer(size=n)


MAKERS: Mapping[str, Callable[[int], Any]] = {"cupy": _array, "torch": _tensor, "numba": _numba, "rmm": _rmm}


def rescues() -> None:
    """Let an allocation of one library find memory that another library's values have, on a device with little room."""
    with held(ROOM_BYTES):
        for values, other in PAIRS:
            case = f"2 GiB of {other} where {values}'s values are"
            if not any(lacks(case, module) for module in (values, other)):
                argv = [
                    sys.executable,
                    "-c",
                    f"import _first_hour_memory as m; m._rescue({values!r}, {other!r}, {case!r})",
                ]
                done = subprocess.run(argv, cwd=sys.path[0], capture_output=True, text=True, timeout=60, check=False)
                print(done.stdout, end="", flush=True)
                if done.returncode:
                    last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
                    say(case, "has_room", f"failed: {last}", "")


def _rescue(values: str, other: str, case: str) -> None:
    import cupy

    if "rmm" in (values, other):
        import rmm

        from hpcgpu.deploy.processes.rmm import evicting

        rmm.mr.set_current_device_resource(evicting(rmm.mr.get_current_device_resource()))
    evict_on_failure()  # as a worker does
    with store(1.0) as spilling:
        count = 0
        while cupy.cuda.runtime.memGetInfo()[0] > GIB and count < 2 * ROOM_BYTES // PIECE_BYTES:
            spilling[count] = MAKERS[values](PIECE_BYTES)
            count += 1
        begin, why = time.perf_counter(), ""
        try:
            made = MAKERS[other](2 * GIB)
            del made
        except Exception as e:  # each library has its own
            why = f"{type(e).__name__}: {e}"
        say(case, "has_room", float(not why), "1: yes")
        say(case, "took_s", time.perf_counter() - begin, "s")
        say(case, "spilled_gib", (count * PIECE_BYTES - spilling.tiers["device"]) / GIB, "GiB")
        if why:
            print(why, file=sys.stderr)


def full() -> None:
    """Fill the device with arrays until 30 were rescued; then use each of CUDA's libraries for the first time."""
    import cupy

    with store(1.0) as spilling:
        count, begin = 0, time.perf_counter()
        while spilling.rescues < 30 and count < 400 and time.perf_counter() - begin < 12:
            spilling[count] = filled(GIB, count % 251)
            count += 1
        say("arrays of 1 GiB on a full device", "arrays", count, "arrays")
        say("arrays of 1 GiB on a full device", "rescues", spilling.rescues, "rescues")
        say("arrays of 1 GiB on a full device", "s", time.perf_counter() - begin, "s")
        _say_memory("a full device", spilling)
        uses: dict[str, tuple[str, Callable[[], object]]] = {
            "cuBLAS": ("cupy", lambda: _small(cupy) @ _small(cupy)),
            "cuSOLVER": ("cupy", lambda: cupy.linalg.svd(_small(cupy))),
            "cuFFT": ("cupy", lambda: cupy.fft.fft(_small(cupy))),
            "cuRAND": ("cupy", lambda: cupy.random.rand(1000)),
            "a new kernel": (
                "cupy",
                lambda: cupy.ElementwiseKernel("T x", "T y", "y = x * 3", "first_hour")(_small(cupy)),
            ),
            "torch, 256 MiB": ("torch", lambda: _tensor(PIECE_BYTES)),
            "numba, 256 MiB": ("numba", lambda: _numba(PIECE_BYTES)),
        }
        for name, (module, use) in uses.items():
            if lacks("a full device", module):
                continue
            try:
                took_s = seconds(lambda u=use: (u(), cupy.cuda.Device().synchronize()))
                say("a full device", "works", 1, "1: yes", who=name)
                say("a full device", "took_s", took_s, "s", who=name)
            except Exception as e:  # each library has its own; what it says goes to the log
                say("a full device", "works", 0, "1: yes", who=name)
                print(f"{name}: {type(e).__name__}: {e}", file=sys.stderr)


def _small(cupy: Any) -> Any:
    return cupy.ones((256, 256), "f4")


def _say_memory(case: str, spilling: Any) -> None:
    import cupy

    pool = cupy.get_default_memory_pool()
    say(case, "nvml_used_gib", nvml_used_bytes() / GIB, "GiB", who="NVML")
    say(case, "pool_used_gib", pool.used_bytes() / GIB, "GiB", who="CuPy's pool")
    say(case, "pool_held_gib", pool.total_bytes() / GIB, "GiB", who="CuPy's pool")
    say(case, "stored_gib", spilling.tiers["device"] / GIB, "GiB")
    say(case, "idle_gib", spilling.idle_bytes / GIB, "GiB")


def pool() -> None:
    """Say who holds memory while 8 GiB are stored, spilled, and given back."""
    import cupy

    cupy.zeros(1)
    with store("1GiB") as spilling:
        _say_memory("before", spilling)
        arrays = [filled(PIECE_BYTES, i) for i in range(32)]
        _say_memory("8 GiB made", spilling)
        for i, array in enumerate(arrays):
            spilling[i] = array
        del array
        arrays.clear()
        gc.collect()
        spilling.settle(20)
        _say_memory("8 GiB stored, 7 GiB of them spilled", spilling)
        time.sleep(2)  # what is given back after a while is given back by now
        _say_memory("2 s later", spilling)
        spilling.trim()
        _say_memory("after trim", spilling)
        CudaDevice.current(0).give_back()
        _say_memory("after give_back", spilling)


def torch() -> None:
    """Say what torch keeps, and move a model out and in 50 times."""
    if lacks("a model of torch", "torch"):
        return
    import torch as library

    with store(1.0) as spilling:
        model = library.nn.Linear(4096, 4096, device="cuda")
        for i in range(8):
            spilling[i] = _tensor(PIECE_BYTES)
        say("2 GiB of tensors", "reserved_gib", library.cuda.memory_reserved() / GIB, "GiB", who="torch")
        say("2 GiB of tensors", "nvml_used_gib", nvml_used_bytes() / GIB, "GiB", who="NVML")
        spill_all(spilling)
        say("tensors spilled", "reserved_gib", library.cuda.memory_reserved() / GIB, "GiB", who="torch")
        CudaDevice.current(0).give_back()
        say("given back", "reserved_gib", library.cuda.memory_reserved() / GIB, "GiB", who="torch")
        say("given back", "nvml_used_gib", nvml_used_bytes() / GIB, "GiB", who="NVML")
        for i in range(8):
            del spilling[i]
        expected = model.weight.detach().cpu()
        spilling["weight"] = model.weight.detach()
        del model
        wrong, begin, rounds = 0, time.perf_counter(), 0
        while rounds < 50 and time.perf_counter() - begin < 12:
            spill_all(spilling)
            wrong += not library.equal(spilling["weight"].cpu(), expected)
            rounds += 1
        say("64 MiB of weights out and in", "ms", 1000 * (time.perf_counter() - begin) / rounds, "ms", runs=rounds)
        say("64 MiB of weights out and in", "wrong_results", wrong, f"of {rounds}")


def shared() -> None:
    """Let two processes with a store each share 6 GiB; say what is resident for spilled data, by driver and by CuPy."""
    with held(ROOM_BYTES):
        for name, arguments in {"two stores": ("a", "b"), "one store": ("a",)}.items():
            argv = [sys.executable, "-c", "import _first_hour_memory as m; m._fill()"]
            running = [
                subprocess.Popen(argv, cwd=sys.path[0], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                for _ in arguments
            ]
            with _ended(running):
                for i, process in enumerate(running):
                    printed, errors = process.communicate(timeout=40)
                    case = f"{name} on 6 GiB, limit 2.5 GiB each"
                    if process.returncode:
                        last = (errors.strip() or f"exit code {process.returncode}").splitlines()[-1]
                        say(case, "wall_s", f"failed: {last}", "s", who=f"process {i}")
                    else:
                        wall_s, wrong = printed.split()
                        say(case, "wall_s", float(wall_s), "s", who=f"process {i}")
                        say(case, "wrong_results", float(wrong), "of 16", who=f"process {i}")
    for who, hidden in {"hpcgpu, by the driver": "", "hpcgpu, by CuPy": "sys.modules['cuda.bindings'] = None"}.items():
        argv = [
            sys.executable,
            "-c",
            f"import sys; {hidden or 'pass'}; import _first_hour_memory as m; m._resident({who!r})",
        ]
        subprocess.run(argv, cwd=sys.path[0], timeout=40, check=True)


@contextlib.contextmanager
def _ended(processes: list[subprocess.Popen[str]]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()


def _fill() -> None:
    """Store 4 GiB in a store that may have 2.5 GiB on the device, and print seconds and wrong results."""
    begin = time.perf_counter()
    with store(str(int(2.5 * GIB))) as spilling:
        for i in range(16):
            spilling[i] = filled(PIECE_BYTES, i)
        wrong = sum(int(spilling[i][-1]) != i for i in range(16))
        print(time.perf_counter() - begin, wrong)


def _resident(who: str) -> None:
    """Spill 2 GiB in arrays of 93 MB and say what is resident for it."""
    import cupy
    from _first_hour import resident_bytes

    nbytes = 93_000_000
    cupy.zeros(1).get()
    with store(1.0) as spilling:
        for i in range(22):
            spilling[i] = filled(nbytes, i)
        before = resident_bytes()
        spill_all(spilling)
        spilled = 22 * nbytes - spilling.tiers["device"]
        case = "2 GB spilled in arrays of 93 MB"
        say(case, "spilled_gb", spilled / 1e9, "GB", who=who)
        say(case, "resident_share", (resident_bytes() - before) / max(spilled, 1), "of the size", who=who)

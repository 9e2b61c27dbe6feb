"""Look at this machine: its limits, names, Python, folders and UCX."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from hpcgpu import __version__
from hpcgpu.errors import LaunchError
from hpcgpu.host import addresses
from hpcgpu.host import run as programs
from hpcgpu.host import ucx as host_ucx
from hpcgpu.host.scratch import mount_of
from hpcgpu.model import Command, Settings
from hpcgpu.model.job import TIMED_OUT
from hpcgpu.plan.doctor.facts import Folder, Names, Python, Ucx
from hpcgpu.plan.jobs.needs import shared_imports

_PACKAGES = (
    *("dask", "distributed", "numpy", "msgspec", "cupy", "cupy-cuda12x", "cupy-cuda13x", "cudf", "rmm"),
    *("torch", "numba", "ucxx", "ucxx-cu12", "ucxx-cu13", "distributed-ucxx", "mpi4py"),
)
_SMALL_FILES = 8
_IMEX = Path("/dev/nvidia-caps-imex-channels")
# Importing these shows whether the packages' machine code runs on this CPU.
_IMPORTS = "import numpy, msgspec, psutil, distributed"


def imex_channel(folder: Path = _IMEX) -> bool:
    """Return whether a channel of IMEX can be opened: Slurm (24.11) may give each job one with its own number."""
    return any(os.access(channel, os.R_OK | os.W_OK) for channel in folder.glob("channel*"))


def gather(looks: Mapping[str, Callable[[], Any]], limit_s: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Run probes at once, ``limit_s`` seconds together; return their results, and the errors of the others.

    A late probe goes on in a daemon thread: calls on a hung file system cannot be cancelled.
    """
    seen: dict[str, Any] = {}
    why: dict[str, str] = {}

    def look(name: str, function: Callable[[], Any]) -> None:
        try:
            seen[name] = function()
        except Exception as error:  # any error is reported, and the other probes go on
            why[name] = str(error) or type(error).__name__

    threads = [threading.Thread(target=look, args=item, daemon=True) for item in looks.items()]
    for thread in threads:
        thread.start()
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
    late = {name: f"no answer in {limit_s:g} s" for name in looks if name not in seen and name not in why}
    return dict(seen), {**why, **late}


def names() -> Names:
    """Return this machine's name, the addresses it resolves to, and its interfaces' addresses."""
    host, resolved = socket.gethostname(), dict[str, None]()
    with contextlib.suppress(OSError):
        resolved = dict.fromkeys(str(info[4][0]) for info in socket.getaddrinfo(host, None))
    return Names(host=host, resolved=tuple(resolved), interfaces=interfaces())


def interfaces() -> tuple[tuple[str, str], ...]:
    """Return (interface, address) of all addresses that other nodes can reach, by interface."""
    pairs: list[tuple[str, str]] = []
    for name in sorted(addresses.usable_interfaces()):
        with contextlib.suppress(LaunchError):  # loopback, or an address that is valid on its link only
            pairs += ((name, each) for each in addresses.reachable_addresses(("0.0.0.0", "::"), name))
    return tuple(pairs)


def python() -> Python:
    """Return this Python, and the versions of packages that a cluster's workers must share."""
    packages = {"hpcgpu": __version__}  # of what runs: a checkout in PYTHONPATH has no metadata
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    version, machine = platform.python_version(), platform.machine()
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        version += " free-threaded"
    old = _older_than_needed(packages)
    return Python(path=sys.executable, version=version, machine=machine, packages=packages, broken=old)


def _older_than_needed(packages: Mapping[str, str]) -> str:
    """Return the packages that pip was told to keep though hpcgpu needs newer ones; or ""."""
    bounds: dict[str, str] = {}
    with contextlib.suppress(metadata.PackageNotFoundError):  # a checkout in PYTHONPATH
        bounds = dict(word.split(">=") for word in metadata.requires("hpcgpu") or () if ";" not in word)
    named = [(name, packages[name], lowest) for name, lowest in bounds.items() if name in packages]
    old = [each for each in named if _numbers(each[1]) < _numbers(each[2])]
    return ", ".join(f"{name} {version} (hpcgpu needs {lowest} or newer)" for name, version, lowest in old)


def _numbers(version: str) -> list[int]:
    return [int(n) for n in re.findall(r"\d+", version)]


def imports() -> tuple[str, float]:
    """Import the packages in a process (20 s at most); return the error, "" if none, and the seconds it took."""
    began_s = time.perf_counter()
    done = programs.run_sync(Command((sys.executable, "-c", _IMPORTS), timeout_s=20.0))
    took_s, why = time.perf_counter() - began_s, ""
    if done.returncode < 0:
        why = f"an import ended with signal {-done.returncode}: packages are built for another CPU"
    elif done.returncode not in (0, TIMED_OUT):
        why = (done.stderr.strip().splitlines() or [f"an import ended with {done.returncode}"])[-1]
    return why, took_s


def mounted(path: Path) -> Folder:
    """Return a folder and the kind of its file system."""
    text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    mount = mount_of(os.fspath(path.resolve()), text)
    if mount is None:
        return Folder(path=str(path))
    return Folder(path=str(path), kind=mount.kind, network=mount.is_network, memory=mount.is_memory)


def imports_of(settings: Settings, nodes: int) -> str:
    """Describe what so many nodes import from a network file system, as this machine mounts it; "" if little."""
    python = Path(settings.python or sys.executable)
    place = mounted(python.parent.parent) if python.is_absolute() else Folder(path="")
    is_staged = settings.environment == "stage"
    return shared_imports(nodes, place.kind) if place.network and not is_staged else ""


def folder(path: Path, write_bytes: int) -> Folder:
    """Measure a folder's free space and speed by small files and a synced one of ``write_bytes``; remove them."""
    about = os.statvfs(path)
    free_bytes, free_files = about.f_bavail * about.f_frsize, about.f_favail if about.f_files else -1
    folder = replace(mounted(path), free_bytes=free_bytes, free_files=free_files)
    if free_bytes < 2 * write_bytes:
        return folder
    try:
        with tempfile.TemporaryDirectory(prefix=".hpcgpu-doctor-", dir=path) as scratch:
            return _measured(folder, Path(scratch), write_bytes)
    except OSError as error:
        return replace(folder, error=error.strerror or str(error))


def _measured(about: Folder, folder: Path, write_bytes: int) -> Folder:
    before_s, began_s = time.time(), time.perf_counter()
    for number in range(_SMALL_FILES):
        (folder / str(number)).write_bytes(b"")
    server_s, after_s = (folder / "0").stat().st_mtime, time.time()
    for number in range(_SMALL_FILES):
        (folder / str(number)).unlink()
    create_s = (time.perf_counter() - began_s) / _SMALL_FILES
    began_s = time.perf_counter()
    with (folder / "large").open("wb", buffering=0) as file:
        file.write(os.urandom(write_bytes))
        os.fsync(file.fileno())
    speed = write_bytes / (time.perf_counter() - began_s)
    # file systems round times down, some to seconds; between the two moments nothing is wrong
    skew = server_s - before_s if server_s < before_s - 1 else max(0.0, server_s - after_s)
    return replace(about, create_s=create_s, bytes_per_s=speed, clock_s=skew)


def ucx() -> Ucx:
    """Return version and transports of the workers' UCX, else of PATH's ucx_info; RuntimeError if it fails."""
    folder = host_ucx.library(os.environ)
    beside = folder and folder.parent / "bin" / "ucx_info"
    program = str(beside) if beside and beside.exists() else shutil.which("ucx_info")
    # an ucx_info of another UCX reads this one, too: each has the interfaces of its libraries
    env = {"LD_LIBRARY_PATH": str(folder)} if folder else {}
    if not program:
        raise RuntimeError("there is no ucx_info here")
    done = programs.run_sync(Command((program, "-v", "-d"), env=env, timeout_s=15.0))
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"ucx_info ended with {done.returncode}"])[-1])
    read = read_ucx_info(done.stdout)
    return replace(read, folder=str(folder or ""), has_ib=folder is None or host_ucx.drives_infiniband(folder))


def read_ucx_info(text: str) -> Ucx:
    """Parse the output of ``ucx_info -v -d`` into version and transports."""
    version = re.search(r"Library version: *(\S+)", text)
    found = (line.partition("Transport:")[2].strip() for line in text.splitlines() if "Transport:" in line)
    return Ucx(version=version[1] if version else "", transports=tuple(sorted(set(found))))

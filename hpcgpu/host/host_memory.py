"""Host memory: limits of cgroups, NUMA nodes, and the allocator.

Together: the allocator's settings follow from the limits.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
from collections.abc import Iterator, Mapping

from hpcgpu.errors import opt
from hpcgpu.host.kernel_binding import text_of
from hpcgpu.light_typing import TYPE_CHECKING
from hpcgpu.model import CpuSet, HostMemory
from hpcgpu.model.allocation import ALL_OF_THE_NODE
from hpcgpu.units import format_bytes

if TYPE_CHECKING:
    from pathlib import Path

_PROC, _NUMA = "/proc", "/sys/devices/system/node"
_LIMITS = {"cgroup2": ("memory.max", "memory.high"), "cgroup": ("memory.limit_in_bytes",)}
_USED = {"cgroup2": "memory.current", "cgroup": "memory.usage_in_bytes"}
# without tmpfs, which cannot be dropped; version 1 has "total_" for a cgroup with those below it
_FILES = {
    "cgroup2": r"(?m)^(?:in)?active_file (\d+)",
    "cgroup": r"(?m)^total_(?:in)?active_file (\d+)",
}
_EVENTS = {"cgroup2": "memory.events", "cgroup": "memory.oom_control"}  # version 1 has the number since Linux 4.13
_KILLS = r"(?m)^oom_kill (\d+)"
_AVAILABLE = r"(?m)^MemAvailable:\s+(\d+) kB"
_TOTAL = r"(?m)^(?:Node \d+ )?MemTotal:\s+(\d+) kB"
# of one NUMA node, for which the kernel has no MemAvailable: free pages, and those of files
_NODE_AVAILABLE = r"(?m)^Node \d+ (?:MemFree|Active\(file\)|Inactive\(file\)|SReclaimable):\s+(\d+) kB"
# 36 35 0:31 /root /point options … - kind source super-options: root is the mounted part of the hierarchy
_MOUNT = r"(?m)^\d+ \d+ \S+ (\S+) (\S+) .*- (cgroup2?) \S+ (\S+)$"
# The variables that glibc reads, and what mallopt(3) calls them (malloc.h).
_MALLOPT = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_MMAP_MAX_": -4,
    "MALLOC_ARENA_MAX": -8,
}
JEMALLOC = "libjemalloc.so.2"
NOT_FOUND = (
    f"{opt('allocator', 'jemalloc')}: no {JEMALLOC} in $CONDA_PREFIX/lib, Python's own lib, $EBROOTJEMALLOC, "
    "$LD_LIBRARY_PATH or ldconfig -p; the workers take the C library's allocator (Debian has it in libjemalloc2, conda "
    "in jemalloc)"
)
_INT_MAX = 2**31 - 1
_ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL of jemalloc 5
_LISTED = rf"(?m)^\s*{re.escape(JEMALLOC)} .*=> (\S+)$"
_MACHINE = slice(18, 20)  # e_machine of an ELF header


def memory_limit(gpu_nodes: CpuSet = CpuSet(), proc: str | Path = _PROC, numa: str | Path = _NUMA) -> HostMemory:
    """Return the host memory that this process may use: the least of the node's memory and its cgroups' limits.

    Of cgroup v1 and v2; all visible ancestors count, because Slurm and PBS limit an ancestor of the process's cgroup.
    The NUMA nodes ``gpu_nodes`` are the GPUs' own memory, which the kernel counts as the node's (Grace Hopper).
    """
    import resource

    limits = [HostMemory(_node_kib(gpu_nodes, proc, numa)[1] * 1024, ALL_OF_THE_NODE)]
    if "PBS_JOBID" in os.environ and (size := resource.getrlimit(resource.RLIMIT_RSS)[0]) != resource.RLIM_INFINITY:
        limits.append(HostMemory(size, "mem= of the PBS job on this node, RLIMIT_RSS"))  # pbs_mom sets it (23.06.06)
    for kind, folder in cgroups(proc):
        limits += [HostMemory(limit, f"cgroup {folder}") for limit in _limits(kind, folder)]
    return min(limits, key=lambda m: m.nbytes)


def memory_left(gpu_nodes: CpuSet = CpuSet(), proc: str | Path = _PROC, numa: str | Path = _NUMA) -> float:
    """Return the fraction of host memory, page cache included, that is left in the cgroup with the least left."""
    available, total = _node_kib(gpu_nodes, proc, numa)
    left = [max(available, 0) / total]
    for kind, folder in cgroups(proc):
        used, files = text_of(folder / _USED[kind]).strip(), re.findall(_FILES[kind], text_of(folder / "memory.stat"))
        left += [1 - (int(used) - sum(map(int, files))) / limit for limit in _limits(kind, folder) if limit and used]
    return min(left)


def _node_kib(gpu_nodes: CpuSet, proc: str | Path, numa: str | Path) -> tuple[int, int]:
    """Return the KiB of the node that are available, and all of them, without those of the GPUs."""
    about = text_of(f"{proc}/meminfo")
    available, total = int(re.findall(_AVAILABLE, about)[0]), int(re.findall(_TOTAL, about)[0])
    for number in gpu_nodes:
        of_gpu = text_of(f"{numa}/node{number}/meminfo")
        available -= sum(map(int, re.findall(_NODE_AVAILABLE, of_gpu)))
        total -= sum(map(int, re.findall(_TOTAL, of_gpu)))
    return available, total


def oom_kills(proc: str | Path = _PROC) -> int:
    """Return how many processes of this process's own cgroup the kernel has killed for lack of memory; 0: unknown."""
    kind, folder = next(cgroups(proc), ("cgroup", ""))
    return sum(map(int, re.findall(_KILLS, text_of(f"{folder}/{_EVENTS[kind]}"))))


def format_exit(code: int, kills: int, proc: str | Path = _PROC) -> str:
    """Format how a child of this process has ended; ``kills``: :func:`oom_kills` when it started."""
    import signal

    text = f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"
    if code == -signal.SIGKILL and (kills := oom_kills(proc) - kills) > 0:
        nbytes, source = memory_limit(proc=proc)
        where = f"{format_bytes(nbytes)}, {source}; the kernel has killed {kills} here since its start"
        text += f": out of memory ({where}). Request more memory, or use less"
    return text


def cgroups(proc: str | Path, controller: str = "memory") -> Iterator[tuple[str, Path]]:
    """Yield the kind and folder of the process's own cgroup with this controller, and of those above it."""
    from pathlib import Path, PurePosixPath  # 4 CPU ms, which a rank of hpcgpu bind need not spend

    # of several mounts on one point the last one hides the others: of its outside, in a namespace
    mounts = {mount[1]: mount for mount in re.findall(_MOUNT, text_of(f"{proc}/self/mountinfo"))}.values()
    for line in text_of(f"{proc}/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        kind = "cgroup2" if number == "0" else "cgroup"
        if kind == "cgroup" and controller not in controllers.split(","):
            continue
        for root, point, mounted, options in mounts:
            if mounted == kind and (kind == "cgroup2" or controller in options.split(",")):
                # A container may see only its own part of the hierarchy, and the path as the host names it.
                inside = PurePosixPath(path)
                inside = inside.relative_to(root) if inside.is_relative_to(root) else PurePosixPath()
                if ".." in inside.parts or inside.is_absolute():
                    inside = PurePosixPath()
                yield from ((kind, Path(point.replace(r"\040", " "), part)) for part in (inside, *inside.parents))


def _limits(kind: str, folder: Path) -> list[int]:
    words = [text_of(folder / name).strip() for name in _LIMITS[kind]]
    return [int(word) for word in words if word.isdigit()]  # "max" is no limit; version 1 has a number above all memory


def apply_variables(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Apply glibc's ``MALLOC_`` variables that are in ``now`` and were not in ``before``.

    glibc reads them once, before main. A worker is forked by a fork server that started long before, with its own
    values, so the worker's come too late for glibc and need mallopt(3), which has the same effect (glibc 2.36; either
    threshold also ends the growth of the mmap threshold). Values that are not numbers are ignored, as by glibc.
    """
    for name, option in _MALLOPT.items():
        if name in now and now[name] != before.get(name):
            with contextlib.suppress(ValueError, AttributeError):  # no number; musl has no mallopt
                ctypes.CDLL(None).mallopt(option, min(int(now[name], 0), _INT_MAX))


def trim() -> int:
    """Collect garbage and return free memory to the kernel (blocks, longer for a larger heap); return freed bytes."""
    before = resident_bytes()
    gc.collect()
    trim_heap()
    return max(0, before - resident_bytes())


def trim_heap() -> None:
    """Return the heap's free pages to the kernel: 5 ms for 0.7 million free blocks, 0.1 s for a free GiB."""
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # musl has none
        libc.malloc_trim(0)
    with contextlib.suppress(AttributeError):
        libc.mallctl(f"arena.{_ALL_ARENAS}.purge".encode(), None, None, None, ctypes.c_size_t(0))


def in_force() -> str:
    """Return this process's allocator: ``system``, or ``jemalloc`` with its version."""
    version, size = ctypes.c_char_p(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_char_p))
    try:
        mallctl = ctypes.CDLL(None).mallctl
    except AttributeError:
        return "system"
    mallctl(b"version", ctypes.byref(version), ctypes.byref(size), None, ctypes.c_size_t(0))
    return f"jemalloc {(version.value or b'').decode().partition('-')[0]}".rstrip()


def find_jemalloc(environ: Mapping[str, str]) -> str:
    """Return the path of a jemalloc that can be preloaded here; "" without one."""
    machine = _machine("/proc/self/exe")
    for path in _candidates(environ):
        if path.is_file() and _machine(path) == machine:
            return str(path)
    return ""


def resident_bytes() -> int:
    """Return this process's physical memory."""
    return int(text_of("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield where jemalloc may be: the user's environment first, then modules, then the system."""
    from pathlib import Path

    folders = [Path(environ[name]) / "lib" for name in ("CONDA_PREFIX", "EBROOTJEMALLOC") if environ.get(name)]
    folders += [Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib"]
    folders += [Path(text) for text in environ.get("LD_LIBRARY_PATH", "").split(":") if text]
    yield from (folder / JEMALLOC for folder in folders)
    import shutil

    # /sbin is not in the PATH of Debian's users
    if ldconfig := shutil.which("ldconfig", path=f"{environ.get('PATH', '')}:/sbin:/usr/sbin"):
        from hpcgpu.host import run  # brings asyncio
        from hpcgpu.model import Command

        listed = run.run_sync(Command((ldconfig, "-p"), timeout_s=10)).stdout
        yield from (Path(text) for text in re.findall(_LISTED, listed))


def _machine(path: str | Path) -> bytes:
    """Return an ELF file's machine: ld.so also lists libraries of others."""
    with contextlib.suppress(OSError), open(path, "rb") as f:
        return f.read(20)[_MACHINE]
    return b""

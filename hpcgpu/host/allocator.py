"""Tune the allocator of host memory: return free memory to the kernel, find jemalloc."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from hpcgpu.host import run
from hpcgpu.model import Command

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
    f"allocator='jemalloc': no {JEMALLOC} in $CONDA_PREFIX/lib, Python's own lib, $EBROOTJEMALLOC, $LD_LIBRARY_PATH "
    "or ldconfig -p; the workers take the C library's allocator (Debian has it in libjemalloc2, conda in jemalloc)"
)
_INT_MAX = 2**31 - 1
_ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL of jemalloc 5
_LISTED = re.compile(rf"^\s*{re.escape(JEMALLOC)} .*=> (\S+)$", re.M)
_MACHINE = slice(18, 20)  # e_machine of an ELF header


def apply_variables(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Apply glibc's ``MALLOC_`` variables that are in ``now`` and were not in ``before``."""
    # glibc reads them once, before main. A worker is forked by a fork server that started long before, with its own
    # values, so the worker's come too late for glibc and need mallopt(3), which has the same effect (glibc 2.36; either
    # threshold also ends the growth of the mmap threshold). Values that are not numbers are ignored, as by glibc.
    for name, option in _MALLOPT.items():
        if name in now and now[name] != before.get(name):
            with contextlib.suppress(ValueError, AttributeError):  # no number; musl has no mallopt
                ctypes.CDLL(None).mallopt(option, min(int(now[name], 0), _INT_MAX))


def trim() -> int:
    """Collect garbage and return free memory to the kernel (blocks, longer for a larger heap); return freed bytes."""
    before = resident_bytes()
    gc.collect()
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # musl has none
        libc.malloc_trim(0)
    with contextlib.suppress(AttributeError):
        libc.mallctl(f"arena.{_ALL_ARENAS}.purge".encode(), None, None, None, ctypes.c_size_t(0))
    return max(0, before - resident_bytes())


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
    machine = _machine(Path("/proc/self/exe"))
    for path in _candidates(environ):
        if path.is_file() and _machine(path) == machine:
            return str(path)
    return ""


def resident_bytes() -> int:
    """Return this process's physical memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield where jemalloc may be: the user's environment first, then modules, then the system."""
    folders = [Path(environ[name]) / "lib" for name in ("CONDA_PREFIX", "EBROOTJEMALLOC") if environ.get(name)]
    folders += [Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib"]
    folders += [Path(text) for text in environ.get("LD_LIBRARY_PATH", "").split(":") if text]
    yield from (folder / JEMALLOC for folder in folders)
    # /sbin is not in the PATH of Debian's users
    if ldconfig := shutil.which("ldconfig", path=f"{environ.get('PATH', '')}:/sbin:/usr/sbin"):
        listed = run.run_sync(Command((ldconfig, "-p"), timeout_s=10)).stdout
        yield from (Path(text) for text in _LISTED.findall(listed))


def _machine(path: Path) -> bytes:
    """Return an ELF file's machine: ld.so also lists libraries of others."""
    with contextlib.suppress(OSError), path.open("rb") as f:
        return f.read(20)[_MACHINE]
    return b""

"""The allocator of host memory in this process: when it gives memory back, and jemalloc in its place."""

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

TRIM_THRESHOLD = "MALLOC_TRIM_THRESHOLD_"
JEMALLOC = "libjemalloc.so.2"
NOT_FOUND = (
    f"allocator='jemalloc': no {JEMALLOC} in $CONDA_PREFIX/lib, Python's own lib, $EBROOTJEMALLOC, $LD_LIBRARY_PATH "
    "or ldconfig -p; the workers take the C library's allocator (Debian has it in libjemalloc2, conda in jemalloc)"
)
_M_TRIM_THRESHOLD = -1  # malloc.h
_INT_MAX = 2**31 - 1
_ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL of jemalloc 5
_LISTED = re.compile(rf"^\s*{re.escape(JEMALLOC)} .*=> (\S+)$", re.M)
_MACHINE = slice(18, 20)  # e_machine of an ELF header


def set_trim_threshold(text: str) -> bool:
    """Apply ``MALLOC_TRIM_THRESHOLD_`` in a process that has started without it.

    glibc reads the variable once, before ``main``. A worker is forked by a fork server that started long before, with a
    value of its own. A value in the worker's own environment comes too late for glibc and needs mallopt(3), which has
    the same effect (glibc 2.36: both also end the growth of the mmap threshold).

    Returns
    -------
    bool
        False: the text is no number, or the C library has no mallopt.

    """
    with contextlib.suppress(ValueError, AttributeError):
        return bool(ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, min(int(text, 0), _INT_MAX)))
    return False


def trim() -> int:
    """Collect garbage, then let the allocator return free memory to the kernel; return the number of bytes.

    It blocks the calling thread, longer for a larger heap.
    """
    before = resident_bytes()
    gc.collect()
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):  # musl has none
        libc.malloc_trim(0)
    with contextlib.suppress(AttributeError):
        libc.mallctl(f"arena.{_ALL_ARENAS}.purge".encode(), None, None, None, ctypes.c_size_t(0))
    return max(0, before - resident_bytes())


def in_force() -> str:
    """Return the allocator that this process has: ``system``, or ``jemalloc`` with its version."""
    version, size = ctypes.c_char_p(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_char_p))
    try:
        mallctl = ctypes.CDLL(None).mallctl
    except AttributeError:
        return "system"
    mallctl(b"version", ctypes.byref(version), ctypes.byref(size), None, ctypes.c_size_t(0))
    return f"jemalloc {(version.value or b'').decode().partition('-')[0]}".rstrip()


def find_jemalloc(environ: Mapping[str, str]) -> str:
    """Return the path of a jemalloc that can be preloaded here; empty when there is none."""
    own = _machine(Path("/proc/self/exe"))
    for path in _candidates(environ):
        if path.is_file() and _machine(path) == own:
            return str(path)
    return ""


def resident_bytes() -> int:
    """Return the physical memory of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the user's own environment first, then modules, then the system."""
    folders = [Path(environ[name]) / "lib" for name in ("CONDA_PREFIX", "EBROOTJEMALLOC") if environ.get(name)]
    folders += [Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib"]
    folders += [Path(text) for text in environ.get("LD_LIBRARY_PATH", "").split(":") if text]
    yield from (folder / JEMALLOC for folder in folders)
    # /sbin is not in the PATH of Debian's users
    if ldconfig := shutil.which("ldconfig", path=f"{environ.get('PATH', '')}:/sbin:/usr/sbin"):
        listed = run.run_sync(Command((ldconfig, "-p"), timeout_s=10)).stdout
        yield from (Path(text) for text in _LISTED.findall(listed))


def _machine(path: Path) -> bytes:
    """Return what an ELF file is made for: ld.so lists libraries of other machines, too."""
    with contextlib.suppress(OSError), path.open("rb") as f:
        return f.read(20)[_MACHINE]
    return b""

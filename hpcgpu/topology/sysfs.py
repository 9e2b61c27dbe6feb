"""Read a node from the text files of /sys, gathered by :mod:`hpcgpu.host.discover`.

The mapping's keys are paths below ``/sys``; a link (``bus/pci/devices/*``, ``class/net/*``, ``class/infiniband/*``) is
kept as its target. The last resort for a whole topology; beside hwloc it has the link layers, rates and operstates.
An unreadable number is a warning, and counts as absent; lists of CPUs must be readable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hpcgpu.errors import ParseError
from hpcgpu.light_typing import TYPE_CHECKING
from hpcgpu.model.allocation import CpuSet
from hpcgpu.model.topology import Gpu, Nic, NumaNode, Topology
from hpcgpu.topology import pci

if TYPE_CHECKING:
    from typing import TypeVar

    _T = TypeVar("_T")
_PCI = "bus/pci/devices/"
_CPU = "devices/system/cpu/cpu", "/topology/physical_package_id"
# index3 is the L3 of every CPU that has one: 0 and 1 are the L1's of data and instructions, 2 the L2.
_L3 = "devices/system/cpu/cpu", "/cache/index3/shared_cpu_list"
_NODE = "devices/system/node/node", "/cpulist"


class _Sys:
    """The files, and warnings about unreadable numbers in them."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = files
        self.warnings: dict[str, None] = {}

    def text(self, path: str) -> str:
        return self.files.get(path, "").strip()

    def word(self, path: str) -> str:
        """Return a hexadecimal word without its 0x."""
        return self.text(path).lower().removeprefix("0x")

    def number(self, path: str, absent: _T, convert: Callable[[str], _T], expected: str) -> _T:
        text = self.text(path)
        try:
            return convert(text) if text else absent
        except ValueError:
            self.warnings[f"/sys/{path} is {text[:40]!r}; expected {expected}"] = None
            return absent

    def whole(self, path: str, absent: int = 0) -> int:
        return self.number(path, absent, int, "a whole number")

    def cpus(self, path: str) -> CpuSet:
        """Return a list of CPUs; raise ParseError for other text."""
        text = self.text(path)
        try:
            return CpuSet.parse(text)
        except ValueError as e:
            raise ParseError(f"/sys/{path} is {text[:40]!r}; expected a list such as 0-7,16", evidence=text) from e

    def near(self, device: str, numa: Sequence[NumaNode]) -> int | None:
        """Return the NUMA node of a PCI function."""
        node = self.whole(f"{_PCI}{device}/numa_node", -1)
        return pci.home(CpuSet([node] if node >= 0 else []), numa) if numa else None


def _number_in(path: str, start: str, end: str) -> int | None:
    """Return the number between ``start`` and ``end``; None if the path has another form."""
    number = path[len(start) : -len(end)]
    return int(number) if path.startswith(start) and path.endswith(end) and number.isdecimal() else None


def read(files: Mapping[str, str]) -> Topology:
    """Build a topology from files of /sys; raise ParseError if they describe no CPU, or a list is unreadable."""
    sys = _Sys(files)
    cores, packages = _cores(sys)
    numa, other = _numa_nodes(sys, cores, packages)
    gpus, chains = _pci(sys, numa)
    nics = _nics(sys, numa)
    return Topology(
        tuple(numa),
        tuple(sorted(cores, key=min)),
        tuple(gpus),
        tuple(nics),
        pci.hops(chains, gpus, nics),
        source="sysfs",
        warnings=(*(() if chains else (pci.NO_PCI,)), *sys.warnings),
        other_memory=tuple(other),
        name=pci.product_name(pci.printable(files.get("class/dmi/id/product_name", ""))),
        l3=tuple(sorted({sys.cpus(p) for p in files if _number_in(p, *_L3) is not None} - {CpuSet()}, key=min)),
    )


def refine_nics(nics: Sequence[Nic], files: Mapping[str, str]) -> tuple[tuple[Nic, ...], tuple[str, ...]]:
    """Return the NICs with the kernel's present state, link layer and rate; and warnings about unreadable numbers."""
    sys = _Sys(files)
    by_port = {(n.name, n.port): n for n in _nics(sys, ())}
    by_interface = {n.interface: n for n in by_port.values() if n.interface}
    out = []
    for nic in nics:
        if now := by_port.get((nic.name, nic.port)) or by_interface.get(nic.interface or ""):
            nic = nic._replace(
                kind=now.kind,
                state=now.state,
                rate_gbps=now.rate_gbps,
                interface=nic.interface or now.interface,
                virtual=nic.virtual or now.virtual,
                link_gbytes_s=now.link_gbytes_s or nic.link_gbytes_s,
                card=now.card or nic.card,
            )
        out.append(nic)
    return tuple(out), tuple(sys.warnings)


def _cores(sys: _Sys) -> tuple[set[CpuSet], dict[int, int]]:
    """Return the cores, and the package of each CPU."""
    cores: set[CpuSet] = set()
    packages: dict[int, int] = {}
    for path in sys.files:
        if (cpu := _number_in(path, *_CPU)) is not None:
            folder = path.rpartition("/")[0]
            # core_cpus_list since Linux 5.3, thread_siblings_list before.
            siblings = sys.cpus(f"{folder}/core_cpus_list") or sys.cpus(f"{folder}/thread_siblings_list")
            cores.add(siblings or CpuSet([cpu]))
            packages[cpu] = max(sys.whole(path), 0)
    if not cores:
        raise ParseError("/sys/devices/system/cpu describes no CPU; is /sys mounted here?")
    return cores, packages


def _numa_nodes(sys: _Sys, cores: set[CpuSet], packages: dict[int, int]) -> tuple[list[NumaNode], list[NumaNode]]:
    """Return the nodes with PUs, and the others."""
    out: list[NumaNode] = []
    for path in sys.files:
        if (number := _number_in(path, *_NODE)) is not None:
            cpus = sys.cpus(path)
            kib = sys.text(path.replace("cpulist", "meminfo")).partition("MemTotal:")[2].split()[:1]
            size = int(kib[0]) * 1024 if kib and kib[0].isdecimal() else 0
            package = packages.get(min(cpus), 0) if cpus else 0
            out.append(NumaNode(number, cpus, size, package, "dram" if cpus else "other"))
    if not out:  # a kernel without CONFIG_NUMA
        out = [NumaNode(0, CpuSet(i for c in cores for i in c), 0)]
    out.sort(key=lambda n: n.os_index)
    return [n for n in out if n.cpuset], [n for n in out if not n.cpuset]


def _pci(sys: _Sys, numa: Sequence[NumaNode]) -> tuple[list[Gpu], dict[str, tuple[str, ...]]]:
    """Return the GPUs, and the bridges above each PCI function."""
    gpus: list[Gpu] = []
    chains: dict[str, tuple[str, ...]] = {}
    for path, target in sys.files.items():
        name = path.removeprefix(_PCI)
        if name == path or not pci.is_address(name):
            continue
        address = pci.address(name)
        # …/pci0000:00/0000:00:01.0/0000:01:00.0: host bridge, bridges, the device itself
        parts = target.strip("/").split("/")
        start = next((i for i, part in enumerate(parts) if part.startswith("pci") and ":" in part), len(parts))
        chains[address] = tuple(parts[start:-1])
        if kind := pci.gpu_vendor(sys.word(f"{path}/class")[:4], sys.word(f"{path}/vendor")):
            gpus.append(Gpu(address, vendor=kind, numa_node=sys.near(name, numa)))
    return sorted(gpus, key=lambda g: g.pci), chains


def _device_of(sys: _Sys, link: str) -> str:
    """Return the PCI function above the target of a class link; "" without one."""
    return next(filter(pci.is_address, reversed(sys.text(link).split("/"))), "")


def _nics(sys: _Sys, numa: Sequence[NumaNode]) -> list[Nic]:
    """Return the ports of RDMA devices, and the interfaces of other functions: Slingshot and plain Ethernet."""
    nets: dict[str, list[tuple[str, int]]] = {}  # interfaces and their ports, by function
    for path in sys.files:
        if path.startswith("class/net/") and path.count("/") == 2 and (device := _device_of(sys, path)):
            nets.setdefault(device, []).append((path.rpartition("/")[2], sys.whole(f"{path}/dev_port") + 1))
    out: list[Nic] = []
    for path in sys.files:
        name = path.removeprefix("class/infiniband/").partition("/")[0]
        port = _number_in(path, f"class/infiniband/{name}/ports/", "/state")
        if port is not None and (device := _device_of(sys, f"class/infiniband/{name}")):
            near = sys.near(device, numa)
            out.append(_port(sys, name, port, device, sorted(nets.get(device, ())), near))
    taken = {n.pci for n in out}
    for device, interfaces in nets.items():
        if pci.address(device) not in taken:
            out += _plain(sys, device, sorted(interfaces), sys.near(device, numa))
    return sorted(out, key=lambda n: (n.pci, n.name, n.port))


def _plain(sys: _Sys, device: str, interfaces: Sequence[tuple[str, int]], near: int | None) -> list[Nic]:
    """Return the interfaces of a function without an RDMA device."""
    _, vendor, number, virtual, link = _function(sys, device)
    kind = "slingshot" if pci.is_slingshot(vendor, number) else "ethernet"
    out = []
    for name, port in interfaces:
        state = {"": "unknown", "unknown": "unknown", "up": "active"}.get(
            sys.text(f"class/net/{name}/operstate"), "down"
        )
        rate = max(sys.number(f"class/net/{name}/speed", 0.0, float, "a number"), 0.0) / 1000
        out.append(Nic(name, pci.address(device), port, kind, state, rate, near, name, virtual, link))
    return out


def _function(sys: _Sys, device: str) -> tuple[str, str, str, bool, float]:
    """Return class, vendor and device of a PCI function, whether it is virtual, and its link in GB/s."""
    klass, vendor, number = (sys.word(f"{_PCI}{device}/{name}") for name in ("class", "vendor", "device"))
    virtual = f"{_PCI}{device}/physfn" in sys.files or pci.is_virtual(vendor, number)
    speed, width = (sys.text(f"{_PCI}{device}/current_link_{name}") for name in ("speed", "width"))
    return klass[:4], vendor, number, virtual, pci.link_gbytes_s(speed, width)


def _port(sys: _Sys, name: str, port: int, device: str, interfaces: Sequence[tuple[str, int]], near: int | None) -> Nic:
    """Return a port of an RDMA device, with its function's interface of that number, or the only port's first one."""
    folder = f"class/infiniband/{name}/ports/{port}"
    klass, vendor, number, virtual, link = _function(sys, device)
    lid = sys.number(f"{folder}/lid", 0, lambda text: int(text, 16), "a hexadecimal number")
    kind = pci.nic_kind(klass, vendor, number, sys.text(f"{folder}/link_layer"), lid)
    # "4: ACTIVE"; "200 Gb/sec (4X HDR)"
    state = pci.port_state(sys.text(f"{folder}/state").partition(":")[0].strip())
    rate = sys.number(f"{folder}/rate", 0.0, lambda text: float(text.partition(" ")[0]), "a rate in Gb/sec")
    ports = sum(p.startswith(f"class/infiniband/{name}/ports/") and p.endswith("/state") for p in sys.files)
    same = [n for n, p in interfaces if p == port] or [n for n, _ in interfaces if ports == 1]
    card = f"{vendor}:{number}" if vendor and number else ""
    return Nic(name, pci.address(device), port, kind, state, rate, near, same[0] if same else "", virtual, link, card)

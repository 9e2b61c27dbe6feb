"""Read a node from the text files of /sys, gathered by :mod:`hpcgpu.host.discover`.

The mapping's keys are paths below ``/sys``; a link (``bus/pci/devices/*``, ``class/net/*``, ``class/infiniband/*``) is
kept as its target. The last resort for a whole topology; beside hwloc it has the link layers, rates and operstates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.topology import pci

_T = TypeVar("_T")
_PCI = "bus/pci/devices/"
_CPU = re.compile(r"devices/system/cpu/cpu(\d+)/topology/physical_package_id")
# index3 is the L3 of every CPU that has one: 0 and 1 are the L1's of data and instructions, 2 the L2.
_L3 = re.compile(r"devices/system/cpu/cpu\d+/cache/index3/shared_cpu_list")
_NODE = re.compile(r"devices/system/node/node(\d+)/cpulist")
_PORT = re.compile(r"class/infiniband/([^/]+)/ports/(\d+)/state")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_TOTAL = re.compile(r"MemTotal:\s+(\d+) kB")


def read(files: Mapping[str, str]) -> Topology:
    """Build a topology from files of /sys; raise ParseError if they describe no CPU, or a number is unreadable."""
    cores, packages = _cores(files)
    numa, other = _numa_nodes(files, cores, packages)
    gpus, chains = _pci(files, numa)
    nics = _nics(files, numa)
    return Topology(
        tuple(numa),
        tuple(sorted(cores, key=min)),
        tuple(gpus),
        tuple(nics),
        pci.hops(chains, gpus, nics),
        source="sysfs",
        warnings=() if chains else (pci.NO_PCI,),
        other_memory=tuple(other),
        name=pci.product_name(pci.printable(files.get("class/dmi/id/product_name", ""))),
        l3=tuple(sorted({_list(files, p) for p in files if _L3.fullmatch(p)} - {CpuSet()}, key=min)),
    )


def refine_nics(nics: tuple[Nic, ...], files: Mapping[str, str]) -> tuple[Nic, ...]:
    """Return the NICs with the kernel's present state, link layer and rate; ParseError for an unreadable number."""
    by_port = {(n.name, n.port): n for n in _nics(files, ())}
    by_interface = {n.interface: n for n in by_port.values() if n.interface}
    out = []
    for nic in nics:
        now = by_port.get((nic.name, nic.port)) or by_interface.get(nic.interface or "")
        if now is not None:
            nic = replace(
                nic,
                kind=now.kind,
                state=now.state,
                rate_gbps=now.rate_gbps,
                interface=nic.interface or now.interface,
                virtual=nic.virtual or now.virtual,
                link_gbytes_s=now.link_gbytes_s or nic.link_gbytes_s,
            )
        out.append(nic)
    return tuple(out)


def _cores(files: Mapping[str, str]) -> tuple[set[CpuSet], dict[int, int]]:
    cores: set[CpuSet] = set()
    packages: dict[int, int] = {}
    for path in files:
        if match := _CPU.fullmatch(path):
            cpu, folder = int(match[1]), path.rpartition("/")[0]
            # core_cpus_list since Linux 5.3, thread_siblings_list before.
            siblings = _list(files, f"{folder}/core_cpus_list") or _list(files, f"{folder}/thread_siblings_list")
            cores.add(siblings or CpuSet([cpu]))
            packages[cpu] = max(_number(files, path), 0)
    if not cores:
        raise ParseError("/sys/devices/system/cpu describes no CPU; is /sys mounted here?")
    return cores, packages


def _numa_nodes(
    files: Mapping[str, str], cores: set[CpuSet], packages: dict[int, int]
) -> tuple[list[NumaNode], list[NumaNode]]:
    """Return the nodes with PUs, and the others."""
    out: list[NumaNode] = []
    for path in files:
        if match := _NODE.fullmatch(path):
            cpus = _list(files, path)
            total = _TOTAL.search(files.get(path.replace("cpulist", "meminfo"), ""))
            size = int(total[1]) * 1024 if total else 0
            package = packages.get(min(cpus), 0) if cpus else 0
            out.append(NumaNode(int(match[1]), cpus, size, package, "dram" if cpus else "other"))
    if not out:  # a kernel without CONFIG_NUMA
        out = [NumaNode(0, CpuSet(i for c in cores for i in c), 0)]
    out.sort(key=lambda n: n.os_index)
    return [n for n in out if n.cpuset], [n for n in out if not n.cpuset]


def _value(files: Mapping[str, str], path: str, convert: Callable[[str], _T], expected: str, absent: str) -> _T:
    text = files.get(path, "").strip()
    try:
        return convert(text or absent)
    except ValueError as e:
        raise ParseError(f"/sys/{path} is {text[:40]!r}; expected {expected}", evidence=text) from e


def _number(files: Mapping[str, str], path: str, absent: int = 0) -> int:
    return _value(files, path, int, "a whole number", str(absent))


def _list(files: Mapping[str, str], path: str) -> CpuSet:
    return _value(files, path, CpuSet.parse, "a list such as 0-7,16", "")


def _word(files: Mapping[str, str], path: str) -> str:
    """Return a hexadecimal word without its 0x."""
    return files.get(path, "").strip().lower().removeprefix("0x")


def _near(files: Mapping[str, str], address: str, numa: list[NumaNode] | tuple[NumaNode, ...]) -> int | None:
    node = _number(files, f"{_PCI}{address}/numa_node", -1)
    return pci.home(CpuSet([node] if node >= 0 else []), numa) if numa else None


def _pci(files: Mapping[str, str], numa: list[NumaNode]) -> tuple[list[Gpu], dict[str, tuple[str, ...]]]:
    gpus: list[Gpu] = []
    chains: dict[str, tuple[str, ...]] = {}
    for path, target in files.items():
        name = path.removeprefix(_PCI)
        if name == path or not _ADDRESS.fullmatch(name):
            continue
        address = pci.address(name)
        # …/pci0000:00/0000:00:01.0/0000:01:00.0: host bridge, bridges, the device itself
        parts = target.strip("/").split("/")
        start = next((i for i, p in enumerate(parts) if re.fullmatch(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}", p)), len(parts))
        chains[address] = tuple(parts[start:-1])
        klass, vendor = _word(files, f"{path}/class")[:4], _word(files, f"{path}/vendor")
        if kind := pci.gpu_vendor(klass, vendor):
            gpus.append(Gpu(address, vendor=kind, numa_node=_near(files, name, numa)))
    return sorted(gpus, key=lambda g: g.pci), chains


def _device_of(target: str) -> str:
    """Return the PCI function above the target of a class link."""
    addresses = _ADDRESS.findall(target)
    return addresses[-1] if addresses else ""


def _nics(files: Mapping[str, str], numa: list[NumaNode] | tuple[NumaNode, ...]) -> list[Nic]:
    nets: dict[str, list[tuple[str, int]]] = {}
    for path, target in files.items():
        if path.startswith("class/net/") and path.count("/") == 2 and (device := _device_of(target)):
            port = _number(files, f"{path}/dev_port") + 1
            nets.setdefault(device, []).append((path.rpartition("/")[2], port))
    out: list[Nic] = []
    for path in files:
        if match := _PORT.fullmatch(path):
            device = _device_of(files.get(f"class/infiniband/{match[1]}", ""))
            if device:
                out.append(_port(files, match[1], int(match[2]), device, nets.get(device, []), numa))
    taken = {n.pci for n in out}
    for device, interfaces in nets.items():
        if (address := pci.address(device)) not in taken:
            out += _plain(files, device, address, sorted(interfaces), _near(files, device, numa))
    return sorted(out, key=lambda n: (n.pci, n.name, n.port))


def _plain(
    files: Mapping[str, str], device: str, address: str, interfaces: list[tuple[str, int]], near: int | None
) -> list[Nic]:
    """Return the interfaces of a function without an RDMA device: Slingshot and plain Ethernet."""
    _, vendor, number, virtual, link = _function(files, device)
    kind = "slingshot" if pci.is_slingshot(vendor, number) else "ethernet"
    out = []
    for name, port in interfaces:
        up = files.get(f"class/net/{name}/operstate", "").strip()
        state = {"": "unknown", "unknown": "unknown", "up": "active"}.get(up, "down")
        rate = max(_value(files, f"class/net/{name}/speed", float, "a number", "0"), 0.0) / 1000
        out.append(Nic(name, address, port, kind, state, rate, near, name, virtual, link))
    return out


def _function(files: Mapping[str, str], device: str) -> tuple[str, str, str, bool, float]:
    """Return class, vendor and device of a PCI function, whether it is virtual, and its link in GB/s."""
    klass, vendor, number = (_word(files, f"{_PCI}{device}/{name}") for name in ("class", "vendor", "device"))
    virtual = f"{_PCI}{device}/physfn" in files or pci.is_virtual(vendor, number)
    speed, width = (files.get(f"{_PCI}{device}/current_link_{name}", "") for name in ("speed", "width"))
    return klass[:4], vendor, number, virtual, pci.link_gbytes_s(speed, width)


def _port(
    files: Mapping[str, str],
    name: str,
    port: int,
    device: str,
    nets: list[tuple[str, int]],
    numa: list[NumaNode] | tuple[NumaNode, ...],
) -> Nic:
    folder = f"class/infiniband/{name}/ports/{port}"
    klass, vendor, number, virtual, link = _function(files, device)
    layer = files.get(f"{folder}/link_layer", "").strip()
    lid = _value(files, f"{folder}/lid", lambda text: int(text, 16), "a hexadecimal number", "0")
    kind = pci.nic_kind(klass, vendor, number, layer, lid)
    # "4: ACTIVE"; "200 Gb/sec (4X HDR)"
    state = pci.port_state(files.get(f"{folder}/state", "").partition(":")[0].strip())
    rate = _value(files, f"{folder}/rate", lambda text: float(text.partition(" ")[0]), "a rate in Gb/sec", "0")
    ports = sum(p.startswith(f"class/infiniband/{name}/ports/") and p.endswith("/state") for p in files)
    siblings = sorted(n for n, p in nets if p == port) or (sorted(n for n, _ in nets) if ports == 1 else [])
    interface = siblings[0] if siblings else ""
    near = _near(files, device, numa)
    return Nic(name, pci.address(device), port, kind, state, rate, near, interface, virtual, link)

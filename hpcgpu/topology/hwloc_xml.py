"""Read hwloc's XML (versions 1, 2 and 3, as ``lstopo --of xml`` writes it).

Does not load libhwloc: an XML of any machine can be read on any machine. libhwloc itself is not
so general: 2.x refuses version 3, and 3.x refuses version 1.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.topology import pci, safe_xml

# OS devices: version 1 and 2 number the kinds, version 3 has a bit for each, and OpenFabrics is also a network.
_NET, _OPENFABRICS = 2, 3
_NET_BIT, _OPENFABRICS_BIT = 16, 32
# A GPU's own memory and high-bandwidth memory beside DRAM are no place for a worker's heap.
_OTHER_MEMORY = {"gpumemory": "gpu", "hbm": "hbm", "mcdram": "hbm", "cxl": "cxl"}


def read(text: str) -> Topology:
    """Return the node that ``text`` describes.

    Raises
    ------
    ParseError
        Not hwloc XML, cut off, or with a number that cannot be read.

    """
    root = safe_xml.parse(text, "hwloc XML")
    if root.tag != "topology":
        raise ParseError(f"not hwloc XML: it begins with <{root.tag}>, not <topology>", evidence=text[:400])
    try:
        topology = _topology(root)
    except ValueError as e:
        raise ParseError(f"hwloc XML with a value that cannot be read: {e}", evidence=text[:400]) from e
    if not topology.numa_nodes:
        raise ParseError("hwloc XML without a NUMA node, a machine or a PU: no node to plan for", evidence=text[:400])
    return topology


def _topology(root: ET.Element) -> Topology:
    objects = list(_walk(root, ()))
    facts = [_infos(o) for o, _ in objects if o.get("type") == "Machine"]
    numa, other = _numa_nodes([o for o, _ in objects], any(f.get("Architecture", "")[:5] == "ppc64" for f in facts))
    kinds = {kind: [_cpus(o) for o, _ in objects if o.get("type") == kind] for kind in ("Core", "PU")}
    cores = [c for c in kinds["Core"] or kinds["PU"] if c]
    gpus: list[Gpu] = []
    nics: list[Nic] = []
    chains: dict[str, tuple[str, ...]] = {}
    version3 = root.get("version", "").startswith("3")
    for device, parents in objects:
        if device.get("type") != "PCIDev" or not device.get("pci_busid"):
            continue
        address = pci.address(device.get("pci_busid", ""))
        chains[address] = tuple(_bridge(p) for p in parents if p.get("type") == "Bridge")
        near = pci.home(_nodes_above(parents), numa)
        gpus += _gpu(device, address, near)
        nics += _nics(device, address, near, version3)
    gpus.sort(key=lambda g: g.pci)
    nics.sort(key=lambda n: (n.pci, n.name, n.port))
    return Topology(
        tuple(numa),
        tuple(sorted(cores, key=min)),
        tuple(gpus),
        tuple(nics),
        pci.hops(chains, gpus, nics),
        source=f"hwloc XML v{root.get('version', '1.0')}",
        warnings=() if chains else (pci.NO_PCI,),
        other_memory=tuple(other),
        name=next((name for f in facts if (name := f.get("DMIProductName") or f.get("PlatformModel"))), "").strip(),
        l3=tuple(sorted({_cpus(o) for o, _ in objects if _is_l3(o)} - {CpuSet()}, key=min)),
    )


def _is_l3(node: ET.Element) -> bool:
    # "Cache" with a depth until hwloc 1.11.
    return node.get("type") == "L3Cache" or (node.get("type") == "Cache" and node.get("depth") == "3")


def _walk(node: ET.Element, parents: tuple[ET.Element, ...]) -> Iterator[tuple[ET.Element, tuple[ET.Element, ...]]]:
    for child in node.findall("object"):
        yield child, parents
        yield from _walk(child, (*parents, child))


def _cpus(node: ET.Element) -> CpuSet:
    return safe_xml.mask(node.get("cpuset") or "0x0")


def _numa_nodes(objects: list[ET.Element], is_power: bool) -> tuple[list[NumaNode], list[NumaNode]]:
    """Return the DRAM nodes with PUs, and the other ones.

    A version 1 file of a machine with one node may name none. Where all memory is of the fast kind
    (Xeon Max without DIMMs) it is what there is.
    """
    # "Socket" until hwloc 1.10.
    packages = [(int(o.get("os_index", "0")), _cpus(o)) for o in objects if o.get("type") in ("Package", "Socket")]
    named = [o for o in objects if o.get("type") == "NUMANode"]
    out: dict[int, NumaNode] = {}
    for o in named or [o for o in objects if o.get("type") == "Machine"]:
        cpus = _cpus(o)
        index = int(o.get("os_index", "0")) if named else 0
        package = next((i for i, p in packages if p & cpus), 0)
        subtype = (o.get("subtype") or "").lower()
        kind = next((kind for word, kind in _OTHER_MEMORY.items() if subtype.startswith(word)), "dram")
        if kind == "dram" and not cpus:  # hwloc 1 and sysfs show the memory of POWER9's GPUs as nodes without PUs
            kind = "gpu" if is_power else "other"
        out[index] = NumaNode(index, cpus, int(o.get("local_memory", "0")), package, kind)
    nodes = [out[i] for i in sorted(out)]
    heap = "dram" if any(n.kind == "dram" for n in nodes) else "hbm"
    return (
        [replace(n, kind="dram") for n in nodes if n.kind == heap and n.cpuset],
        [n for n in nodes if n.kind != heap or not n.cpuset],
    )


def _bridge(node: ET.Element) -> str:
    return f"{node.get('pci_busid', 'host')}/{node.get('bridge_pci', '')}"


def _nodes_above(parents: tuple[ET.Element, ...]) -> CpuSet:
    """Return the NUMA nodes of the nearest ancestor that has any: I/O hangs below what it is near to."""
    sets = (safe_xml.mask(p.get("nodeset") or "0x0") for p in reversed(parents))
    return next((s for s in sets if s), CpuSet())


def _ids(device: ET.Element) -> tuple[str, str, str]:
    """Return class, vendor and device from ``0302 [10de:2335] [10de:18bf] a1``."""
    klass, _, rest = device.get("pci_type", "").partition(" ")
    vendor, _, number = rest.partition("]")[0].strip("[ ").partition(":")
    return klass.lower(), vendor.lower(), number.lower()


def _infos(node: ET.Element) -> dict[str, str]:
    return {i.get("name", ""): i.get("value", "") for i in node.findall("info")}


def _gpu(device: ET.Element, address: str, near: int | None) -> list[Gpu]:
    klass, vendor, _ = _ids(device)
    name = pci.gpu_vendor(klass, vendor)
    if not name:
        return []
    facts = _infos(device)
    for osdev in device.findall("object"):
        facts |= _infos(osdev)
    # In KiB; hwloc 3 writes the unit too ("16671616KiB").
    size = int(facts.get("CUDAGlobalMemorySize", "0").removesuffix("KiB")) * 1024
    model = facts.get("GPUModel") or facts.get("PCIDevice", "")
    return [Gpu(address, facts.get("NVIDIAUUID", ""), model.strip(), name, near, size)]


def _nics(device: ET.Element, address: str, near: int | None, version3: bool) -> list[Nic]:
    klass, vendor, number = _ids(device)
    rdma: list[ET.Element] = []
    nets: list[ET.Element] = []
    for osdev in device.findall("object"):
        kind = int(osdev.get("osdev_type", "-1") if osdev.get("type") == "OSDev" else "-1")
        if kind > 0 and kind & _OPENFABRICS_BIT if version3 else kind == _OPENFABRICS:
            rdma.append(osdev)
        elif kind > 0 and kind & _NET_BIT if version3 else kind == _NET:
            nets.append(osdev)
    virtual = pci.is_virtual(vendor, number)
    if pci.is_slingshot(vendor, number):
        # hwloc tells no state of an interface; the live machine's is added from /sys (topology.sysfs.refine_nics).
        name = next((o.get("name", "") for o in rdma), "") or next((o.get("name", "") for o in nets), "")
        interface = next((o.get("name", "") for o in nets if not o.get("name", "").startswith("cxi")), "")
        return [Nic(name, address, 1, "slingshot", "unknown", 0.0, near, interface)] if name else []
    if not rdma:
        names = sorted((int(_infos(o).get("Port") or "1"), o.get("name", "")) for o in nets)
        return [Nic(name, address, port, "ethernet", "unknown", 0.0, near, name, virtual) for port, name in names]
    out = []
    for osdev in rdma:
        facts = _infos(osdev)
        ports = [int(k[4:-5]) for k in facts if k.startswith("Port") and k.endswith("State")]
        for port in sorted(ports) or [1]:
            lid = int(facts.get(f"Port{port}LID") or "0", 16)
            interface = _sibling(nets, port, len(ports))
            kind_name = pci.nic_kind(klass, vendor, number, lid=lid)
            state = pci.port_state(facts.get(f"Port{port}State", ""))
            out.append(Nic(osdev.get("name", ""), address, port, kind_name, state, 0.0, near, interface, virtual))
    return out


def _sibling(nets: list[ET.Element], port: int, ports: int) -> str:
    """Return the IP interface of a port: the function's only one, or the one that says the same port."""
    same = [n for n in nets if int(_infos(n).get("Port") or "1") == port]
    chosen = same or (nets if ports <= 1 else [])
    return chosen[0].get("name", "") if chosen else ""

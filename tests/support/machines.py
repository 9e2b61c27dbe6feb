"""Machines as the tests of plans take them: recorded ones, and those of which their sites' documents tell."""

import functools
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import fakesys
import pytest
from paths import ROOT, TOPOLOGIES

from hpcgpu.config.sites.node_topology import topology_of
from hpcgpu.config.sites.read import read_site
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.plan.binding.bindings import simulated_gpus
from hpcgpu.topology.hwloc_xml import read_file

MACHINES = sorted(p.stem for p in TOPOLOGIES.glob("*.xml"))
GIB = 2**30
HWLOC = [name for name in MACHINES if name != "aws-p4de-24xl-topo"]
mask = functools.partial(fakesys.mask, prefix="0x")
IDS = {
    "nvidia": "0302 [10de:2330] [10de:1626] a1",
    "amd": "0380 [1002:740c] [1002:0b0c] 01",
    "infiniband": "0207 [15b3:101b] [15b3:0007] 00",
    "roce": "0200 [15b3:101d] [15b3:0016] 00",
    "slingshot": "0200 [17db:0501] [17db:0001] 02",
}
# LUMI and Frontier leave 56 of 64 cores to jobs; that it is the first of each eight follows from LUMI's list.
_WITHOUT_FIRST = CpuSet(i for i in range(64) if i % 8)
GRANTED: dict[str, CpuSet] = {"frontier": _WITHOUT_FIRST, "lumi-g": _WITHOUT_FIRST}
LUMI_CORES = (49, 57, 17, 25, 1, 9, 33, 41)


@cache
def machine(name: str) -> Topology:
    return read_file(text_of(name))


def pus(topology: Topology) -> CpuSet:
    return CpuSet(i for c in topology.cores for i in c)


def gpus_of(topology: Topology) -> tuple[Gpu, ...]:
    """Its GPUs, or four simulated ones where it has none."""
    return topology.gpus or simulated_gpus(topology, 4, GIB, "node")


@cache
def text_of(name: str) -> str:
    return (TOPOLOGIES / f"{name}.xml").read_text()


def granted(text: str, pus: Iterable[int], nodes: Iterable[int] | None = None) -> str:
    """What ``lstopo --disallowed`` writes in a job with these PUs and NUMA nodes."""
    for name, numbers in (("cpuset", pus), ("nodeset", nodes)):
        if numbers is not None:
            text = re.sub(rf'allowed_{name}="[^"]*"', f'allowed_{name}="{mask(numbers)}"', text, count=1)
    return text


def with_device(text: str, place: int, address: str, ids: str, model: str = "") -> str:
    """One more PCI function, below one of the objects that have devices."""
    root = ET.fromstring(text)
    places = [o for o in root.iter("object") if o.find("object[@type='Bridge']") is not None] or [root.find("object")]
    device = ET.SubElement(places[place % len(places)], "object", type="PCIDev", pci_busid=address, pci_type=ids)
    if model:
        ET.SubElement(device, "info", name="PCIDevice", value=model)
    return ET.tostring(root, encoding="unicode")


def with_flat_memory(text: str, share: float, latency: bool) -> str:
    """A second NUMA node beside each, of the same PUs and with no subtype, as hwloc 2.2 to 2.4 show flat HBM."""
    root = ET.fromstring(text)
    above = {child: parent for parent in root.iter() for child in parent}
    nodes = [(p, o) for p in root.iter("object") for o in p.findall("object[@type='NUMANode']")]
    first = max(int(o.get("os_index", "0")) for _, o in nodes) + 1
    latencies = ET.SubElement(root, "memattr", name="Latency", flags="6") if latency else None
    for old in root.findall("memattr") if latency else []:
        if old is not latencies and old.get("name") == "Latency":
            root.remove(old)
    for i, (parent, node) in enumerate(nodes):
        fast = ET.SubElement(parent, "object", node.attrib)
        fast.set("os_index", str(first + i))
        fast.set("gp_index", str(100_000 + i))
        fast.set("nodeset", mask([first + i]))
        fast.set("complete_nodeset", mask([first + i]))
        fast.set("local_memory", str(int(int(node.get("local_memory", "0")) * share)))
        place: ET.Element | None = parent
        while place is not None:
            for name in ("nodeset", "complete_nodeset", "allowed_nodeset"):
                if place.get(name):
                    place.set(name, mask({*CpuSet.from_mask(place.get(name, "")), first + i}))
            place = above.get(place)
        for o, value in ((node, "110"), (fast, "140")) if latencies is not None else ():
            target = {"target_obj_type": "NUMANode", "target_obj_gp_index": o.get("gp_index", "")}
            ET.SubElement(latencies, "memattr_value", target, value=value, initiator_cpuset=node.get("cpuset", ""))
    return ET.tostring(root, encoding="unicode")


def lstopo(*arguments: str, stdin: str = "") -> str:
    """What lstopo of hwloc 2 writes; version 3 no longer writes version 1."""
    program = shutil.which("lstopo-no-graphics") or shutil.which("lstopo")
    if program is None:
        pytest.skip("no lstopo here (Debian: hwloc-nox)")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=20).stdout
    if not re.search(r" 2\.\d", version):
        pytest.skip(f"no lstopo of hwloc 2 here: {version.strip()}")
    argv = [program, *arguments]
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=True, timeout=60).stdout


def as_xml(topology: Topology, *, subtypes: bool = True) -> str:
    """A machine as hwloc 2 writes it; without subtypes as 2.4 does, which gives all memory the PUs beside it."""
    everything, nodes = pus(topology), (*topology.numa_nodes, *topology.other_memory)
    numbers = mask(n.os_index for n in nodes)
    granted_to = {"allowed_cpuset": mask(everything), "allowed_nodeset": numbers}
    root = ET.Element("topology", version="2.0")
    whole = {"type": "Machine", "cpuset": mask(everything), "nodeset": numbers, "complete_nodeset": numbers}
    machine_ = ET.SubElement(root, "object", whole | granted_to)
    for package in sorted({n.package for n in topology.numa_nodes}):
        _package(machine_, topology, package, subtypes)
    for nic in (n for n in topology.nics if n.numa_node is None):
        _nic(machine_, nic)
    return ET.tostring(root, encoding="unicode")


def _package(parent: ET.Element, topology: Topology, package: int, subtypes: bool) -> None:
    mine = [n for n in topology.numa_nodes if n.package == package]
    beside = [n for n in topology.other_memory if n.package == package]
    places = {"nodeset": mask(n.os_index for n in (*mine, *beside))}
    cpus = {"cpuset": mask(i for n in mine for i in n.cpuset)}
    box = ET.SubElement(parent, "object", {"type": "Package", "os_index": str(package)} | cpus | places)
    for i, node in enumerate(mine):
        memories = [node, *(beside if i == 0 else ())]
        near = {"cpuset": mask(node.cpuset), "nodeset": mask(n.os_index for n in memories)}
        group = ET.SubElement(box, "object", {"type": "Group"} | near)
        for memory in memories:
            facts = {"os_index": str(memory.os_index), "local_memory": str(memory.memory_bytes)}
            facts |= {"cpuset": mask(node.cpuset), "nodeset": mask([memory.os_index])}
            facts |= {"subtype": "GPUMemory"} if subtypes and memory.kind == "gpu" else {}
            ET.SubElement(group, "object", {"type": "NUMANode"} | facts)
        for core in topology.cores:
            if core & node.cpuset:
                ET.SubElement(group, "object", type="Core", cpuset=mask(core))
        for gpu in (g for g in topology.gpus if g.numa_node == node.os_index):
            ET.SubElement(group, "object", type="PCIDev", pci_busid=gpu.pci, pci_type=IDS[gpu.vendor])
        for nic in (n for n in topology.nics if n.numa_node == node.os_index):
            _nic(group, nic)


def _nic(parent: ET.Element, nic: Nic) -> None:
    device = ET.SubElement(parent, "object", type="PCIDev", pci_busid=nic.pci, pci_type=IDS[nic.kind])
    osdev = ET.SubElement(device, "object", type="OSDev", name=nic.name, osdev_type="2" if nic.interface else "3")
    if not nic.interface:
        ET.SubElement(osdev, "info", name="Port1State", value="4")


def _node(cores: Sequence[int], homes: Sequence[int], packages: Sequence[int], vendor: str = "nvidia") -> Topology:
    """``cores`` and ``packages`` are those of each NUMA node, ``homes`` the NUMA nodes of each GPU."""
    starts = [sum(cores[:i]) for i in range(len(cores) + 1)]
    numa = tuple(
        NumaNode(i, CpuSet(range(starts[i], starts[i + 1])), 64 * 2**30, package) for i, package in enumerate(packages)
    )
    gpus = tuple(Gpu(f"0000:{16 + i:02x}:00.0", vendor=vendor, numa_node=home) for i, home in enumerate(homes))
    return Topology(numa, tuple(CpuSet([i]) for i in range(starts[-1])), gpus, source="documented")


def _with_ports(topology: Topology, kind: str, homes: Sequence[int | None]) -> Topology:
    """Ports of ``kind`` on these NUMA nodes; Slingshot's are named by their interface, the others as mlx5_N."""
    hsn = kind == "slingshot"
    ports = ((f"{'hsn' if hsn else 'mlx5_'}{i}", f"0000:{128 + i:02x}:00.0", home) for i, home in enumerate(homes))
    nics = (Nic(name, pci, kind=kind, numa_node=home, interface=name if hsn else "") for name, pci, home in ports)
    return topology._replace(nics=tuple(nics))


def site_nodes() -> Iterator[tuple[str, Topology]]:
    """Yield the documented nodes of the site files: ``polaris-a100``."""
    for path in sorted((ROOT / "site_configs").glob("*.yaml")):
        for kind, node in read_site(path.read_text(), path.name).nodes.items():
            if node.gpu_numa:
                yield f"{path.stem}-{kind}", topology_of(node)


DOCUMENTED: dict[str, Topology] = {
    **dict(site_nodes()),
    # Machines without CUDA have no site file, and are planned for all the same.
    # OLCF, Frontier user guide: eight GCDs; GPUs 4,5 | 2,3 | 6,7 | 0,1 on NUMA nodes 0 to 3; four Slingshot ports.
    "frontier": _with_ports(_node([16] * 4, [3, 3, 1, 1, 0, 0, 2, 2], [0] * 4, "amd"), "slingshot", [None] * 4),
    # LUMI user guide: the first cores for GPUs 0 to 7 are 49, 57, 17, 25, 1, 9, 33, 41.
    "lumi-g": _with_ports(_node([16] * 4, [3, 3, 1, 1, 0, 0, 2, 2], [0] * 4, "amd"), "slingshot", [None] * 4),
}

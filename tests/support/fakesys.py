"""A recorded machine as a tree of files that libhwloc, lstopo and hpcgpu discover as if it were this one."""

import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Iterator
from pathlib import Path

from paths import TOPOLOGIES

from hpcgpu.model import CpuSet, NumaNode, Topology
from hpcgpu.topology import hwloc_xml, pci

# THISSYSTEM=0: hwloc asks neither this machine's kernel nor its CPU. "stop": no component but these two.
ENVIRONMENT = {"HWLOC_COMPONENTS": "linux,linuxio,stop", "HWLOC_THISSYSTEM": "0"}


def environment(root: Path) -> dict[str, str]:
    return {"HWLOC_FSROOT": str(root), **ENVIRONMENT}


def build(name: str, root: Path, numa_known: bool = True, extra: tuple[NumaNode, ...] = ()) -> Topology:
    """Write the machine below ``root`` and return what is recorded of it."""
    text = (TOPOLOGIES / f"{name}.xml").read_text()
    topology, xml = hwloc_xml.read_file(text), ET.fromstring(text)
    sys = root / "sys"
    _cpus(sys, topology)
    _nodes(sys, (*topology.numa_nodes, *topology.other_memory, *extra))
    if topology.name:
        _write(sys / "class/dmi/id", product_name=topology.name)
    version3 = "v3" in topology.source
    for device, chain, nodes in _pci(xml, (), CpuSet()):
        _device(sys, device, chain, nodes if numa_known else CpuSet(), topology)
        for osdev in device.findall("object[@type='OSDev']"):
            _osdev(sys, osdev, chain, device, version3)
    return topology


def _write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")


def mask(cpus: Iterable[int], prefix: str = "") -> str:
    """Write a mask as the kernel does: words of 32 bits, the highest first; hwloc's have the prefix ``0x``."""
    value = sum(1 << i for i in cpus)
    words = [f"{prefix}{value >> shift & 0xFFFFFFFF:08x}" for shift in range(0, max(value.bit_length(), 1), 32)]
    return ",".join(reversed(words))


def _cpus(sys: Path, topology: Topology) -> None:
    everything = CpuSet(CpuSet().union(*topology.cores))
    _write(sys / "devices/system/cpu", online=everything, possible=everything, present=everything)
    # hwloc asks of PU 0 whether PUs are described at all; in Lassen's recording it is one that was left out.
    _write(sys / "devices/system/cpu/cpu0/topology", core_cpus=0, package_cpus=0)
    packages: dict[int, set[int]] = {}
    for node in topology.numa_nodes:
        packages.setdefault(node.package, set()).update(node.cpuset)
    for cache in topology.l3:
        files = {"level": 3, "type": "Unified", "size": "32768K"}
        for cpu in cache:
            folder = sys / f"devices/system/cpu/cpu{cpu}/cache/index3"
            _write(folder, **files, shared_cpu_map=mask(cache), shared_cpu_list=cache)
    for number, core in enumerate(topology.cores):
        package = next((i for i, cpus in packages.items() if cpus & core), 0)
        files = {"core_id": number, "physical_package_id": package, "core_cpus_list": core}
        files |= dict.fromkeys(("core_cpus", "thread_siblings"), mask(core)) | {"thread_siblings_list": core}
        files |= dict.fromkeys(("package_cpus", "core_siblings"), mask(packages.get(package, everything)))
        for cpu in core:
            _write(sys / f"devices/system/cpu/cpu{cpu}/topology", **files)


def _nodes(sys: Path, nodes: Iterable[NumaNode]) -> None:
    nodes = sorted(nodes, key=lambda n: n.os_index)
    for node in nodes:
        folder = sys / f"devices/system/node/node{node.os_index}"
        # a cpumap of zeros for memory without PUs: hwloc drops a node without the file
        _write(folder, cpumap=mask(node.cpuset), cpulist=node.cpuset)
        distances = ("10" if n is node else "20" if n.package == node.package else "40" for n in nodes)
        meminfo = f"Node {node.os_index} MemTotal: {node.memory_bytes // 1024} kB"
        _write(folder, meminfo=meminfo, distance=" ".join(distances))
    _write(sys / "devices/system/node", online=CpuSet(n.os_index for n in nodes))


def _pci(
    parent: ET.Element, chain: tuple[str, ...], nodes: CpuSet
) -> Iterator[tuple[ET.Element, tuple[str, ...], CpuSet]]:
    """Yield the PCI functions, bridges too, with the folders above each and the NUMA nodes that it is near."""
    nodes = CpuSet.from_mask(parent.get("nodeset") or "0x0") or nodes
    for child in parent.findall("object"):
        address, below = child.get("pci_busid"), chain
        if child.get("type") == "Bridge" and not address:  # 0000:[40-5f], the host bridge: no function, a root
            below = (f"pci{child.get('bridge_pci', '').replace('[', '').partition('-')[0]}",)
        elif child.get("type") in ("Bridge", "PCIDev") and address:
            below = (*chain, address)
            yield child, below, nodes
        yield from _pci(child, below, nodes)


def _device(sys: Path, device: ET.Element, chain: tuple[str, ...], nodes: CpuSet, topology: Topology) -> None:
    # "0302 [10de:2335] [10de:18bf] a1": class, vendor:device, those of the board, revision
    klass, vendor, number, board, model, revision = re.findall(r"[0-9a-f]+", device.get("pci_type", "").lower())[:6]
    near = [n for n in topology.numa_nodes if n.os_index in nodes]
    cpus = CpuSet().union(*(n.cpuset for n in near or topology.numa_nodes))
    folder = sys.joinpath("devices", *chain)
    numbers = {"class": f"{klass}00", "vendor": vendor, "device": number, "revision": revision}
    numbers |= {"subsystem_vendor": board, "subsystem_device": model}
    _write(folder, **{name: f"0x{value}" for name, value in numbers.items()}, local_cpus=mask(cpus))
    _write(folder, numa_node=near[0].os_index if len(near) == 1 else -1)
    _write(folder, **_link_of(float(device.get("pci_link_speed", "0"))))
    config = bytearray(64)  # hwloc reads of it the kind of header and, of a bridge, the buses below it
    for offset, word in ((0, vendor), (2, number), (0x0A, klass)):
        config[offset : offset + 2] = int(word, 16).to_bytes(2, "little")
    config[8] = int(revision, 16)
    if device.get("type") == "Bridge":
        _, _, below = device.get("bridge_pci", "").partition("[")
        config[0x0E] = 1
        config[0x18] = int(chain[-1].split(":")[1], 16)
        config[0x19], config[0x1A] = (int(bus, 16) for bus in below.strip("]").split("-"))
    (folder / "config").write_bytes(config)
    _link(sys / "bus/pci/devices" / chain[-1], folder)


def _link_of(gbytes_s: float) -> dict[str, object]:
    """The link's speed and width, as the kernel tells them, from its data rate."""
    for speed in ("2.5", "5.0", "8.0", "16.0", "32.0"):
        lane = pci.link_gbytes_s(f"{speed} GT/s", "1")
        for width in (1, 2, 4, 8, 16):
            if abs(lane * width - gbytes_s) < 0.01:
                return {"current_link_speed": f"{speed} GT/s PCIe", "current_link_width": width}
    return {}


def _osdev(sys: Path, osdev: ET.Element, chain: tuple[str, ...], device: ET.Element, version3: bool) -> None:
    name, kind = osdev.get("name", ""), int(osdev.get("osdev_type", "0"))
    facts = {i.get("name", ""): i.get("value", "") for i in osdev.findall("info")}
    folder = sys.joinpath("devices", *chain)
    if kind in ((32, 48) if version3 else (3,)):
        entry = folder / "infiniband" / name
        _write(entry, node_guid=facts.get("NodeGUID", ""), sys_image_guid=facts.get("SysImageGUID", ""))
        for port in (k[4:-5] for k in facts if re.fullmatch(r"Port\d+State", k)):
            lid = int(facts.get(f"Port{port}LID", "0"), 16)
            infiniband = device.get("pci_type", "")[:4] in ("0207", "0208") or lid
            files = {"state": f"{facts[f'Port{port}State']}: -", "lid": f"{lid:#x}", "lid_mask_count": 0}
            _write(entry / "ports" / port, **files, link_layer="InfiniBand" if infiniband else "Ethernet")
        _link(sys / "class/infiniband" / name, entry)
    elif kind == (16 if version3 else 2):
        entry = folder / "net" / name
        port = int(facts.get("Port", "1")) - 1
        _write(entry, address=facts.get("Address", ""), dev_port=port, dev_id=f"{port:#x}")
        _link(sys / "class/net" / name, entry)
    else:  # disks, and what drivers of GPUs show: hpcgpu reads neither from /sys
        return
    _link(entry / "device", folder)


def _link(path: Path, target: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Relative, as the kernel writes them: hwloc reads links without regard to its root.
    path.symlink_to(os.path.relpath(target, path.parent))

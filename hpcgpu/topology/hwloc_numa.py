"""Read the NUMA nodes of hwloc's XML, DRAM next to cores and other memory."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpcgpu.model import CpuSet, NumaNode
from hpcgpu.topology import safe_xml

# An object and its ancestors, the outermost first.
Placed = tuple[ET.Element, tuple[ET.Element, ...]]
# A GPU's own memory, and high-bandwidth memory beside DRAM, are not for a worker's heap.
_OTHER_MEMORY = {"gpumemory": "gpu", "hbm": "hbm", "mcdram": "hbm", "cxl": "cxl"}
_PACKAGES = ("Package", "Socket")  # "Socket" until hwloc 1.10
_LOCAL = ("Core", "PU", "Bridge", "PCIDev", "OSDev")


@dataclass(frozen=True, slots=True)
class _Memory:
    """A NUMA node with its place and speed."""

    node: NumaNode
    home: ET.Element | None  # the object whose PUs are local to it (since version 2)
    latency: int  # 0: unknown
    bandwidth: int  # 0: unknown


def read_numa_nodes(
    root: ET.Element, objects: Sequence[Placed], *, is_power: bool
) -> tuple[list[NumaNode], list[NumaNode]]:
    """Return the NUMA nodes with DRAM, and those with other memory; raise Misread for an invalid value."""
    # A version 1 file of a machine with a single node may name no node. Where all memory is of the fast kind (Xeon Max
    # without DIMMs), that memory counts as DRAM. A PU is next to one node with DRAM, whatever the file says.
    packages = [(safe_xml.count(o, "os_index"), _cpus(o)) for o, _ in objects if o.get("type") in _PACKAGES]
    named = [placed for placed in objects if placed[0].get("type") == "NUMANode"]
    latency, bandwidth = _attribute(root, "Latency", min), _attribute(root, "Bandwidth", max)
    memories_by_index: dict[int, _Memory] = {}
    for o, parents in named or [placed for placed in objects if placed[0].get("type") == "Machine"]:
        index = safe_xml.count(o, "os_index") if named else 0
        if index in memories_by_index:
            raise safe_xml.Misread(o, "os_index", "a number that no other NUMA node has")
        cpus = _cpus(o)
        kind = _kind(o, parents, cpus, is_power)
        package = _package(parents, cpus, packages)
        node = NumaNode(index, cpus, safe_xml.count(o, "local_memory"), package, kind)
        number = o.get("gp_index", "")
        home = parents[-1] if parents and o.find("object") is None else None
        memories_by_index[index] = _Memory(node, home, latency.get(number, 0), bandwidth.get(number, 0))
    memories = [memories_by_index[i] for i in sorted(memories_by_index)]
    heap = "dram" if any(m.node.kind == "dram" for m in memories) else "hbm"
    dram, beside = _separate_dram([m for m in memories if m.node.kind == heap])
    others = [*(m.node for m in memories if m.node.kind != heap), *beside]
    return dram, sorted(others, key=lambda n: n.os_index)


def _separate_dram(memories: Sequence[_Memory]) -> tuple[list[NumaNode], list[NumaNode]]:
    """Separate DRAM from memory that only looks like DRAM: hwloc 2.2 to 2.4 give it the PUs of its neighbour."""
    # These versions give MCDRAM, HBM, CXL and GPU memory no subtype. DRAM has the least latency to its PUs, if the file
    # has latencies; else the lowest number, because Linux numbers nodes with PUs first. The size is no criterion: a
    # machine may have less DRAM than other memory.
    has_latencies = all(m.latency for m in memories)
    owner_of: dict[int, _Memory] = {}
    dram_of: dict[int, _Memory] = {}
    dram, others = [], []
    for memory in sorted(memories, key=lambda m: (m.latency if has_latencies else 0, m.node.os_index)):
        node = memory.node
        cpus = CpuSet(node.cpuset.difference(owner_of))
        first = owner_of[min(node.cpuset)] if node.cpuset and not cpus else None
        if not node.cpuset and memory.home is not None:
            first = dram_of.get(id(memory.home))
        if first is None:
            dram.append(replace(node, kind="dram", cpuset=cpus))
            owner_of |= dict.fromkeys(cpus, memory)
            if memory.home is not None:
                dram_of.setdefault(id(memory.home), memory)
        else:
            others.append(replace(node, kind="hbm" if memory.bandwidth > first.bandwidth > 0 else "other"))
    return sorted(dram, key=lambda n: n.os_index), others


def _cpus(node: ET.Element) -> CpuSet:
    """Return the PUs; PUs that were not granted are in ``complete_cpuset`` only."""
    return safe_xml.cpuset(node, "cpuset") or safe_xml.cpuset(node, "complete_cpuset")


def _kind(node: ET.Element, parents: Sequence[ET.Element], cpus: CpuSet, is_power: bool) -> str:
    subtype = (node.get("subtype") or "").lower()
    kind = next((kind for prefix, kind in _OTHER_MEMORY.items() if subtype.startswith(prefix)), "dram")
    if kind != "dram" or cpus or _lost_its_pus(node, parents):
        return kind
    return "gpu" if is_power else "other"  # hwloc 1 and sysfs show the memory of POWER9's GPUs as nodes without PUs


def _lost_its_pus(node: ET.Element, parents: Sequence[ET.Element]) -> bool:
    """Return whether memory without PUs is DRAM whose PUs were cut away (lstopo --restrict)."""
    # Other memory never had PUs, and is attached to an object with PUs. In version 1, cores and devices that are local
    # to a DRAM node are below it. A Group without PUs below the node is no sign: hwloc 1 puts one there for the memory
    # of POWER9's GPUs.
    above = parents[-1] if parents else None
    beside_none = above is not None and above.get("cpuset") is not None and not _cpus(above)
    return beside_none or any(
        o.get("type") in _LOCAL or safe_xml.cpuset(o, "complete_cpuset") for o in node.iter("object")
    )


def _package(parents: Sequence[ET.Element], cpus: CpuSet, packages: Sequence[tuple[int, CpuSet]]) -> int:
    numbers = [safe_xml.count(p, "os_index") for p in reversed(parents) if p.get("type") in _PACKAGES]
    return next(iter(numbers), next((i for i, pus in packages if pus & cpus), 0))


def _attribute(root: ET.Element, name: str, nearest: Callable[[int, int], int]) -> dict[str, int]:
    """Return a memory attribute (since hwloc 2.3) of each NUMA node by its ``gp_index``, from its nearest PUs."""
    out: dict[str, int] = {}
    for value in root.findall(f"memattr[@name='{name}']/memattr_value[@target_obj_type='NUMANode']"):
        target, number = value.get("target_obj_gp_index", ""), safe_xml.whole(value, "value")
        out[target] = nearest(out[target], number) if target in out else number
    return out

"""Read hwloc's XML (versions 1, 2 and 3, as ``lstopo --of xml`` writes it); a file may also be NCCL's topology XML.

libhwloc is not loaded: 2.x refuses version 3, 3.x refuses version 1, and here any machine's XML is read on any machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from hpcgpu.errors import ParseError
from hpcgpu.light_typing import NamedTuple
from hpcgpu.model.allocation import CpuSet
from hpcgpu.model.topology import Gpu, Nic, NumaNode, Topology
from hpcgpu.topology import pci
from hpcgpu.topology.pci import Element

# OS devices: version 1 and 2 number the kinds, version 3 has a bit for each, and OpenFabrics is also a network.
_NET, _OPENFABRICS = 2, 3
_NET_BIT, _OPENFABRICS_BIT = 16, 32
_NOTHING = (
    "this hwloc XML has no core, no PU and no NUMA node with PUs, so it describes no node; expected: the output of "
    "lstopo --of xml without --filter, --only and --no-... options"
)
_LEFT_OUT = (
    "this file lacks NUMA nodes {}, and the places of GPUs next to them: lstopo --disallowed --of xml writes all nodes"
)
_NO_CORES = "the file does not describe which PUs share a core ({})"
_TWICE = "{} is described in two places: the first GPU or network card counts"
_SCRUBBED = "several GPUs have the UUID {}: it is ignored"
MAX_BYTES = 8 * 2**20  # of a file; recorded ones are below 1 MiB. A caller reads at most one byte more.
_ALLOWED = (
    "hwloc's XML (lstopo --disallowed --of xml machine.xml), NCCL's topology XML (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE)"
)
# An object and its ancestors, the outermost first.
Placed = tuple[Element, tuple[Element, ...]]
# A GPU's own memory, and high-bandwidth memory beside DRAM, are not for a worker's heap.
_OTHER_MEMORY = {"gpumemory": "gpu", "hbm": "hbm", "mcdram": "hbm", "cxl": "cxl"}
_PACKAGES = ("Package", "Socket")  # "Socket" until hwloc 1.10
_LOCAL = ("Core", "PU", "Bridge", "PCIDev", "OSDev")


def _topology(root: Element, text: str) -> Topology:
    """Convert the root of hwloc's XML, of which ``text`` is for errors."""
    objects = list(_walk(root, ()))
    machines = [o for o, _ in objects if o.get("type") == "Machine"]
    facts = [_infos(o) for o in machines]
    is_power = any(f.get("Architecture", "")[:5] == "ppc64" for f in facts)
    numa, other = read_numa_nodes(root, objects, is_power=is_power)
    cores, warnings = _cores([o for o, _ in objects], numa)
    if not cores:
        raise ParseError(_NOTHING, evidence=text[:400])
    if not numa:
        raise ParseError("this hwloc XML has no NUMA node with memory and PUs", evidence=text[:400])
    gpus, nics, chains, twice = _devices(objects, numa, version3=root.get("version", "").startswith("3"))
    # Some people scrub the UUIDs of their files.
    equal = [uuid for uuid, count in Counter(g.uuid for g in gpus if g.uuid).items() if count > 1]
    gpus = [g._replace(uuid="") if g.uuid in equal else g for g in gpus]
    nodes = CpuSet().union(*(pci.cpuset(m, "complete_nodeset") for m in machines))
    left_out = [_LEFT_OUT.format(CpuSet(missing))] if (missing := nodes - _described(objects)) else []
    warnings = (*warnings, *twice, *(_SCRUBBED.format(uuid) for uuid in equal), *left_out)
    kinds = tuple(pci.cpuset(kind, "cpuset") for kind in root.all("cpukind"))
    # "Cache" with a depth until hwloc 1.11.
    caches = [o for o, _ in objects if o.get("type") == "L3Cache" or (o.get("type"), o.get("depth")) == ("Cache", "3")]
    return Topology(
        tuple(numa),
        cores,
        tuple(gpus),
        tuple(nics),
        pci.hops(chains, gpus, nics),
        source=f"hwloc XML v{pci.word(root, 'version') or '1.0'}",
        warnings=(*warnings, *(() if chains else (pci.NO_PCI,))),
        other_memory=tuple(other),
        name=pci.product_name(*(f.get(key, "") for f in facts for key in ("DMIProductName", "PlatformModel"))),
        core_kinds=kinds if len(kinds) > 1 else (),
        l3=tuple(sorted({pci.cpuset(o, "cpuset") for o in caches} - {CpuSet()}, key=min)),
        allowed=_allowed(machines, "allowed_cpuset"),
        allowed_nodes=_allowed(machines, "allowed_nodeset"),
    )


def _cores(objects: Sequence[Element], numa: Sequence[NumaNode]) -> tuple[tuple[CpuSet, ...], tuple[str, ...]]:
    core_of: dict[int, CpuSet] = {}
    for o, cpus in ((o, pci.cpuset(o, "cpuset")) for o in objects if o.get("type") == "Core"):
        if not core_of.keys().isdisjoint(cpus):
            raise pci.Misread(o, "cpuset", "PUs that no other core has")
        core_of |= dict.fromkeys(cpus, cpus)
    if core_of:
        return tuple(sorted({*core_of.values()}, key=min)), ()
    rest = {pci.cpuset(o, "cpuset") for o in objects if o.get("type") == "PU"} - {CpuSet()}
    from hpcgpu.topology.nccl_xml import cores_of_masks

    cores_by_mask, how = cores_of_masks(n.cpuset for n in numa)
    alone = sorted(pu for pu in rest if not any(pu & core for core in cores_by_mask))
    return tuple(sorted([*cores_by_mask, *alone], key=min)), (_NO_CORES.format(how),) if cores_by_mask or alone else ()


def _allowed(machines: Sequence[Element], name: str) -> CpuSet | None:
    """Return the PUs or NUMA nodes that were granted to the process that wrote the file; None: unknown."""
    machine = next((m for m in machines if m.get(name)), None)
    return None if machine is None else pci.cpuset(machine, name)


def _devices(
    objects: Sequence[Placed], numa: Sequence[NumaNode], *, version3: bool
) -> tuple[list[Gpu], list[Nic], dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return GPUs, ports, the bridges above each PCI function, and warnings."""
    gpus: list[Gpu] = []
    nics: list[Nic] = []
    chains: dict[str, tuple[str, ...]] = {}
    described, twice = _described(objects), dict[str, None]()
    for device, parents in objects:
        if device.get("type") != "PCIDev":
            continue
        address = pci.read(device, "pci_busid", pci.address, "a PCI address such as 0000:06:00.0")
        if address in chains:  # people edit files; two GPUs could not be distinguished
            twice[address] = None
            is_gpu = any(g.pci == address for g in gpus)
            if is_gpu and _gpu(device, address, None):
                raise pci.Misread(device, "pci_busid", "a PCI address that no other GPU has")
            if is_gpu or any(n.pci == address for n in nics):
                continue
        bridges = (p for p in parents if p.get("type") == "Bridge")
        chains[address] = tuple(f"{p.get('pci_busid', 'host')}/{p.get('bridge_pci', '')}" for p in bridges)
        # Devices are below the object that they are local to. complete_nodeset also has nodes that were not granted:
        # if these are missing in the file, devices near them are attached higher up.
        sets = (pci.cpuset(p, "complete_nodeset") or pci.cpuset(p, "nodeset") for p in reversed(parents))
        nodes = next((s for s in sets if s), CpuSet())
        near = pci.home(nodes, numa) if nodes <= described else None
        several = nodes & {n.os_index for n in numa} if near is not None else CpuSet()
        gpus += [g._replace(numa_nodes=several if len(several) > 1 else CpuSet()) for g in _gpu(device, address, near)]
        nics += _nics(device, address, near, version3)
    nics.sort(key=lambda n: (n.pci, n.name, n.port))
    return sorted(gpus, key=lambda g: g.pci), nics, chains, tuple(map(_TWICE.format, twice))


def _described(objects: Sequence[Placed]) -> CpuSet:
    return CpuSet(pci.count(o, "os_index") for o, _ in objects if o.get("type") == "NUMANode") or CpuSet([0])


def _walk(node: Element, parents: tuple[Element, ...]) -> Iterator[Placed]:
    for child in node.all("object"):
        yield child, parents
        yield from _walk(child, (*parents, child))


def _ids(device: Element) -> tuple[str, str, str]:
    """Return class, vendor and device from ``0302 [10de:2335] [10de:18bf] a1``."""
    klass, opened, rest = device.get("pci_type").strip().lower().partition(" [")
    ids, closed, more = rest.partition("]")
    numbers = (klass, *ids.split(":"))
    has_form = opened and closed and more[:1] in ("", " ") and len(numbers) == 3
    if not has_form or not all(pci.is_hexadecimal(number, 4, 4) for number in numbers):
        raise pci.Misread(device, "pci_type", "class, vendor and device such as 0302 [10de:2335] [10de:18bf] a1")
    return numbers[0], numbers[1], numbers[2]


def _infos(node: Element) -> dict[str, str]:
    return {i.get("name", ""): pci.word(i, "value") for i in node.all("info")}


def _number(node: Element, name: str, convert: Callable[[str], int] = int, absent: str = "0") -> int:
    """Return an info that is a number, or ``absent``."""
    info = next((i for i in node.all("info") if i.get("name") == name and i.get("value")), None)
    return convert(absent) if info is None else pci.read(info, "value", convert, "a whole number")


def _decimal(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _gpu(device: Element, address: str, near: int | None) -> list[Gpu]:
    klass, vendor, _ = _ids(device)
    name = pci.gpu_vendor(klass, vendor)
    if not name:
        return []
    facts, size = _infos(device), 0
    for osdev in device.all("object"):
        facts |= _infos(osdev)
        # hwloc 3 writes the unit too ("16671616KiB").
        size = _number(osdev, "CUDAGlobalMemorySize", lambda text: int(text.removesuffix("KiB"))) * 1024 or size
    model = facts.get("GPUModel") or facts.get("PCIDevice", "")
    return [Gpu(address, facts.get("NVIDIAUUID", ""), model, name, near, size)]


def _nics(device: Element, address: str, near: int | None, version3: bool) -> list[Nic]:
    klass, vendor, number = _ids(device)
    rdma: list[Element] = []
    nets: list[Element] = []
    for osdev in device.all("object"):
        kind = pci.whole(osdev, "osdev_type", "-1") if osdev.get("type") == "OSDev" else -1
        if kind > 0 and kind & _OPENFABRICS_BIT if version3 else kind == _OPENFABRICS:
            rdma.append(osdev)
        elif kind > 0 and kind & _NET_BIT if version3 else kind == _NET:
            nets.append(osdev)
    virtual = pci.is_virtual(vendor, number)
    link, card = pci.read(device, "pci_link_speed", _decimal, "GB/s such as 31.5", "0"), f"{vendor}:{number}"
    if pci.is_slingshot(vendor, number):
        # hwloc tells no state of an interface; the live machine's is added from /sys (topology.sysfs.refine_nics).
        name = next((pci.word(o, "name") for o in (*rdma, *nets)), "")
        interface = next((word for o in nets if not (word := pci.word(o, "name")).startswith("cxi")), "")
        return [Nic(name, address, 1, "slingshot", "unknown", 0.0, near, interface, False, link)] if name else []
    if not rdma:
        names = sorted((_number(o, "Port", absent="1"), pci.word(o, "name")) for o in nets)
        return [Nic(name, address, port, "ethernet", "unknown", 0.0, near, name, virtual, link) for port, name in names]
    out = []
    for osdev in rdma:
        facts = _infos(osdev)
        numbers = (k[4:-5] for k in facts if k.startswith("Port") and k.endswith("State"))
        ports = [int(n) for n in numbers if n.isascii() and n.isdecimal() and len(n) <= 3]
        for port in sorted(ports) or [1]:
            lid = _number(osdev, f"Port{port}LID", lambda text: int(text, 16))
            # The IP interface of a port is the one with the same number, or the function's only one.
            same = [n for n in nets if _number(n, "Port", absent="1") == port] or (nets if len(ports) <= 1 else [])
            interface = pci.word(same[0], "name") if same else ""
            kind_name = pci.nic_kind(klass, vendor, number, lid=lid)
            state = pci.port_state(facts.get(f"Port{port}State", ""))
            name = pci.word(osdev, "name")
            out.append(Nic(name, address, port, kind_name, state, 0.0, near, interface, virtual, link, card))
    return out


def read_file(text: str) -> Topology:
    """Parse hwloc's or NCCL's XML into a topology; ParseError for another format, or a text over :data:`MAX_BYTES`."""
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        problem = f"this file has more than {MAX_BYTES >> 20} MiB, so it is no topology file"
    elif not text.lstrip("\ufeff \t\r\n").startswith("<"):
        problem = f"not a topology file: {f'it begins with {text[:40]!r}' if text.strip() else 'empty'}"
    else:
        return pci.read_tree(text, "a topology file", lambda root: _of_either(root, text))
    raise ParseError(f"{problem}; allowed: {_ALLOWED}", evidence=text[:400])


def _of_either(root: Element, text: str) -> Topology:
    if root.tag == "topology":
        return _topology(root, text)
    if root.tag == "system":
        from hpcgpu.topology import nccl_xml  # 2 CPU ms, which a rank of hpcgpu bind need not spend

        return nccl_xml.topology_of(root, text)
    problem = f"not a topology file: it begins with <{root.tag[:40]}>"
    raise ParseError(f"{problem}; allowed: {_ALLOWED}", evidence=text[:400])


class _Memory(NamedTuple):
    """A NUMA node with its place and speed."""

    node: NumaNode
    home: Element | None  # the object whose PUs are local to it (since version 2)
    latency: int  # 0: unknown
    bandwidth: int  # 0: unknown


def read_numa_nodes(
    root: Element, objects: Sequence[Placed], *, is_power: bool
) -> tuple[list[NumaNode], list[NumaNode]]:
    """Return the NUMA nodes with DRAM, and those with other memory; raise Misread for an invalid value.

    A version 1 file of a machine with a single node may name no node. Where all memory is of the fast kind (Xeon Max
    without DIMMs), that memory counts as DRAM. A PU is next to one node with DRAM, whatever the file says.
    """
    packages = [(pci.count(o, "os_index"), _all_cpus(o)) for o, _ in objects if o.get("type") in _PACKAGES]
    named = [placed for placed in objects if placed[0].get("type") == "NUMANode"]
    latency, bandwidth = _memory_attribute(root, "Latency", min), _memory_attribute(root, "Bandwidth", max)
    memories_by_index: dict[int, _Memory] = {}
    for o, parents in named or [placed for placed in objects if placed[0].get("type") == "Machine"]:
        index = pci.count(o, "os_index") if named else 0
        if index in memories_by_index:
            raise pci.Misread(o, "os_index", "a number that no other NUMA node has")
        cpus = _all_cpus(o)
        kind = _kind(o, parents, cpus, is_power)
        above = [pci.count(p, "os_index") for p in reversed(parents) if p.get("type") in _PACKAGES]
        package = next(iter(above), next((i for i, pus in packages if pus & cpus), 0))
        node = NumaNode(index, cpus, pci.count(o, "local_memory"), package, kind)
        number = o.get("gp_index", "")
        home = parents[-1] if parents and not o.all("object") else None
        memories_by_index[index] = _Memory(node, home, latency.get(number, 0), bandwidth.get(number, 0))
    memories = [memories_by_index[i] for i in sorted(memories_by_index)]
    heap = "dram" if any(m.node.kind == "dram" for m in memories) else "hbm"
    dram, beside = _separate_dram([m for m in memories if m.node.kind == heap])
    others = [*(m.node for m in memories if m.node.kind != heap), *beside]
    return dram, sorted(others, key=lambda n: n.os_index)


def _separate_dram(memories: Sequence[_Memory]) -> tuple[list[NumaNode], list[NumaNode]]:
    """Separate DRAM from memory that only looks like DRAM: hwloc 2.2 to 2.4 give it the PUs of its neighbour.

    These versions give MCDRAM, HBM, CXL and GPU memory no subtype. DRAM has the least latency to its PUs, if the file
    has latencies; else the lowest number, because Linux numbers nodes with PUs first. The size is no criterion: a
    machine may have less DRAM than other memory.
    """
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
            dram.append(node._replace(kind="dram", cpuset=cpus))
            owner_of |= dict.fromkeys(cpus, memory)
            if memory.home is not None:
                dram_of.setdefault(id(memory.home), memory)
        else:
            others.append(node._replace(kind="hbm" if memory.bandwidth > first.bandwidth > 0 else "other"))
    return sorted(dram, key=lambda n: n.os_index), others


def _all_cpus(node: Element) -> CpuSet:
    """Return the PUs; PUs that were not granted are in ``complete_cpuset`` only."""
    return pci.cpuset(node, "cpuset") or pci.cpuset(node, "complete_cpuset")


def _kind(node: Element, parents: Sequence[Element], cpus: CpuSet, is_power: bool) -> str:
    subtype = (node.get("subtype") or "").lower()
    kind = next((kind for prefix, kind in _OTHER_MEMORY.items() if subtype.startswith(prefix)), "dram")
    if kind != "dram" or cpus or _lost_its_pus(node, parents):
        return kind
    return "gpu" if is_power else "other"  # hwloc 1 and sysfs show the memory of POWER9's GPUs as nodes without PUs


def _lost_its_pus(node: Element, parents: Sequence[Element]) -> bool:
    """Return whether memory without PUs is DRAM whose PUs were cut away (lstopo --restrict).

    Other memory never had PUs, and is attached to an object with PUs. In version 1, cores and devices that are local to
    a DRAM node are below it. A Group without PUs below the node is no sign: hwloc 1 puts one there for the memory of
    POWER9's GPUs.
    """
    above = parents[-1] if parents else None
    beside_none = above is not None and "cpuset" in above.attributes and not _all_cpus(above)
    return beside_none or any(o.get("type") in _LOCAL or pci.cpuset(o, "complete_cpuset") for o in node.below("object"))


def _memory_attribute(root: Element, name: str, nearest: Callable[[int, int], int]) -> dict[str, int]:
    """Return a memory attribute (since hwloc 2.3) of each NUMA node by its ``gp_index``, from its nearest PUs."""
    out: dict[str, int] = {}
    for value in (
        v for memory in root.all("memattr") if memory.get("name") == name for v in memory.all("memattr_value")
    ):
        if value.get("target_obj_type") == "NUMANode":
            target, number = value.get("target_obj_gp_index"), pci.whole(value, "value")
            out[target] = nearest(out[target], number) if target in out else number
    return out

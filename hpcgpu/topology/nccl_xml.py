"""Read NCCL's (and RCCL's) topology XML, of NCCL_TOPO_FILE and NCCL_TOPO_DUMP_FILE.

Virtual machines show a flat /sys; Azure, AWS and OCI ship such a file beside it. It has the places of GPUs and network
cards, by PCI address and nesting. It lacks the PUs of each core, packages, memory sizes, IP interfaces of RDMA ports,
and NUMA nodes without a device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.topology import pci
from hpcgpu.topology.pci import Element

_COARSE = (
    "NCCL's topology XML does not describe which PUs share a core ({cores}), packages (each NUMA node counts as one), "
    "memory sizes, IP interfaces of RDMA ports, and NUMA nodes without a GPU or a network card"
)
_SINGLE = "each counts as a core"
_PAIRED = "of a NUMA node's two runs, such as 0-11,48-59, the first of each count as one, and so on"
_RENUMBERED = "numaid=-1 with PUs {}: they count as NUMA node {}"
_TWICE = "{} is described in two places: the first place counts"
_SHARED = "NUMA nodes of this NCCL topology XML share PUs: they cannot be distinguished and count as one"


@dataclass(frozen=True, slots=True)
class _Function:
    """A PCI function."""

    element: Element
    address: str
    klass: str  # 0302; class, vendor and device are "" where the file does not name them
    vendor: str
    device: str
    switches: tuple[str, ...]  # above it
    numaid: int  # -1: unknown


def topology_of(root: Element, text: str) -> Topology:
    """Convert the root of NCCL's XML into a topology; raise ParseError for several hosts, or a file without PUs.

    ``text`` is for errors. Each NUMA node counts as a package, as in NCCL, because the file has none. A network
    function without a device name is left out, since UCX could not use it, and named in the warnings.
    """
    functions, claims, warnings = _described(root, text)
    claims, functions, warnings = _numbered(claims, functions, warnings)
    pus = CpuSet().union(*claims.values())
    if not pus:
        raise ParseError(
            "this NCCL topology XML names no PU (affinity of <cpu>), so it does not describe a whole node; "
            "it can only add the places of GPUs and network cards to the machine's own description",
            evidence=text[:400],
        )
    homes = {i: i for i, s in claims.items() if s}
    if sum(len(s) for s in claims.values()) > len(pus):
        homes = dict.fromkeys(claims, min(claims))
        claims = {min(claims): CpuSet(pus)}
        warnings.append(_SHARED)
    cores, how = cores_of_masks(claims.values())
    warnings.insert(0, _COARSE.format(cores=how))
    gpus = [Gpu(f.address, vendor=v, numa_node=homes.get(f.numaid)) for f in functions if (v := _gpu_vendor(f))]
    ports: dict[tuple[str, int], Nic] = {}  # a merged card may be beside those that it is made of
    for nic in (nic for f in functions for nic in _nics(f, homes.get(f.numaid))):
        ports.setdefault((nic.name, nic.port), nic)
    fabric = max((n.kind for n in ports.values() if n.pci and n.kind == "infiniband"), default="roce")
    nics = [n if n.pci else n._replace(kind=fabric) for n in ports.values()]
    nameless = sorted({f.address for f in functions if f.klass.startswith("02")} - {n.pci for n in nics})
    if nameless:
        warnings.append(f"network cards without a name here, so they are left out: {', '.join(nameless)}")
    if placeless := [n.name for n in nics if not n.pci]:
        warnings.append(f"of {', '.join(placeless)} no PCI address is here, so only their NUMA node is known")
    return Topology(
        tuple(NumaNode(i, s, 0, i) for i, s in sorted(claims.items()) if s),
        cores,
        tuple(sorted(gpus, key=lambda g: g.pci)),
        tuple(sorted(nics, key=lambda n: (n.pci, n.name, n.port))),
        pci.hops({f.address: f.switches for f in functions}, gpus, nics, host_bridges=False),
        source=f"NCCL topology XML v{root.get('version', '1')}",
        warnings=tuple(warnings) if gpus or nics or nameless else (*warnings, pci.NO_PCI),
    )


def locate(topology: Topology, text: str) -> Topology:
    """Add NUMA nodes and bridges from NCCL's XML to the devices of ``topology`` whose locality is unknown.

    A device is identified by its PCI address. Its node is the only NUMA node that has PUs of its ``<cpu>``'s affinity,
    else the one numbered ``numaid``. A flat /sys shows all devices next to each other, so bridges between two devices
    come from the file if one of them had no node. Raises ParseError for other text, or several hosts.
    """
    functions, claims, _ = pci.read_tree(text, "NCCL topology XML", lambda root: _described(root, text))
    devices: tuple[Gpu | Nic, ...] = (*topology.gpus, *topology.nics)
    lost = {d.pci for d in devices if d.numa_node is None and (isinstance(d, Nic) or d.can_run)}
    if not lost:
        return topology
    by_address = {f.address: f for f in functions}
    # NCCL writes the functions of a network card as ports of its function 0.
    matched = {
        d.pci: f for d in devices if (f := by_address.get(d.pci) or by_address.get(f"{d.pci.rpartition('.')[0]}.0"))
    }
    if not lost & matched.keys():
        note = f"NCCL_TOPO_FILE names none of the devices whose NUMA node is unknown: {', '.join(sorted(lost))}"
        return topology._replace(warnings=(*topology.warnings, note))
    homes = {i: _home(topology, i, claims[i]) for i in claims}

    def numa_node(address: str, node: int | None) -> int | None:
        return homes[matched[address].numaid] if node is None and address in matched else node

    hops = pci.hops({a: f.switches for a, f in matched.items()}, topology.gpus, topology.nics, host_bridges=False)
    kept = {h for h in topology.hops if not (lost & {*h[:2]} and {*h[:2]} <= matched.keys())}
    return topology._replace(
        gpus=tuple(g._replace(numa_node=numa_node(g.pci, g.numa_node)) for g in topology.gpus),
        nics=tuple(n._replace(numa_node=numa_node(n.pci, n.numa_node)) for n in topology.nics),
        hops=tuple(sorted({h for h in hops if lost & {*h[:2]}} | kept)),
        source=f"{topology.source} + NCCL_TOPO_FILE",
    )


def _numbered(
    claims: dict[int, CpuSet], functions: list[_Function], warnings: list[str]
) -> tuple[dict[int, CpuSet], list[_Function], list[str]]:
    """Give numaid=-1 an unused number if it has PUs that no other numaid has."""
    if -1 not in claims:
        return claims, functions, warnings
    rest = {i: pus for i, pus in claims.items() if i >= 0}
    pus = CpuSet(claims[-1].difference(*rest.values()))
    if not pus and rest:
        return rest, functions, warnings
    number = max(rest, default=-1) + 1
    note = [_RENUMBERED.format(pus, number)] if rest else []
    functions = [replace(f, numaid=number) if f.numaid < 0 else f for f in functions]
    return {**rest, number: pus}, functions, [*warnings, *note]


def _described(root: Element, text: str) -> tuple[list[_Function], dict[int, CpuSet], list[str]]:
    """Return the PCI functions, the PUs of each numaid, and warnings."""
    if root.tag != "system":
        raise ParseError(f"not NCCL topology XML: it begins with <{root.tag}>, not <system>", evidence=text[:400])
    # NCCL puts all nodes that NVLink joins (GB200) into one dump.
    hosts = {h for cpu in root.all("cpu") if (h := cpu.get("host_hash"))}
    if len(hosts) > 1:
        raise ParseError(
            f"this NCCL topology XML describes {len(hosts)} hosts, not one; write that of one node by lstopo --of xml "
            "there, or by NCCL_TOPO_DUMP_FILE with NCCL_MNNVL_ENABLE=0",
            evidence=text[:400],
        )
    claims: dict[int, CpuSet] = {}
    functions: list[_Function] = []
    for cpu in root.all("cpu"):
        numaid = max(pci.whole(cpu, "numaid", "-1"), -1)
        claims[numaid] = CpuSet(claims.get(numaid, CpuSet()) | pci.cpuset(cpu, "affinity"))
        functions += _below(cpu, (), numaid)
        # NCCL 2.25 puts a card that it has merged from several below the common part of their ways, which may be a CPU.
        functions += [_Function(cpu, "", "", "", "", (), numaid)] if cpu.all("nic") else []
    first: dict[tuple[str, int], _Function] = {}
    for function in functions:
        first.setdefault((function.address, 0 if function.address else function.numaid), function)
    # NCCL itself takes such files.
    twice = sorted(a for a, count in Counter(f.address for f in functions if f.address).items() if count > 1)
    return list(first.values()), claims, [_TWICE.format(address) for address in twice]


def cores_of_masks(masks: Iterable[CpuSet]) -> tuple[tuple[CpuSet, ...], str]:
    """Guess the cores of NUMA nodes, and describe the rule: Linux numbers second hyperthreads last (0-11,48-59)."""

    def is_run(pus: Sequence[int]) -> bool:
        return bool(pus) and pus[-1] - pus[0] + 1 == len(pus)

    out: list[CpuSet] = []
    single, paired = CpuSet(), False
    for pus in map(sorted, masks):
        first, second = pus[: len(pus) // 2], pus[len(pus) // 2 :]
        if is_run(first) and is_run(second) and len(first) == len(second) and first[-1] + 1 < second[0]:
            out += [CpuSet(pair) for pair in zip(first, second, strict=True)]
            paired = True
        else:
            out += [CpuSet([pu]) for pu in pus]
            single = CpuSet(single | {*pus})
    rule = _SINGLE if not paired else f"{_PAIRED}, but PUs {single} are no two runs: {_SINGLE}" if single else _PAIRED
    return tuple(sorted(out, key=min)), rule


def _below(node: Element, switches: tuple[str, ...], numaid: int) -> Iterator[_Function]:
    for child in node.all("pci"):
        address = pci.read(child, "busid", pci.address, "a PCI address such as 0000:06:00.0")
        klass, vendor, device = (
            child.get(name, "").strip().lower().removeprefix("0x") for name in ("class", "vendor", "device")
        )
        yield _Function(child, address, klass[:4], vendor, device, switches, numaid)
        yield from _below(child, (*switches, address), numaid)


def _gpu_vendor(function: _Function) -> str:
    """Return the GPU's vendor, "" for other devices. Azure's files name no vendor; RCCL adds ``gcn`` to ``<gpu>``."""
    klass, vendor, gpu = function.klass, function.vendor, function.element.all("gpu")
    if kind := pci.gpu_vendor(klass, vendor):
        return kind
    if gpu:
        return "amd" if gpu[0].get("gcn") else "nvidia"
    return "nvidia" if klass in ("0300", "0302") and vendor in ("", *pci.MADE_UP) else ""


def _nics(function: _Function, near: int | None) -> list[Nic]:
    virtual = pci.is_virtual(function.vendor, function.device)
    link = pci.link_gbytes_s(*(function.element.get(name, "") for name in ("link_speed", "link_width")))
    kind = pci.nic_kind(function.klass, function.vendor, function.device)
    card = f"{function.vendor}:{function.device}" if function.vendor and function.device else ""
    out = []
    for i, net in enumerate(n for card in function.element.all("nic") for n in card.all("net") if n.get("name")):
        name, rate = pci.word(net, "name"), max(pci.whole(net, "speed"), 0) / 1000
        number_of_port = pci.whole(net, "port", "1")
        if number_of_port < 1:  # NCCL's socket transport: an interface, and its ports count from 0; lo is on no card
            nic = Nic(name, function.address, 1, "ethernet", "unknown", rate, near, name, virtual, link)
            out += [nic] if nic.pci else []
            continue
        # NCCL's net_ib adds to the port the number of devices before it on this card (ncclIbDev.realPort), and joins
        # the names of ports that it has merged into one device: mlx5_0+mlx5_1. Its rate is the sum of theirs.
        first = max(number_of_port - i, 1)
        names = list(filter(None, name.split("+")))
        for k, part in enumerate(names):
            port, each = first + names[:k].count(part), rate / len(names)
            out.append(Nic(part, function.address, port, kind, "unknown", each, near, None, virtual, link, card))
    return out


def _home(topology: Topology, numaid: int, affinity: CpuSet) -> int | None:
    """Return the NUMA node of ``topology`` that corresponds to a ``<cpu>``; None without one.

    Affinity comes before numaid: NCCL binds to it, and a file may number nodes otherwise than the kernel (Azure's for
    ND H100 v5 gives PUs 48-95 to node 0).
    """
    near = [n.os_index for n in topology.numa_nodes if n.cpuset & affinity]
    if len(near) == 1:
        return near[0]
    return numaid if numaid in (near or [n.os_index for n in topology.numa_nodes]) else None

"""Draw the picture of a node as SVG: packages, NUMA nodes, cores, GPUs and ports, coloured by worker; and a legend."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hpcgpu.model import Binding, CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.pictures.shapes import (
    GAP,
    TAG,
    Box,
    Text,
    Tile,
    bottom,
    columns_for,
    fit,
    in_rows,
    tags,
    to_svg,
    walk,
    wrap,
)
from hpcgpu.plan.binding.network import DISTANCE_WORDS, SPARE, UNKNOWN, Ports
from hpcgpu.report.machine import MAKERS, format_ports, port_name
from hpcgpu.units import counted, format_bytes

WIDTH = 1000
MARGIN = 24
_PAD = 10
_CORE_WIDTH, _CORE_WIDEST, _CORE_HEIGHT, _CORE_GAP = 26, 50, 23, 3
_GPU_WIDTH, _PORT_WIDTH, _MEMORY_WIDTH = 260, 190, 180  # at least
_WAY = 24  # length of the line that shows a port's distance
# Sizes of text. It is read in pages whose column is narrower than the picture.
_SMALL, _PLAIN, _LARGE, _TITLE = 12, 13, 14, 22
_LINE_PX = 16  # from one line of plain text to the next
_TAGS_ACROSS = 8  # in a core that workers share
_KINDS = {"infiniband": "InfiniBand", "roce": "RoCE", "slingshot": "Slingshot", "opa": "Omni-Path", "efa": "EFA"}
_KINDS |= {"usnic": "usNIC", "rdma": "RDMA", "ethernet": "Ethernet"}
_MEMORIES = {"hbm": "HBM", "gpu": "GPU memory", "cxl": "CXL memory", "other": "memory without cores"}


@dataclass(frozen=True, slots=True)
class Node:
    """A topology and the bindings that are planned on it."""

    topology: Topology
    bindings: tuple[Binding, ...]
    names: tuple[str, ...]
    cores: tuple[CpuSet, ...]  # the topology's, and one for each planned PU without a core, as in the plan
    gpus: tuple[Gpu, ...]  # the topology's, and other (simulated) ones of the bindings, by PCI address
    ports: Ports
    users: Mapping[tuple[str, int], list[int]]  # the workers that use a port, by its name and number

    def of_port(self, nic: Nic) -> tuple[int, ...]:
        """Return the workers that use this port."""
        return tuple(self.users.get((nic.name, nic.port), ()))

    def by_distance(self, nic: Nic) -> dict[int, list[int]]:
        """Return the workers that use this port by its distance from their GPU, the nearest first."""
        out = defaultdict[int, list[int]](list)
        for worker in self.of_port(nic):
            gpus = self.bindings[worker].gpus
            out[self.ports.distance(gpus[0], nic).kind if gpus else UNKNOWN].append(worker)
        return dict(sorted(out.items()))

    @property
    def title(self) -> str:
        """The machine's name, or its GPUs."""
        names = ", ".join(dict.fromkeys(map(gpu_name, self.gpus)))
        parts = f"{counted(len(self.gpus), 'GPU')}: {names}" if self.gpus else counted(len(self.cores), "core")
        return self.topology.name or f"Machine with {parts}"

    def near(self, device: Gpu | Nic) -> int | None:
        """Return the NUMA node with cores that is next to a device; None if it is unknown."""
        return next((n.os_index for n in self.topology.numa_nodes if n.os_index == device.numa_node), None)

    def home(self, pus: CpuSet) -> int | None:
        """Return the NUMA node with cores that has one of these PUs; None without one."""
        return next((n.os_index for n in self.topology.numa_nodes if n.cpuset & pus), None)

    def format_workers(self, workers: Sequence[int]) -> str:
        """Format workers by number and name."""
        named = [f"{i}" if self.names[i] == str(i) else f"{i} ({self.names[i]})" for i in workers]
        return f"worker{'s' if len(named) > 1 else ''} {', '.join(named)}" if named else "no worker"


def node_of(
    topology: Topology, bindings: Sequence[Binding], names: Sequence[str], nics: str | tuple[str, ...] = "balanced"
) -> Node:
    """Return the node with its bindings; raise ValueError unless there is a name for each binding, or no name."""
    names = tuple(names) or tuple(str(i) for i in range(len(bindings)))
    if len(names) != len(bindings):
        raise ValueError(f"{len(names)} names for {len(bindings)} bindings; give one for each, or none")
    rest = CpuSet().union(*(b.cpuset for b in bindings)).difference(*topology.cores)
    gpus = list(topology.gpus)
    for gpu in (b.gpus[0] for b in bindings if b.gpus):
        if not any(is_same_gpu(gpu, g) for g in gpus):
            gpus.append(gpu)
    users = defaultdict[tuple[str, int], list[int]](list)
    for i, nic in ((i, nic) for i, binding in enumerate(bindings) for nic in binding.nics):
        users[nic.name, nic.port].append(i)
    return Node(
        topology,
        tuple(bindings),
        names,
        tuple(sorted([*topology.cores, *(CpuSet([i]) for i in rest)], key=min)),
        tuple(sorted(gpus, key=lambda g: (g.pci, g.uuid))),
        Ports(topology, nics),
        users,
    )


def is_same_gpu(a: Gpu, b: Gpu) -> bool:
    """Return whether a binding's GPU is this one, as far as their UUIDs are known."""
    return a.pci == b.pci and (a.uuid == b.uuid or (not (a.uuid and b.uuid) and a.mig == b.mig))


def gpu_name(gpu: Gpu) -> str:
    """Return the model, or the maker, and the profile of a MIG slice."""
    name = gpu.model or MAKERS.get(gpu.vendor, gpu.vendor)
    return f"{name} MIG {gpu.mig}" if gpu.mig else name


def gib(size_bytes: int) -> str:
    """Return a size in GiB; a simulated GPU may have less than one. 0 is an unknown size."""
    if size_bytes == 0:
        return "? GiB"
    return f"{size_bytes / 2**30:.0f} GiB" if size_bytes >= 2**30 else format_bytes(size_bytes)


def worker_cells(node: Node, worker: int) -> tuple[str, str, str, str, str]:
    """Return the worker's name, GPU, cores, memory policy and port."""
    binding = node.bindings[worker]
    gpu = binding.gpus[0] if binding.gpus else None
    count = counted(sum(bool(core & binding.cpuset) for core in node.cores), "core")
    nodes = binding.memory_nodes
    where = f", node{'s' if len(nodes) > 1 else ''} {nodes}" if nodes else ""
    memory = "not bound" if binding.memory_policy == "none" else binding.memory_policy + where
    shared = ", shared" if binding.shared_cores else ""
    return (
        node.names[worker],
        f"GPU {next(i for i, g in enumerate(node.gpus) if is_same_gpu(gpu, g))}, {gpu.pci}" if gpu else "-",
        f"{count}{shared}: PUs {binding.cpuset}",
        memory,
        format_ports(binding),
    )


def machine(node: Node, y: float) -> tuple[Tile, ...]:
    """Lay out the packages in one column, or in two if each has one NUMA node; then the parts of unknown locality."""
    packages: dict[int, list[NumaNode]] = {}
    for n in sorted(node.topology.numa_nodes, key=lambda n: (n.package, n.os_index)):
        packages.setdefault(n.package, []).append(n)
    most = max((len(nodes) for nodes in packages.values()), default=1)
    beside = 2 if most == 1 and len(packages) > 1 else 1
    makers = [partial(_package, node, number, nodes, min(most, 4)) for number, nodes in packages.items()]
    out = in_rows(makers, MARGIN, y, WIDTH - 2 * MARGIN, beside)
    header, below = ("locality unknown", "", "the NUMA node of these is not known"), bottom(out, y - GAP) + GAP
    lost = _parts(node, "unknown", header, None, MARGIN, below, WIDTH - 2 * MARGIN)
    return (*out, lost) if lost.inside else out


def _package(node: Node, number: int, numa: Sequence[NumaNode], columns: int, x: float, y: float, width: float) -> Tile:
    inner = width - 2 * _PAD
    makers = [partial(_numa_node, node, n) for n in numa]
    inside = in_rows(makers, x + _PAD, y + 30, inner, columns)
    memories = (m for m in node.topology.other_memory if m.package == number)
    others = [partial(_memory, m) for m in _folded([m for m in memories if node.home(m.cpuset) is None])]
    below = in_rows(others, x + _PAD, bottom(inside, y) + GAP, inner, columns_for(inner, _MEMORY_WIDTH))
    inside = (*inside, *below)
    texts = (Text(x + _PAD, y + 21, f"package {number}", _LARGE, bold=True),)
    return Tile("package", Box(x, y, width, bottom(inside, y + 30) + _PAD - y), texts, inside)


def _numa_node(node: Node, numa: NumaNode, x: float, y: float, width: float) -> Tile:
    count = sum(node.home(core) == numa.os_index for core in node.cores)
    header = f"NUMA node {numa.os_index}", gib(numa.memory_bytes), f"{counted(count, 'core')}, PUs {numa.cpuset}"
    return _parts(node, "node", header, numa.os_index, x, y, width)


def _parts(
    node: Node, kind: str, header: tuple[str, str, str], numa: int | None, x: float, y: float, width: float
) -> Tile:
    """Lay out a box with a header, and cores, GPUs, ports and memory of a NUMA node, or of an unknown one."""
    topology, (title, right, subtitle) = node.topology, header
    left, inner = x + _PAD, width - 2 * _PAD
    texts = [Text(left, y + 20, title, _LARGE, bold=True), Text(left, y + 37, fit(subtitle, inner, _SMALL), _SMALL)]
    if right:
        texts.append(Text(left + inner, y + 20, right, _PLAIN, anchor="end"))
    others = {n.package for n in topology.numa_nodes} if numa is None else ()
    memories = _folded([m for m in topology.other_memory if m.package not in others and node.home(m.cpuset) == numa])
    inside = _cores(node, [core for core in node.cores if node.home(core) == numa], left, y + 46, inner)
    groups: list[tuple[Sequence[Callable[[float, float, float], Tile]], float]] = [
        ([partial(_gpu, node, g) for g in node.gpus if node.near(g) == numa], _GPU_WIDTH),
        ([partial(_port, node, n) for n in topology.nics if node.near(n) == numa], _PORT_WIDTH),
        ([partial(_memory, m) for m in memories], _MEMORY_WIDTH),
    ]
    for makers, smallest in groups:
        top = bottom(inside, y + 46 - GAP) + GAP
        inside += in_rows(makers, left, top, inner, columns_for(inner, smallest))
    return Tile(kind, Box(x, y, width, bottom(inside, y + 38) + _PAD - y), tuple(texts), tuple(inside))


def _cores(node: Node, cores: Sequence[CpuSet], x: float, y: float, width: float) -> list[Tile]:
    """Lay out a box for each core, in rows of about equal length; wider if workers share it, for their tags."""
    owners = [tuple(i for i, b in enumerate(node.bindings) if b.cpuset & core) for core in cores]
    most = max((len(o) for o in owners), default=0)
    high = math.ceil(most / _TAGS_ACROSS) * TAG + 3 if most > 1 else _CORE_HEIGHT
    fitting = int((width + _CORE_GAP) // (_CORE_WIDTH + _CORE_GAP))
    columns = math.ceil(len(cores) / math.ceil(len(cores) / fitting)) if cores else 1
    wide = min(_CORE_WIDEST, (width + _CORE_GAP) / columns - _CORE_GAP)
    out: list[Tile] = []
    left, top = x, y
    for core, workers in zip(cores, owners, strict=True):
        core_width = wide if len(workers) < 2 else min(len(workers), _TAGS_ACROSS) * TAG + 3
        if left + core_width > x + width + 0.01:  # widths are fractions
            left, top = x, top + high + _CORE_GAP
        box = Box(left, top, core_width, high)
        left = box.right + _CORE_GAP
        label = str(workers[0]) if len(workers) == 1 else ""
        texts = (Text(box.x + core_width / 2, box.y + high / 2 + 4, label, _SMALL, anchor="middle"),) if label else ()
        inside = tags(workers, box.x + 2.5, box.y + 2.5, core_width - 3) if len(workers) > 1 else ()
        tooltip = f"PU{'s' if len(core) > 1 else ''} {core}: {node.format_workers(workers)}"
        out.append(Tile("core", box, texts, inside, workers, tooltip))
    return out


def _gpu(node: Node, gpu: Gpu, x: float, y: float, width: float) -> Tile:
    workers = tuple(i for i, b in enumerate(node.bindings) if b.gpus and is_same_gpu(b.gpus[0], gpu))
    number, model = f"GPU {node.gpus.index(gpu)}", gpu_name(gpu)
    name = f"{number} · {model}"
    room = width - 3 * 8 - min(len(workers), 2) * TAG
    fits = fit(name, room, _PLAIN, bold=True) == name
    lines = [name] if fits else [number, *wrap(model, room, _PLAIN, bold=True)]
    texts = [Text(x + 8, y + 18 + _LINE_PX * i, line, _PLAIN, bold=True) for i, line in enumerate(lines)]
    size = gib(gpu.memory_bytes) if gpu.memory_bytes else ""
    place = fit(" · ".join(filter(None, (gpu.pci, size))), room, _SMALL)
    texts.append(Text(x + 8, texts[-1].y + 17, place, _SMALL))
    marks = tags(workers, x + width - 8 - min(len(workers), 2) * TAG + 2, y + 5, 2 * TAG)
    height = max(texts[-1].y + 8, bottom(marks, y) + 5) - y
    tooltip = ", ".join(filter(None, (name, gpu.pci, gpu.uuid, size, node.format_workers(workers))))
    return Tile("gpu", Box(x, y, width, height), tuple(texts), marks, workers, tooltip)


def _port(node: Node, nic: Nic, x: float, y: float, width: float) -> Tile:
    workers = node.of_port(nic)
    rate = f"{nic.rate_gbps:g} Gb/s" if nic.rate_gbps else ""
    beside = nic.interface if nic.interface and nic.interface != nic.name else ""
    has_state = nic.state != "unknown"
    fabric = _KINDS.get(nic.kind, nic.kind) + (f", {nic.state}" if has_state else "")
    rest = (beside, rate, "VF" if nic.virtual else "", "" if has_state else "state unknown")
    lines = [fabric, ", ".join(filter(None, rest))]
    room = width - 14
    texts = [Text(x + 7, y + 17, fit(port_name(nic), room, _PLAIN, bold=True), _PLAIN, bold=True)]
    texts += [
        Text(x + 7, y + 33 + 15 * i, fit(line, room, _SMALL), _SMALL) for i, line in enumerate(filter(None, lines))
    ]
    used = workers or not (node.bindings or nic in node.ports.why_not)
    why = "" if used else node.ports.why_not.get(nic, SPARE).singular
    for row in wrap(why, room, _SMALL) if why and nic.active else ():  # the state of others is above
        texts.append(Text(x + 7, texts[-1].y + 15, row, _SMALL))
    end = texts[-1].y + 7
    inside: list[Tile] = []
    for distance, users in node.by_distance(nic).items():
        inside.append(Tile(f"distance {distance}", Box(x + 7, end + 2, _WAY, 12)))
        text = fit(DISTANCE_WORDS[distance], room - _WAY - 6, _SMALL)
        texts.append(Text(x + 7 + _WAY + 6, end + 12, text, _SMALL))
        inside += tags(users, x + 7, end + 17, room)
        end = inside[-1].box.bottom + 4
    tooltip = ", ".join(filter(None, (port_name(nic), *lines, nic.pci, node.format_workers(workers), why)))
    box = Box(x, y, width, end + bool(inside) - y)
    return Tile(
        "port" if used else "port idle", box, tuple(texts), tuple(inside), tooltip=tooltip, crossed=not nic.active
    )


def _folded(memories: Sequence[NumaNode]) -> list[NumaNode | CpuSet]:
    """Return the memories; several empty ones, as GB200 has for MIG slices, as their numbers."""
    empty = [m for m in memories if m.kind == "other" and not m.memory_bytes]
    rest = [m for m in memories if m not in empty]
    return [*memories] if len(empty) < 2 else [*rest, CpuSet(m.os_index for m in empty)]


def _memory(memory: NumaNode | CpuSet, x: float, y: float, width: float) -> Tile:
    if isinstance(memory, CpuSet):
        lines = (f"{len(memory)} empty NUMA nodes", str(memory))
    else:
        lines = (f"NUMA node {memory.os_index} · {gib(memory.memory_bytes)}", _MEMORIES.get(memory.kind, memory.kind))
    texts = tuple(Text(x + 7, y + 17 + 16 * i, fit(line, width - 14, _SMALL), _SMALL) for i, line in enumerate(lines))
    return Tile("memory", Box(x, y, width, 41), texts, tooltip=", ".join(lines))


def lay_out(node: Node) -> Tile:
    """Lay out the picture of the node, ``WIDTH`` wide: title, machine, legend, notes."""
    topology = node.topology
    inner = WIDTH - 2 * MARGIN
    parts: list[Collection[object]] = [{n.package for n in topology.numa_nodes}, topology.numa_nodes, node.cores]
    parts += [{pu for c in node.cores for pu in c}, node.gpus, topology.nics]
    nouns = ("package", "NUMA node", "core", "PU", "GPU", "network port")
    summary = ", ".join(counted(len(part), noun) for part, noun in zip(parts, nouns, strict=True) if part)
    source = f"; source: {topology.source}" if topology.source else ""
    texts = (
        Text(MARGIN, 40, fit(node.title, inner, _TITLE, bold=True), _TITLE, bold=True),
        Text(MARGIN, 63, fit(summary + source, inner, _PLAIN), _PLAIN),
    )
    tiles = [*machine(node, 78)]
    tiles += _samples(tiles, bottom(tiles, 78) + 12)
    tiles += _legend(node, bottom(tiles, 78) + 12)
    tiles += _notes(node, bottom(tiles, 78) + 10)
    return Tile("paper", Box(0, 0, WIDTH, bottom(tiles, 78) + MARGIN), texts, tuple(tiles))


def _samples(tiles: Sequence[Tile], y: float) -> list[Tile]:
    """Explain grey, stripes and crosses, if the picture has them."""
    everything = list(walk(tiles))
    cores, idle = ([t for t in everything if t.kind == kind] for kind in ("core", "port idle"))
    shown = (
        (any(not t.workers for t in cores), "core", _CORE_WIDTH, (), False, "core of no worker"),
        (any(len(t.workers) > 1 for t in cores), "core", 2 * TAG + 3, (0, 1), False, "core that several workers share"),
        (any(not t.crossed for t in idle), "port idle", 36, (), False, "port of no worker"),
        (any(t.crossed for t in everything), "port idle", 36, (), True, "port that is not active"),
    )
    out: list[Tile] = []
    x = float(MARGIN)
    for is_shown, kind, width, workers, crossed, meaning in shown:
        if is_shown:
            box = Box(x, y, width, _CORE_HEIGHT)
            marks = tags(workers, x + 2.5, y + 2.5, width)
            out.append(Tile(f"sample {kind}", box, inside=marks, workers=workers, crossed=crossed))
            text = Text(box.right + 8, y + 16, meaning, _PLAIN)
            out.append(Tile("words", Box(text.x, y, text.box.width, _CORE_HEIGHT), (text,)))
            x = text.box.right + 28
    return out


def _legend(node: Node, y: float) -> list[Tile]:
    """Return a row for each worker."""
    columns = (("worker", 120.0), ("GPU", 196.0), ("cores", 264.0), ("memory", 204.0), ("network port", 168.0))
    rows = [([name for name, _ in columns], -1)] if node.bindings else []
    rows += [(list(worker_cells(node, i)), i) for i in range(len(node.bindings))]
    out: list[Tile] = []
    for cells, worker in rows:
        x, texts = float(MARGIN), []
        for (_, width), cell in zip(columns, cells, strict=False):
            left = x + (TAG + 6 if x == MARGIN else 0)
            lines = wrap(cell, x + width - 12 - left, _PLAIN)
            texts += [Text(left, y + 16 + _LINE_PX * i, line, _PLAIN, bold=worker < 0) for i, line in enumerate(lines)]
            x += width
        marks = tags((worker,), MARGIN, y + 2, TAG) if worker >= 0 else ()
        height = max(t.y for t in texts) + 7 - y
        out.append(Tile("row", Box(MARGIN, y, WIDTH - 2 * MARGIN, height), tuple(texts), marks))
        y += height
    return out


def _notes(node: Node, y: float) -> list[Tile]:
    """Return the reasons, each with all of its workers, and the topology's warnings."""
    sentences = [] if node.bindings else ["no worker is planned"]
    sentences += _reasons(node)
    sentences += [f"note: {warning}" for warning in node.topology.warnings]
    out: list[Tile] = []
    for sentence in sentences:
        lines = wrap(sentence, WIDTH - 2 * MARGIN, _PLAIN)
        texts = tuple(Text(MARGIN, y + 14 + _LINE_PX * i, line, _PLAIN) for i, line in enumerate(lines))
        out.append(Tile("words", Box(MARGIN, y, WIDTH - 2 * MARGIN, _LINE_PX * len(lines) + 4), texts))
        y = out[-1].box.bottom
    return out


def _reasons(node: Node) -> list[str]:
    """Return the reasons of the workers' bindings; reasons that differ in numbers only are merged."""
    alike: dict[str, dict[str, list[int]]] = {}
    for i, binding in enumerate(node.bindings):
        for reason in binding.reasons:
            pattern = re.sub(r"[\w,-]*\d[\w,-]*|\s", "", reason)
            alike.setdefault(pattern, {}).setdefault(reason, []).append(i)
    out = []
    for variants in alike.values():
        (first, who), *others = variants.items()
        rest = sorted({i for more in [w for _, w in others] for i in more} - set(who))
        out.append(f"{_workers(who)}: {first}" + (f"; likewise {_workers(rest)}" if rest else ""))
    return out


def _workers(numbers: Sequence[int]) -> str:
    return f"worker{'s' if len(numbers) > 1 else ''} {CpuSet(numbers)}"


def render_svg(
    topology: Topology, bindings: Sequence[Binding], names: Sequence[str] = (), nics: str | tuple[str, ...] = "balanced"
) -> str:
    """Render a node and its workers (``names``, or their numbers) as a self-contained SVG 1.1; or ValueError."""
    node = node_of(topology, bindings, names, nics)
    return to_svg(node.title, lay_out(node))

"""Boxes, lines of text and tiles of a picture, and the contents of a NUMA node. Lengths are in SVG user units (px)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hpcgpu.model import Binding, CpuSet, Gpu, Nic, NumaNode, Topology
from hpcgpu.plan.binding.network import UNKNOWN, Ports
from hpcgpu.report.machine import MAKERS, port_name
from hpcgpu.units import counted, format_bytes

GAP = 6
TAG = 20  # side of a worker's numbered square

# Advance widths in em of DejaVu Sans, the widest of the usual sans-serif fonts: what fits in it fits in all of them.
_EMS = dict.fromkeys(map(chr, range(32, 127)), 0.64)
_EMS |= dict.fromkeys(" ,.'iljIJ·", 0.33) | dict.fromkeys(":;|!/\\()[]ftr-", 0.43) | dict.fromkeys('"`*_', 0.52)
_EMS |= dict.fromkeys("ABCEFKPRSTVXYZ", 0.7) | dict.fromkeys("wOQGDNUH#&+<>=~^", 0.84) | dict.fromkeys("mMW@%", 1.0)
_OTHER = 1.05  # what is not ASCII may be as wide as it is high
BOLD = 1.16


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle; y grows downward."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x of the right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of the lower edge."""
        return self.y + self.height


@dataclass(frozen=True, slots=True)
class Text:
    """One line of text."""

    x: float  # of the anchor
    y: float  # of the base line
    text: str
    size: float = 11
    bold: bool = False
    anchor: str = "start"  # of the text; or middle, end

    @property
    def box(self) -> Box:
        """The area that the text covers, at most."""
        width = text_width(self.text, self.size, self.bold)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return Box(left, self.y - 0.8 * self.size, width, self.size)


@dataclass(frozen=True, slots=True)
class Tile:
    """A box with its contents."""

    kind: str  # style and SVG class: package, node, core, gpu, port, memory, tag, row
    box: Box
    texts: tuple[Text, ...] = ()
    inside: tuple[Tile, ...] = ()
    workers: tuple[int, ...] = ()  # their colours fill the box
    tooltip: str = ""
    crossed: bool = False  # out of use


def text_width(text: str, size: float, bold: bool = False) -> float:
    """Return the greatest width of the text in any of the usual sans-serif fonts."""
    return sum(_EMS.get(c, _OTHER) for c in text) * size * (BOLD if bold else 1.0)


def fit(text: str, width: float, size: float, bold: bool = False) -> str:
    """Return the text, cut with an ellipsis where it is wider than ``width``."""
    if text_width(text, size, bold) <= width:
        return text
    while text and text_width(text + "…", size, bold) > width:
        text = text[:-1]
    return text + "…"


def wrap(text: str, width: float, size: float) -> list[str]:
    """Break the text into lines no wider than ``width``, at blanks and commas; inside a word if nothing else fits."""
    lines = [""]
    for piece in re.findall(r"[^\s,]*[\s,]+|[^\s,]+", text):
        if text_width(lines[-1] + piece.rstrip(), size) > width and lines[-1]:
            lines.append("")
        lines[-1] += piece
        while text_width(lines[-1].rstrip(), size) > width and len(lines[-1]) > 1:
            last = lines[-1]
            cut = next(n for n in range(len(last) - 1, 0, -1) if n == 1 or text_width(last[:n], size) <= width)
            lines[-1:] = [last[:cut], last[cut:]]
    return [line.rstrip() for line in lines]


def columns_for(width: float, smallest: float) -> int:
    """Return the number of tiles of at least this width that fit beside each other."""
    return max(1, int((width + GAP) // (smallest + GAP)))


def in_rows(
    makers: Sequence[Callable[[float, float, float], Tile]], x: float, y: float, width: float, columns: int
) -> tuple[Tile, ...]:
    """Return the tiles (each made at x, y with a width) in rows of equal width and, within a row, height."""
    out: list[Tile] = []
    each = math.floor((width - GAP * (columns - 1)) / columns)
    for start in range(0, len(makers), columns):
        row = [make(x + i * (each + GAP), y, each) for i, make in enumerate(makers[start : start + columns])]
        height = max(t.box.height for t in row)
        out += [replace(t, box=replace(t.box, height=height)) for t in row]
        y += height + GAP
    return tuple(out)


def tags(workers: Sequence[int], x: float, y: float, width: float) -> tuple[Tile, ...]:
    """Return the numbered squares of the workers, wrapped within the width."""
    columns = max(1, int(width // TAG))
    return tuple(
        Tile(
            "tag",
            box := Box(x + i % columns * TAG, y + i // columns * TAG, TAG - 2, TAG - 2),
            (Text(box.x + box.width / 2, box.y + 13, str(w), 11 if w < 100 else 8, anchor="middle"),),
            workers=(w,),
        )
        for i, w in enumerate(workers)
    )


def bottom(tiles: Sequence[Tile], otherwise: float) -> float:
    """Return the lowest edge of the tiles; ``otherwise`` without tiles."""
    return max((t.box.bottom for t in tiles), default=otherwise)


@dataclass(frozen=True, slots=True)
class NumaContents:
    """The parts of one NUMA node, or the parts without a known one."""

    cores: tuple[CpuSet, ...]
    gpus: tuple[Gpu, ...]
    nics: tuple[Nic, ...]
    memories: tuple[NumaNode, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A topology and the bindings that are planned on it."""

    topology: Topology
    bindings: tuple[Binding, ...]
    names: tuple[str, ...]
    cores: tuple[CpuSet, ...]  # the topology's, and one for each planned PU without a core, as in the plan
    gpus: tuple[Gpu, ...]  # the topology's, and other (simulated) ones of the bindings, by PCI address

    def of_port(self, nic: Nic) -> tuple[int, ...]:
        """Return the workers that use this port."""
        used = (nic.name, nic.port)
        return tuple(i for i, b in enumerate(self.bindings) if used in [(n.name, n.port) for n in b.nics])

    def by_distance(self, nic: Nic) -> dict[int, list[int]]:
        """Return the workers that use this port by its distance from their GPU, the nearest first."""
        ports, out = Ports(self.topology), defaultdict[int, list[int]](list)
        for worker in self.of_port(nic):
            gpus = self.bindings[worker].gpus
            out[ports.distance(gpus[0], nic).kind if gpus else UNKNOWN].append(worker)
        return dict(sorted(out.items()))

    @property
    def title(self) -> str:
        """The machine's name, or its GPUs."""
        names = ", ".join(dict.fromkeys(map(gpu_name, self.gpus)))
        parts = f"{counted(len(self.gpus), 'GPU')}: {names}" if self.gpus else counted(len(self.cores), "core")
        return self.topology.name or f"Machine with {parts}"

    def contents_of(self, numa: int | None) -> NumaContents:
        """Return the parts of the NUMA node with this OS index; None: the parts without a known one."""
        homes = {n.os_index for n in self.topology.numa_nodes}
        others = {n.package for n in self.topology.numa_nodes} if numa is None else ()
        memories = (m for m in self.topology.other_memory if m.package not in others)
        return NumaContents(
            tuple(c for c in self.cores if self.home(c) == numa),
            tuple(g for g in self.gpus if (g.numa_node if g.numa_node in homes else None) == numa),
            tuple(n for n in self.topology.nics if (n.numa_node if n.numa_node in homes else None) == numa),
            tuple(m for m in memories if self.home(m.cpuset) == numa),
        )

    def home(self, pus: CpuSet) -> int | None:
        """Return the NUMA node with cores that has one of these PUs; None without one."""
        return next((n.os_index for n in self.topology.numa_nodes if n.cpuset & pus), None)

    def format_workers(self, workers: Sequence[int]) -> str:
        """Format workers by number and name."""
        named = [f"{i}" if self.names[i] == str(i) else f"{i} ({self.names[i]})" for i in workers]
        return f"worker{'s' if len(named) > 1 else ''} {', '.join(named)}" if named else "no worker"


def node_of(topology: Topology, bindings: Sequence[Binding], names: Sequence[str]) -> Node:
    """Return the node with its bindings; raise ValueError unless there is a name for each binding, or no name."""
    names = tuple(names) or tuple(str(i) for i in range(len(bindings)))
    if len(names) != len(bindings):
        raise ValueError(f"{len(names)} names for {len(bindings)} bindings; give one for each, or none")
    rest = CpuSet().union(*(b.cpuset for b in bindings)).difference(*topology.cores)
    gpus = list(topology.gpus)
    for gpu in (b.gpus[0] for b in bindings if b.gpus):
        if not any(is_same_gpu(gpu, g) for g in gpus):
            gpus.append(gpu)
    return Node(
        topology,
        tuple(bindings),
        names,
        tuple(sorted([*topology.cores, *(CpuSet([i]) for i in rest)], key=min)),
        tuple(sorted(gpus, key=lambda g: (g.pci, g.uuid))),
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
    ports = [
        port_name(n) + (f" ({binding.interface})" if binding.interface not in ("", n.name) else "")
        for n in binding.nics
    ]
    return (
        node.names[worker],
        f"GPU {next(i for i, g in enumerate(node.gpus) if is_same_gpu(gpu, g))}, {gpu.pci}" if gpu else "-",
        f"{count}{shared}: PUs {binding.cpuset}",
        memory,
        ", ".join(ports) or "-",
    )

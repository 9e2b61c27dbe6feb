"""The usable network ports of a node, their distances from GPUs, and the ports of each worker.

Only active ports, the load balanced within one, then the nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from hpcgpu.errors import ConfigError
from hpcgpu.model import Binding, Gpu, Nic, Topology

# If a node has several fabrics, one of them carries the job. RoCE beside InfiniBand is for storage or management, also
# where its port is nearer (JUSUF), unless it has rails, which are more ports and on the root complexes of the GPUs.
FABRICS = ("infiniband", "slingshot", "opa", "roce")
SWITCH, ROOT, NODE, PACKAGE, FAR, UNKNOWN = range(6)
DISTANCES = ("switch", "root", "node", "package", "machine", "unknown")
DISTANCE_WORDS = (
    "same switch",
    "same root complex",
    "same NUMA node",
    "across NUMA nodes",
    "across packages",
    "distance unknown",
)
# A port whose PCI link has less than this part of the widest one is for management: the fabric manager's ConnectX-7
# on NVSwitch boards of B200 have 3.9 GB/s beside 63.
_NARROW = 1 / 4


class Why(NamedTuple):
    """The reason why a port is not used, in words for one port and for several."""

    singular: str
    plural: str


_ETHERNET = Why(*("plain Ethernet is left to the kernel's routes",) * 2)
# RDMA devices on which no port is planned.
_UNDRIVEN = {
    "efa": Why(*("EFA, which UCX's verbs do not drive: Dask's traffic takes the kernel's routes",) * 2),
    "usnic": Why(*("usNIC, which UCX does not drive: Dask's traffic takes the kernel's routes",) * 2),
}
SPARE = Why("no worker needs it", "no worker needs them")
_FULL = Why("it has its share of workers", "they have their share of workers")
_STATES = {
    "down": Why("its port is down", "their ports are down"),
    "init": Why("no subnet manager has set its port up", "no subnet manager has set their ports up"),
    "armed": Why("its port is armed, not active", "their ports are armed, not active"),
}


class Distance(NamedTuple):
    """The distance of a port from a GPU; smaller is nearer."""

    kind: int  # index into DISTANCES
    height: int = 0  # of the lowest bridge above both: minus its depth below the host bridge
    bridges: int = 0  # on the way between the two


class Ports:
    """The ports of a node under the setting ``nics``; ConfigError for a name that no port of the node has."""

    def __init__(self, topology: Topology, nics: str | tuple[str, ...] = "balanced") -> None:
        self._hops = {hop[:2]: hop for hop in topology.hops}
        self._package = {n.os_index: n.package for n in topology.numa_nodes}
        self.all = tuple(sorted(topology.nics, key=lambda n: (n.pci, n.port, n.name)))
        named = None if isinstance(nics, str) else _named(self.all, nics)
        self.why_not: Mapping[Nic, Why] = self._why_not(topology.gpus, named)
        self.usable = tuple(n for n in self.all if n not in self.why_not)

    def distance(self, gpu: Gpu, nic: Nic) -> Distance:
        """Return the distance between the port and the GPU."""
        hop = self._hops.get((gpu.pci, nic.pci))
        if hop is not None:
            return Distance(SWITCH if hop.depth else ROOT, -hop.depth, hop.bridges)
        a, b = gpu.numa_node, nic.numa_node
        if a not in self._package or b not in self._package:
            return Distance(UNKNOWN)
        if a == b:
            return Distance(NODE)
        return Distance(PACKAGE if self._package[a] == self._package[b] else FAR)

    def _why_not(self, gpus: Sequence[Gpu], named: frozenset[Nic] | None) -> dict[Nic, Why]:
        """Return why each unusable port is not usable. A port that is named by the user only has to be active."""
        out: dict[Nic, Why] = {}
        for nic in self.all:
            if named is not None and nic not in named:
                out[nic] = Why("it is not among the nics asked for", "they are not among the nics asked for")
            elif not nic.active:
                out[nic] = _STATES.get(nic.state, _STATES["down"])
        if named is not None:
            return out
        for nic in self.all:
            if nic not in out and nic.kind not in FABRICS:
                out[nic] = _UNDRIVEN.get(nic.kind, _ETHERNET)
        out |= _narrow(self.all, out)
        out |= _virtual(self.all, out)
        kind = self._fabric(gpus, [n for n in self.all if n not in out])
        for nic in self.all:
            if nic not in out and nic.kind != kind:
                out[nic] = Why(f"it is {nic.kind} beside {kind}", f"they are {nic.kind} beside {kind}")
        return out | _slow(self.all, out)

    def _fabric(self, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> str:
        """Return the kind of the ports that carry the job: the first of FABRICS, unless only another has rails."""
        ports = {kind: [n for n in nics if n.kind == kind] for kind in FABRICS}
        kinds = [kind for kind in FABRICS if ports[kind]]
        if not kinds or self._has_rails(gpus, ports[kinds[0]]):
            return kinds[0] if kinds else ""
        more = (k for k in kinds[1:] if len(ports[k]) > len(ports[kinds[0]]) and self._has_rails(gpus, ports[k]))
        return next(more, kinds[0])

    def _has_rails(self, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> bool:
        """Return whether half of the GPUs or more have a port on their own root complex."""
        return 2 * sum(any(self.distance(g, n).kind <= ROOT for n in nics) for g in gpus) >= len(gpus) > 0

    def passed_over(self, gpu: Gpu, chosen: Nic) -> tuple[str, ...]:
        """Say which nearer ports the worker of ``gpu`` does not use, and why."""
        limit = self.distance(gpu, chosen)
        near = sorted((self.distance(gpu, n), i) for i, n in enumerate(self.all) if n.kind in FABRICS)
        nearer = [(d, self.all[i]) for d, i in near if d < limit]
        groups: dict[Why, list[tuple[Distance, Nic]]] = {}
        for d, nic in nearer:
            groups.setdefault(self.why_not.get(nic, _FULL), []).append((d, nic))
        out = []
        for why, ports in groups.items():
            names = ", ".join(label(n) for _, n in ports)
            if len(ports) > 1:
                out.append(f"{names} are nearer but {why.plural} → {label(chosen)}")
            else:
                rank = "nearest" if ports[0][0] == nearer[0][0] else "nearer"
                out.append(f"{names} is {rank} but {why.singular} → {label(chosen)}")
        return tuple(out)


def label(nic: Nic) -> str:
    """Return the port's name for people: with its number, unless it is the first."""
    return nic.name if nic.port == 1 else f"{nic.name}:{nic.port}"


def _named(nics: tuple[Nic, ...], names: tuple[str, ...]) -> frozenset[Nic]:
    out: set[Nic] = set()
    for name in names:
        matching = {n for n in nics if name in (n.name, f"{n.name}:{n.port}", n.interface)}
        if not matching:
            names_there = ", ".join(f"{n.name}:{n.port}" for n in nics) or "none"
            raise ConfigError(f"nics names {name!r}, but this node has no such port; it has: {names_there}")
        out |= matching
    return frozenset(out)


def _narrow(nics: Sequence[Nic], out: Mapping[Nic, Why]) -> dict[Nic, Why]:
    """Return the ports whose PCI link is far narrower than that of the node's other RDMA ports."""
    rdma = [n for n in nics if n.active and n.kind in (*FABRICS, *_UNDRIVEN)]
    widest = max((n.link_gbytes_s for n in rdma), default=0.0)
    why = "a PCI link of {:.1f} GB/s where others have {:.1f}: a management port"
    texts = {n: why.format(n.link_gbytes_s, widest) for n in rdma if 0 < n.link_gbytes_s < widest * _NARROW}
    return {n: Why(f"it has {text}", f"they have {text}") for n, text in texts.items() if n not in out}


def _virtual(nics: Sequence[Nic], out: Mapping[Nic, Why]) -> dict[Nic, Why]:
    """Return the virtual functions of the kinds that have whole cards, too."""
    left = [n for n in nics if n not in out]
    whole = {n.kind for n in left if not n.virtual}
    return {
        n: Why("it is a virtual function", "they are virtual functions") for n in left if n.virtual and n.kind in whole
    }


def _slow(nics: Sequence[Nic], out: Mapping[Nic, Why]) -> dict[Nic, Why]:
    """Return the ports that have less than half of the highest rate: for management or storage."""
    left = [n for n in nics if n not in out]
    fastest = max((n.rate_gbps for n in left), default=0.0)
    texts = {n: f"{n.rate_gbps:g} Gb/s where others have {fastest:g}" for n in left if 0 < n.rate_gbps < fastest / 2}
    return {n: Why(f"it has {text}", f"they have {text}") for n, text in texts.items()}


_UCX_KINDS = ("infiniband", "roce")
# Costs, lexicographic up to 100 workers and 100 ports: no sum of lesser costs reaches a greater one. From the greatest:
# slots that must be filled, rate, class of distance, height of the common bridge, load of a card, PCI bridges, and the
# distance in PCI order.
_BRIDGE, _CARD, _HEIGHT, _CLASS, _RATE, _MUST = 10**12, 10**16, 10**22, 10**26, 10**30, 10**34
_INFINITE = 10**40
_DEEPEST = 20  # bridges above a device; recorded machines have at most 6


class PortPlan(NamedTuple):
    """The ports of one worker, the nearest first, and why."""

    nics: tuple[Nic, ...] = ()
    interface: str = ""
    reasons: tuple[str, ...] = ()


def plan_nics(
    topology: Topology, gpus: Sequence[Gpu], nics: str | tuple[str, ...] = "balanced", interface: str = ""
) -> tuple[PortPlan, ...]:
    """Plan the ports of workers in PCI order; ConfigError if ``nics`` names a port that the node does not have."""
    # nics: balanced, nearest (whatever its load), ucx (no port: UCX chooses), or names of ports to balance over.
    # interface is for Dask's own traffic, "": that of the worker's first port. Under balanced the loads of ports differ
    # by at most one; among such plans the sum of distances is the least, then the loads of cards are even. Ties go by
    # PCI order, so that the i-th GPU has the same rail on equal nodes. With more ports than workers, each worker has
    # several, as long as they are on its GPU's NUMA node.
    ports = Ports(topology, nics)
    if not ports.usable or not gpus:
        nothing = "no port that nics names is active" if isinstance(nics, tuple) else ""
        return tuple(PortPlan((), interface, (nothing,) if nothing else ()) for _ in gpus)
    out = []
    for gpu, mine in zip(gpus, _nearest(ports, gpus) if nics == "nearest" else _balanced(ports, gpus), strict=True):
        reasons = [*ports.passed_over(gpu, mine[0])]
        beside = mine[0].interface
        if interface and beside and beside != interface:
            reasons.append(f"interface={interface!r} is asked for: Dask's own traffic is not on {beside}")
        if not interface and beside == "":
            reasons.append(f"{label(mine[0])} has no IP interface: Dask's own traffic takes the route to the scheduler")
        if nics == "ucx":
            mine, reasons = (), ["nics='ucx': UCX chooses among all ports itself"]
        out.append(PortPlan(mine, interface or beside or "", tuple(reasons)))
    return tuple(out)


def ucx_env(binding: Binding) -> tuple[tuple[str, str], ...]:
    """Return UCX's variables for a worker on InfiniBand or RoCE; () for other workers."""
    # UCX has no transport for Slingshot: there workers use tcp on the binding's interface. By default UCX spreads a
    # message over at most two ports (UCX_MAX_RNDV_RAILS).
    ports = _ucx_names(binding.nics)
    rails = (("UCX_MAX_RNDV_RAILS", str(len(ports))),) if len(ports) > 1 else ()
    return (("UCX_NET_DEVICES", ",".join(ports)), *rails) if ports else ()


def nccl_env(bindings: Sequence[Binding]) -> tuple[tuple[str, str], ...]:
    """Return NCCL's ports, the same for all workers of a node: they decide together how to connect."""
    # Without the = NCCL takes mlx5_1 as a prefix, which mlx5_10 has, too.
    ports = _ucx_names(n for b in bindings for n in b.nics)
    return (("NCCL_IB_HCA", "=" + ",".join(ports)),) if ports else ()


def _ucx_names(nics: Iterable[Nic]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{n.name}:{n.port}" for n in nics if n.kind in _UCX_KINDS))


def _nearest(ports: Ports, gpus: Sequence[Gpu]) -> list[tuple[Nic, ...]]:
    usable = ports.usable
    return [
        (usable[min(range(len(usable)), key=lambda j: (ports.distance(g, usable[j]), _skew(i, gpus, j, usable)))],)
        for i, g in enumerate(gpus)
    ]


def _balanced(ports: Ports, gpus: Sequence[Gpu]) -> list[tuple[Nic, ...]]:
    usable = ports.usable
    rails = len(usable) // len(gpus) if usable[0].kind in _UCX_KINDS else 1
    if rails <= 1:
        slots, costs_of_slots = _slots(usable, len(gpus))
        costs = [
            [c + _cost(ports, gpus, i, j) for j, c in zip(slots, costs_of_slots, strict=True)] for i in range(len(gpus))
        ]
        return [(usable[slots[s]],) for s in assign(costs)]
    rows = [g for g in gpus for _ in range(rails)]
    columns = assign([[_cost(ports, rows, i, j) for j in range(len(usable))] for i in range(len(rows))])
    out = []
    for i, gpu in enumerate(gpus):
        mine = sorted(columns[i * rails : (i + 1) * rails], key=lambda j: (ports.distance(gpu, usable[j]), j))
        near = [j for j in mine[1:] if ports.distance(gpu, usable[j]) <= Distance(NODE)]
        out.append(tuple(usable[j] for j in (mine[0], *near)))
    return out


def _slots(usable: Sequence[Nic], workers: int) -> tuple[list[int], list[int]]:
    """Return the slots for workers, each a position in ``usable``, and the cost of each besides the distance."""
    # Each port has workers // ports slots that must be filled, and may have one more. The additional slots are spread
    # over cards first, because two ports of one card share its PCI link and have the same distance to any GPU; then
    # over faster ports before slower ones.
    full = workers // len(usable)
    fastest = max(n.rate_gbps for n in usable)
    slots = [j for j in range(len(usable)) for _ in range(full)]
    costs = [-_MUST] * len(slots)
    if workers % len(usable):
        for _, card in groupby(range(len(usable)), key=lambda j: usable[j].pci.rpartition(".")[0]):
            mine = list(card)
            slots += mine
            load = full * len(mine)
            costs += [(load + k) * _CARD + (usable[j].rate_gbps < fastest) * _RATE for k, j in enumerate(mine)]
    return slots, costs


def _cost(ports: Ports, gpus: Sequence[Gpu], i: int, j: int) -> int:
    kind, height, bridges = ports.distance(gpus[i], ports.usable[j])
    rank = max(height + _DEEPEST, 0)
    return kind * _CLASS + rank * _HEIGHT + bridges * _BRIDGE + _skew(i, gpus, j, ports.usable)


def _skew(i: int, gpus: Sequence[Gpu], j: int, nics: Sequence[Nic]) -> int:
    """Return how far apart GPU and port are in the order of PCI addresses."""
    return ((2 * i + 1) * len(nics) - (2 * j + 1) * len(gpus)) ** 2


def assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """Assign a different column to each row with the least sum of costs; there are at least as many columns as rows."""
    # The Hungarian method by shortest augmenting paths (R. Jonker and A. Volgenant, Computing 38, 1987), in whole
    # numbers: nothing is rounded. Of equal columns the first is used.
    rows, columns = len(costs), len(costs[0]) if costs else 0
    row_price, column_price = [0] * rows, [0] * columns
    owner = [-1] * columns
    for row in range(rows):
        # Dijkstra from the new row to the nearest free column, over reduced costs.
        length, came_from, open_columns = [_INFINITE] * columns, [-1] * columns, list(range(columns))
        done: list[int] = []
        column, at, base = -1, row, 0
        while True:
            price, line = base - row_price[at], costs[at]
            for j in open_columns:
                way = price + line[j] - column_price[j]
                if way < length[j]:
                    length[j], came_from[j] = way, column
            column = min(open_columns, key=length.__getitem__)
            base = length[column]
            if owner[column] < 0:
                break
            open_columns.remove(column)
            done.append(column)
            at = owner[column]
        row_price[row] += base
        for j in done:
            row_price[owner[j]] += base - length[j]
            column_price[j] -= base - length[j]
        while column >= 0:
            before = came_from[column]
            owner[column] = owner[before] if before >= 0 else row
            column = before
    columns_by_row = {r: j for j, r in enumerate(owner) if r >= 0}
    return [columns_by_row[r] for r in range(rows)]

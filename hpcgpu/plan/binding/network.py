"""The usable network ports of a node, their distances from GPUs, and the ports of each worker.

Only active ports, those of the nearest class, the load balanced among them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hpcgpu.errors import ConfigError, opt, plain
from hpcgpu.light_typing import NamedTuple
from hpcgpu.model.topology import Binding, Gpu, Nic, Topology

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
# A port whose PCI link has less than this part of the widest one of its kind is for management. hwloc rounds links.
_NARROW = 0.99 / 4
# The fabric manager's InfiniBand on NVSwitch boards of B200 has 3.9 GB/s beside 63 of EFA: far less than any card.
_NARROW_BESIDE_UNDRIVEN = 0.99 / 8
# NVIDIA BlueField 1 to 4 (pci.ids): a node's storage and management, if there are ConnectX cards too.
_BLUEFIELD = ("15b3:a2d2", "15b3:a2d6", "15b3:a2dc", "15b3:a2df")
# Of ours, those that only users set, no launcher and no batch system.
USER_VARIABLES = ("UCX_NET_DEVICES", "UCX_MAX_RNDV_RAILS", "NCCL_IB_HCA")
_UCX_KINDS = ("infiniband", "roce", "rdma")  # the last one by name only
# Costs, lexicographic up to 100 GPUs and 10,000 ports: no sum of lesser costs reaches a greater one. From the greatest:
# load of GPUs that are not bound, a port without room, class of distance, load, another port than in the plan of all
# GPUs, grade, height of the common bridge, position on the card, PCI bridges, and the distance in PCI order.
_BRIDGE, _CARD, _HEIGHT, _GRADE, _MOVE, _LOAD, _CLASS = (10**n for n in (14, 18, 24, 28, 34, 38, 44))
_ROOM, _FIRST, _IMPOSSIBLE, _INFINITE = (10**n for n in (48, 52, 60, 64))
_DEEPEST = 20  # bridges above a device; recorded machines have at most 6


class Why(NamedTuple):
    """The reason why a port is not used, in words for one port and for several."""

    singular: str
    plural: str


_ETHERNET = Why(*("plain Ethernet is left to the kernel's routes",) * 2)
# RDMA devices on which no port is planned.
_UNDRIVEN = {
    "efa": Why(*("EFA, which UCX's verbs do not drive: Dask's traffic takes the kernel's routes",) * 2),
    "usnic": Why(*("usNIC, which UCX does not drive: Dask's traffic takes the kernel's routes",) * 2),
    "rdma": Why(*("RDMA that UCX is not known to drive: it is used if nics names it",) * 2),
}
SPARE = Why("no worker needs it", "no worker needs them")
_FULL = Why("it has its share of workers", "they have their share of workers")
_LESSER = Why(*("faster ports, or the node's most frequent cards, suffice",) * 2)
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
        models = Counter(model for model, _ in {(n.card, _card(n)) for n in self.usable} if model)
        # The ports that serve last among those of a class have the greatest.
        self.grades = {n: (-n.rate_gbps, _is_beside(n.card, models)) for n in self.usable}

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
            spare = _LESSER if nic in self.grades and self.grades[nic] > self.grades[chosen] else _FULL
            groups.setdefault(self.why_not.get(nic, spare), []).append((d, nic))
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
            from hpcgpu.model.settings import NIC_RULES

            allowed = ", ".join((*NIC_RULES, *(f"{n.name}:{n.port}" for n in nics)))
            raise ConfigError(f"{opt('nics', None)} names {name!r}: this node has no such port; allowed: {allowed}")
        out |= matching
    return frozenset(out)


def _card(nic: Nic) -> str:
    return nic.pci.rpartition(".")[0]


def _is_beside(model: str, models: Mapping[str, int]) -> bool:
    """Return whether cards of this model are beside those that carry the job: BlueField, or few among many."""
    most = max((count for other, count in models.items() if other != model), default=0)
    mine = models.get(model, most)
    return 2 * mine < most or (model in _BLUEFIELD and mine <= most)


def _narrow(nics: Sequence[Nic], out: Mapping[Nic, Why]) -> dict[Nic, Why]:
    """Return the ports whose PCI link is far narrower than those of the other ports of their kind."""
    rdma = [n for n in nics if n.active and n.kind in (*FABRICS, *_UNDRIVEN)]
    widest: dict[str, float] = {}
    for nic in rdma:
        widest[nic.kind] = max(widest.get(nic.kind, 0.0), nic.link_gbytes_s)
    undriven, narrow = max((widest.get(kind, 0.0) for kind in _UNDRIVEN), default=0.0), {}
    for nic in rdma:
        for others, part in ((widest[nic.kind], _NARROW), (undriven, _NARROW_BESIDE_UNDRIVEN)):
            if nic not in out and 0 < nic.link_gbytes_s < others * part:
                text = f"a PCI link of {nic.link_gbytes_s:.1f} GB/s where others have {others:.1f}: a management port"
                narrow[nic] = Why(f"it has {text}", f"they have {text}")
    return narrow


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


class PortPlan(NamedTuple):
    """The ports of one worker, the nearest first, and why."""

    nics: tuple[Nic, ...] = ()
    interface: str = ""
    reasons: tuple[str, ...] = ()


def plan_nics(
    topology: Topology, gpus: Sequence[Gpu], nics: str | tuple[str, ...] = "balanced", interface: str = ""
) -> tuple[PortPlan, ...]:
    """Plan the ports of workers in PCI order; ConfigError if ``nics`` names a port that the node does not have.

    ``nics``: balanced, nearest (whatever its load), ucx (no port: UCX chooses), or names of ports to balance over.
    ``interface`` is for Dask's own traffic, "": that of the worker's first port. A GPU's ports are those of its nearest
    class that are its share if all GPUs of the machine have workers, also in a job with some of them: the others' ports
    may have another job. Ties go by PCI order, so that the i-th GPU has the same rail on equal nodes. The workers of
    one GPU share its ports. Decision 5 has the reasons.
    """
    ports = Ports(topology, nics)
    if not ports.usable or not gpus:
        nothing = "no port that nics names is active" if isinstance(nics, tuple) else ""
        return tuple(PortPlan((), interface, (nothing,) if nothing else ()) for _ in gpus)
    out = []
    machine = _sharing(topology, gpus)
    at = {g.pci: i for i, g in enumerate(machine)}
    places = [at[g.pci] if g.pci else i for i, g in enumerate(gpus)]
    plan = _nearest(ports, machine) if nics == "nearest" else _balanced(ports, machine, sorted(set(places)))
    counts, seen = Counter(places), Counter[int]()
    for gpu, place in zip(gpus, places, strict=True):
        mine = plan[place][seen[place] :: counts[place]] or (plan[place][seen[place] % len(plan[place])],)
        seen[place] += 1
        reasons = [*ports.passed_over(gpu, mine[0])]
        beside = mine[0].interface
        if interface and beside and beside != interface:
            reasons.append(f"{plain(opt('interface', interface))} is asked for: Dask's own traffic is not on {beside}")
        if not interface and beside == "":
            reasons.append(f"{label(mine[0])} has no IP interface: Dask's own traffic takes the route to the scheduler")
        if nics == "ucx":
            mine, reasons = (), [f"{plain(opt('nics', nics))}: UCX chooses among all ports itself"]
        out.append(PortPlan(mine, interface or beside or "", tuple(reasons)))
    return tuple(out)


def ucx_env(binding: Binding) -> tuple[tuple[str, str], ...]:
    """Return UCX's variables for a worker on InfiniBand or RoCE; () for other workers.

    UCX has no transport for Slingshot: there workers use tcp on the binding's interface. By default UCX spreads a
    message over at most two ports (UCX_MAX_RNDV_RAILS).
    """
    ports = _ucx_names(binding.nics)
    rails = (("UCX_MAX_RNDV_RAILS", str(len(ports))),) if len(ports) > 1 else ()
    return (("UCX_NET_DEVICES", ",".join(ports)), *rails) if ports else ()


def nccl_env(bindings: Sequence[Binding]) -> tuple[tuple[str, str], ...]:
    """Return NCCL's ports, the same for all workers of a node: they decide together how to connect."""
    ports = _ucx_names(n for b in bindings for n in b.nics)
    # Without the = NCCL takes mlx5_1 as a prefix, which mlx5_10 has, too.
    return (("NCCL_IB_HCA", "=" + ",".join(ports)),) if ports else ()


def _ucx_names(nics: Iterable[Nic]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(f"{n.name}:{n.port}" for n in nics if n.kind in _UCX_KINDS))


def _sharing(topology: Topology, gpus: Sequence[Gpu]) -> list[Gpu]:
    """Return the GPUs that share the ports, in PCI order: of the machine those of the same makers, and the job's.

    Slices of a GPU are one. Workers without a GPU have one near their cores each, which has no address.
    """
    if not all(g.pci for g in gpus):
        return list(gpus)
    makers = {g.vendor for g in gpus}
    by_address = {g.pci: g for g in (*topology.gpus, *gpus) if g.vendor in makers}
    return [by_address[pci] for pci in sorted(by_address)]


def _nearest(ports: Ports, machine: Sequence[Gpu]) -> dict[int, tuple[Nic, ...]]:
    def cost(place: int, j: int) -> tuple[Distance, int]:
        return ports.distance(machine[place], ports.usable[j]), _skew(place, machine, j, ports.usable)

    every = range(len(ports.usable))
    return {i: (ports.usable[min((cost(i, j), j) for j in every)[1]],) for i in range(len(machine))}


def _balanced(ports: Ports, machine: Sequence[Gpu], job: Sequence[int]) -> dict[int, tuple[Nic, ...]]:
    """Return the ports of the job's GPUs, which are positions in ``machine``."""
    usable = ports.usable
    ways = [[ports.distance(g, n) for n in usable] for g in machine]
    costs = _costs(ports, machine, ways)
    # In the GPU's own switch or root complex a port has room for any number of GPUs, elsewhere for an equal share.
    best = [min(way).kind for way in ways]
    bound = [bool(g.pci) and kind > ROOT for g, kind in zip(machine, best, strict=True)]
    rows = [
        {j: cost for j, cost in enumerate(row) if is_bound or ways[i][j].kind == best[i]}
        for i, (row, is_bound) in enumerate(zip(costs, bound, strict=True))
    ]
    first = _spread(rows, bound, -(-len(machine) // len(usable)))
    kinds = [way[j].kind for way, j in zip(ways, first, strict=True)]
    near = [[j for j, d in enumerate(way) if d.kind == kind] for way, kind in zip(ways, kinds, strict=True)]
    whole = _with_rails(ports, machine, ways, first)
    if len(job) < len(machine):  # of two GPUs that share a port one may have another port of its class
        choices = [whole[i] if len(whole[i]) > 1 else near[i] for i in job]
        moves = [{j: costs[i][j] + (j != first[i]) * _MOVE for j in mine} for i, mine in zip(job, choices, strict=True)]
        for i, j in zip(job, _spread(moves, [False] * len(job)), strict=True):
            whole[i] = whole[i] if len(whole[i]) > 1 else (j,)
    return {i: tuple(usable[j] for j in whole[i]) for i in job}


def _with_rails(
    ports: Ports, machine: Sequence[Gpu], ways: Sequence[Sequence[Distance]], first: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return each GPU's first port and others that are like it: its share, and at most one more than others have."""
    from fractions import Fraction  # takes 3 CPU ms, for which many nodes have no use

    usable, rails, taken = ports.usable, [[j] for j in first], set(first)
    fastest = max(n.rate_gbps for n in usable) or 1.0
    of_port = [(ports.grades[n], n.kind) for n in usable]
    like, several = [], []
    for gpu, way, j in zip(machine, ways, first, strict=True):
        several.append(bool(gpu.pci) and way[j].kind <= NODE and usable[j].kind in _UCX_KINDS)
        alike = (n for n, d in enumerate(way) if d[:2] == way[j][:2] and of_port[n] == of_port[j])
        like.append(sorted(alike, key=lambda n: (way[n], n)))  # noqa: B023
    users = Counter(j for mine in like for j in mine)
    shares = [max(int(sum(Fraction(n, u) for u, n in Counter(users[j] for j in mine).items())), 1) for mine in like]
    rates = [usable[j].rate_gbps or fastest for j in first]
    each = list(zip([way[j].kind for way, j in zip(ways, first, strict=True)], shares, rates, several, strict=True))
    least = {kind: min(s * r for k, s, r, _ in each if k == kind) for kind, *_ in each}
    counts = [min(s, int(least[k] // r) + 1) if more else 1 for k, s, r, more in each]
    left = [iter(mine) for mine in like]
    for more in range(1, max(counts)):
        for i, mine in enumerate(rails):
            if more < counts[i] and (j := next((n for n in left[i] if n not in taken), -1)) >= 0:
                mine.append(j)
                taken.add(j)
    return [tuple(sorted(mine, key=lambda n: (way[n], n))) for way, mine in zip(ways, rails, strict=True)]


def _costs(ports: Ports, machine: Sequence[Gpu], ways: Sequence[Sequence[Distance]]) -> list[list[int]]:
    """Return the cost of each port for each GPU."""
    usable, seen = ports.usable, Counter[str]()
    ranks = {grade: i for i, grade in enumerate(sorted(set(ports.grades.values())))}
    of_port = []
    for nic in usable:
        of_port.append(ranks[ports.grades[nic]] * _GRADE + seen[_card(nic)] * _CARD)
        seen[_card(nic)] += 1
    return [
        [
            d.kind * _CLASS
            + max(d.height + _DEEPEST, 0) * _HEIGHT
            + d.bridges * _BRIDGE
            + of_port[j]
            + _skew(i, machine, j, usable)
            for j, d in enumerate(way)
        ]
        for i, way in enumerate(ways)
    ]


def _spread(rows: Sequence[Mapping[int, int]], bound: Sequence[bool], room: int = 0) -> list[int]:
    """Give each row one of its ports: the loads even, then the least sum of costs.

    A row that is ``bound`` gets a port with ``room`` others only if no other is left.
    """
    slots = Counter[int]()
    for mine, count in Counter(tuple(row) for row, is_bound in zip(rows, bound, strict=True) if not is_bound).items():
        for j in mine:
            slots[j] += -(-count // len(mine))
    # As many ports as there are rows are enough for each row: the others cannot occupy all of them.
    cheapest = [sorted(row, key=row.__getitem__)[: len(rows)] for row in rows]
    columns = [(j, k) for j in sorted({j for mine in cheapest for j in mine}) for k in range(slots[j] + room)]
    table = [
        [
            row[j] + (k * _LOAD + (k >= room) * _ROOM if is_bound else k * _FIRST) if j in row else _IMPOSSIBLE
            for j, k in columns
        ]
        for row, is_bound in zip(rows, bound, strict=True)
    ]
    return [columns[c][0] for c in assign(table)]


def _skew(i: int, gpus: Sequence[Gpu], j: int, nics: Sequence[Nic]) -> int:
    """Return how far apart GPU and port are in the order of PCI addresses."""
    return ((2 * i + 1) * len(nics) - (2 * j + 1) * len(gpus)) ** 2


def assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """Assign a different column to each row with the least sum of costs; there are at least as many columns as rows.

    The Hungarian method by shortest augmenting paths (R. Jonker and A. Volgenant, Computing 38, 1987), in whole
    numbers: nothing is rounded. Of equal columns the first is used.
    """
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

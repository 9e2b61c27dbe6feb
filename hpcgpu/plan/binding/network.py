"""The network ports of each worker: only active ones, the load balanced within one, then the nearest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from hpcgpu.model import Binding, Gpu, Nic, Topology
from hpcgpu.plan.binding.ports import NODE, Distance, Ports, label

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
    """Plan each worker's ports; raise ConfigError if ``nics`` names a port that the node does not have."""
    # nics: balanced, nearest (whatever its load), ucx (no port: UCX chooses), or names of ports to balance over.
    # interface is for Dask's own traffic, "": that of the worker's first port. Under balanced the loads of ports differ
    # by at most one; among such plans the sum of distances is the least, then the loads of cards are even. Ties go by
    # PCI order, so that the i-th GPU has the same rail on equal nodes. With more ports than workers, each worker has
    # several, as long as they are on its GPU's NUMA node.
    ports = Ports(topology, nics)
    if not ports.usable or not gpus:
        nothing = "no port that nics names is active" if isinstance(nics, tuple) else ""
        return tuple(PortPlan((), interface, (nothing,) if nothing else ()) for _ in gpus)
    order = sorted(range(len(gpus)), key=lambda i: (gpus[i].pci, gpus[i].uuid))
    ranked = [gpus[i] for i in order]
    chosen = _nearest(ports, ranked) if nics == "nearest" else _balanced(ports, ranked)
    out = [PortPlan()] * len(gpus)
    for i, gpu, mine in zip(order, ranked, chosen, strict=True):
        reasons = [*ports.passed_over(gpu, mine[0])]
        beside = mine[0].interface
        if interface and beside and beside != interface:
            reasons.append(f"interface={interface!r} is asked for: Dask's own traffic is not on {beside}")
        if not interface and beside == "":
            reasons.append(f"{label(mine[0])} has no IP interface: Dask's own traffic takes the route to the scheduler")
        if nics == "ucx":
            out[i] = PortPlan((), interface or beside or "", ("nics='ucx': UCX chooses among all ports itself",))
        else:
            out[i] = PortPlan(mine, interface or beside or "", tuple(reasons))
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

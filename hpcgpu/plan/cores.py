"""Share the cores of one node among workers: each the same number within one, the nearest first.

Distances on a tree of NUMA nodes, packages and the machine are an ultrametric, so matching from
the bottom up (what is near first, the surplus goes one level up) is optimal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from hpcgpu.model import CpuSet, Topology


@dataclass(slots=True, eq=False)
class _Share:
    """What one worker gets, and has so far."""

    node: int | None
    package: int | None
    size: int = 0
    cores: list[CpuSet] = field(default_factory=list)


def usable_cores(topology: Topology, allowed: CpuSet) -> tuple[CpuSet, ...]:
    """Return the allowed part of each core that has one, by lowest PU; PUs that no core claims are cores."""
    cores = [c & allowed for c in topology.cores]
    rest = allowed.difference(*topology.cores)
    return tuple(sorted([c for c in cores if c] + [CpuSet([i]) for i in rest], key=min))


def split_cores(
    topology: Topology, cores: Sequence[CpuSet], homes: Sequence[int | None]
) -> tuple[tuple[CpuSet, ...], ...]:
    """Return the cores of each worker; ``homes`` holds the NUMA node of each, None where unknown.

    With fewer cores than workers everybody has all of them: the kernel balances better over
    shared cores than any fixed share of less than a core.
    """
    if len(cores) < len(homes):
        return tuple(tuple(cores) for _ in homes)
    packages = {n.os_index: n.package for n in topology.numa_nodes}
    shares = [_Share(h if h in packages else None, packages.get(h) if h is not None else None) for h in homes]
    places = {c: _place(topology, c) for c in cores}
    _set_sizes(shares, list(places.values()))
    free = list(cores)
    _deal(free, shares, lambda s: s.node, lambda c: places[c][0])
    _deal(free, shares, lambda s: s.package, lambda c: places[c][1])
    _deal(free, shares, lambda s: 0, lambda c: 0)
    return tuple(tuple(sorted(s.cores, key=min)) for s in shares)


def _set_sizes(shares: Sequence[_Share], places: Sequence[tuple[int | None, int | None]]) -> None:
    """Give each share its size, the same within one; one more goes to those for whom a core is nearest.

    A core more costs a step for each level (NUMA node, package) whose cores are all asked for
    already. Such costs are convex on a tree, so taking the cheapest each time is optimal.
    """
    smallest, more = divmod(len(places), len(shares))
    node_left, package_left = Counter(n for n, _ in places), Counter(p for _, p in places)
    for share in shares:
        share.size = smallest
        node_left[share.node] -= smallest
        package_left[share.package] -= smallest
    waiting = list(shares)
    for _ in range(more):
        share = min(
            waiting,
            key=lambda s: 2 if s.node is None else (node_left[s.node] <= 0) + (package_left[s.package] <= 0),
        )
        waiting.remove(share)
        share.size += 1
        node_left[share.node] -= 1
        package_left[share.package] -= 1


def _place(topology: Topology, core: CpuSet) -> tuple[int | None, int | None]:
    node = next((n for n in topology.numa_nodes if n.cpuset & core), None)
    return (node.os_index, node.package) if node else (None, None)


def _deal(
    free: list[CpuSet],
    shares: Sequence[_Share],
    home_of: Callable[[_Share], Hashable],
    place_of: Callable[[CpuSet], Hashable],
) -> None:
    """Give the free cores of each place, in runs, to the shares at home there, up to its size each."""
    for place in dict.fromkeys(place_of(c) for c in free):
        near = [s for s in shares if place is not None and home_of(s) == place and len(s.cores) < s.size]
        here = [c for c in free if place_of(c) == place]
        for share, count in zip(near, _even([s.size - len(s.cores) for s in near], len(here)), strict=True):
            for core in here[:count]:
                share.cores.append(core)
                free.remove(core)
            here = here[count:]


def _even(wanted: Sequence[int], there: int) -> list[int]:
    """Return how many of ``there`` each gets: at most what it wants, otherwise the same within one."""
    got = [0] * len(wanted)
    while there > 0 and any(g < w for g, w in zip(got, wanted, strict=True)):
        for i, w in enumerate(wanted):
            if there and got[i] < w:
                got[i] += 1
                there -= 1
    return got

"""Divide the cores of a node among its workers, the nearest first.

Distances on a tree of NUMA nodes, packages and the machine are an ultrametric. So matching from the bottom up is
optimal: near cores first, and the surplus goes one level up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence

from hpcgpu.errors import ConfigError, opt, plain
from hpcgpu.light_typing import NamedTuple
from hpcgpu.model.allocation import CpuSet
from hpcgpu.model.topology import Topology
from hpcgpu.units import counted


class CoreShares(NamedTuple):
    """The cores of each worker."""

    shares: tuple[tuple[CpuSet, ...], ...]
    note: str = ""  # why the rule could not be kept


class _Locality(NamedTuple):
    """NUMA node and package of a core or of a worker's GPU, L3 cache and kind of a core; None: unknown."""

    node: int | None
    package: int | None
    cache: int | None = None
    kind: int = 0  # of the cores of a hybrid CPU


class _Share:
    """One worker's share of the cores."""

    __slots__ = ("cores", "home", "size")

    def __init__(self, home: _Locality) -> None:
        self.home, self.size = home, 0  # the number of its cores
        self.cores: list[int] = []  # so far, as positions in the list of cores


def usable_cores(topology: Topology, allowed: CpuSet) -> tuple[CpuSet, ...]:
    """Return the allowed part of each core, by lowest PU; a PU outside of all cores is a core of its own."""
    cores = [c & allowed for c in topology.cores]
    rest = allowed.difference(*topology.cores)
    return tuple(sorted([c for c in cores if c] + [CpuSet([i]) for i in rest], key=min))


def split_cores(
    topology: Topology,
    cores: Sequence[CpuSet],
    homes: Sequence[int | None],
    rule: str | int = "all",
    reserved: int = 0,
    others: int = 0,
    threads: int = 1,
) -> CoreShares:
    """Divide ``cores``, sorted by lowest PU, among workers; ConfigError if there are fewer than the rule asks for.

    ``homes`` are the NUMA nodes of the workers' GPUs (None: unknown). With fewer cores than workers, each worker has
    all cores. The ``rule`` "all" divides all cores, the numbers differ by one at most; "local" divides only the cores
    of each home among its workers; a number is that of each worker. ``reserved`` cores stay free, under "all" an equal
    part of each worker's, the farthest first. The ``others``, workers without a GPU, are last: each has a core for each
    of its ``threads``, or an even share if that is less, far from the workers with GPUs, on NUMA nodes without a GPU
    first.
    """
    everyone, room = len(homes) + others, len(cores) - reserved
    if isinstance(rule, int):
        request = f"{opt('cores', rule)} for each of {len(homes)} workers"
        request += f" with a core for each of {others} CPU workers" if others else ""
        left = room - rule * len(homes)
        size = min(threads, left // others) if others else 0
    elif len(cores) < everyone:
        return CoreShares(tuple(tuple(cores) for _ in range(everyone)))
    else:
        request, left = f"a core for each of {everyone} workers", room - len(homes)
        size = min(threads, room // everyone) if others else 0
    if left < 0 or (others and size < 1):
        _refuse(request, reserved, len(cores))
    packages = {n.os_index: n.package for n in topology.numa_nodes}
    localities, note = _localities(topology, cores, packages), ""
    shares = [_Share(_Locality(h, packages[h]) if h in packages else _Locality(None, None)) for h in homes]
    free = list(range(len(cores)))
    if shares:
        given_up, note = _set_sizes(shares, localities, rule, reserved, size * others)
        kinds = sorted({p.kind for p in localities})  # fast and slow cores are shared out one kind after the other
        for level in (lambda p: p.node, lambda p: p.package, lambda _: 0):
            dealt = (_deal([c for c in free if localities[c].kind == k], shares, localities, level) for k in kinds)
            free = sorted(core for left in dealt for core in left)
        for _ in range(given_up):
            free.append(_give_up(shares, localities))

    def nearness(core: int) -> tuple[bool, int, int]:
        node = localities[core].node
        number = -1 if node is None else node
        return number not in homes, number, core

    last = sorted(free, key=nearness)[len(free) - size * others :]
    parts = [*(sorted(s.cores) for s in shares), *(last[i * size : (i + 1) * size] for i in range(others))]
    return CoreShares(tuple(tuple(cores[i] for i in part) for part in parts), note)


def _localities(topology: Topology, cores: Sequence[CpuSet], packages: Mapping[int, int]) -> list[_Locality]:
    node_of = {pu: n.os_index for n in topology.numa_nodes for pu in n.cpuset}
    cache_of = {pu: k for k, cache in enumerate(topology.l3) for pu in cache}
    kind_of = {pu: k for k, kind in enumerate(topology.core_kinds) for pu in kind}
    out = []
    for core in cores:
        node, pu = node_of.get(min(core)), min(core)
        package = packages[node] if node is not None else None
        out.append(_Locality(node, package, cache_of.get(pu), kind_of.get(pu, 0)))
    return out


def _refuse(request: str, reserved: int, available: int) -> None:
    kept = f" and {opt('reserved_cores', reserved)}" if reserved else ""
    raise ConfigError(
        f"{request}{kept} are more than the {counted(available, 'core')} that this job may use on the node; ask the "
        f"batch system for more, or leave {opt('cores', None)} and {opt('reserved_cores', None)} out for equal shares"
    )


def _set_sizes(
    shares: Sequence[_Share], localities: Sequence[_Locality], rule: str | int, reserved: int, for_cpu_workers: int
) -> tuple[int, str]:
    """Give each share its size; return the number of cores to give up afterwards, and a note on a broken rule."""
    if isinstance(rule, int):
        for share in shares:
            share.size = rule
        return 0, ""
    if rule == "local" and _set_local_sizes(shares, localities, reserved + for_cpu_workers):
        return 0, ""
    _set_even_sizes(shares, localities, for_cpu_workers)
    why = "is impossible here: some workers would get no core; cores are divided evenly instead"
    return reserved, f"{plain(opt('cores', rule))} {why}" if rule == "local" else ""


def _give_up(shares: Sequence[_Share], localities: Sequence[_Locality]) -> int:
    """Take the farthest core from one of the largest shares, of equals on its NUMA node with the fewest; return it."""

    def cost(share: _Share, core: int) -> tuple[int, int, int]:
        at, home = localities[core], share.home
        far = 2 if home.node is None or at.package != home.package else at.node != home.node
        return far, -sum(localities[c].node == at.node for c in share.cores), core

    largest = max(len(s.cores) for s in shares)
    candidates = [(cost(s, core), -i) for i, s in enumerate(shares) if len(s.cores) == largest for core in s.cores]
    (_, _, core), last = max(candidates)
    shares[-last].cores.remove(core)
    return core


def _set_local_sizes(shares: Sequence[_Share], localities: Sequence[_Locality], reserved: int) -> bool:
    """Divide each NUMA node among its workers; return False if a worker would have no core.

    Workers without a core at home divide the nodes without workers.
    """
    core_counts = Counter(p.node for p in localities)
    homes: dict[int | None, list[_Share]] = {}
    for share in shares:
        homes.setdefault(share.home.node if core_counts[share.home.node] else None, []).append(share)
    elsewhere = len(localities) - sum(core_counts[h] for h in homes if h is not None)
    for home, group in homes.items():
        for i, share in enumerate(group):
            total = elsewhere if home is None else core_counts[home]
            share.size = total // len(group) + (i < total % len(group))
    for _ in range(sum(s.size for s in shares) + reserved - len(localities)):
        max(shares, key=lambda s: s.size).size -= 1
    return all(s.size > 0 for s in shares)


def _set_even_sizes(shares: Sequence[_Share], localities: Sequence[_Locality], reserved: int) -> None:
    """Give all shares the same size within one; the shares with the nearest free cores get one more.

    One more core costs a step for each level (NUMA node, package) whose cores are all used. Such costs are convex on a
    tree, so a greedy choice is optimal.
    """
    smallest, more = divmod(len(localities) - reserved, len(shares))
    node_left, package_left = Counter(p.node for p in localities), Counter(p.package for p in localities)
    for share in shares:
        share.size = smallest
        node_left[share.home.node] -= smallest
        package_left[share.home.package] -= smallest

    def cost(share: _Share) -> int:
        node, package = share.home[:2]
        return 2 if node is None else (node_left[node] <= 0) + (package_left[package] <= 0)

    waiting = list(shares)
    for _ in range(more):
        share = min(waiting, key=cost)
        waiting.remove(share)
        share.size += 1
        node_left[share.home.node] -= 1
        package_left[share.home.package] -= 1


def _deal(
    free: list[int], shares: Sequence[_Share], localities: Sequence[_Locality], level: Callable[[_Locality], Hashable]
) -> list[int]:
    """Give the free cores of each node, or package, to the shares at home there, up to their sizes; return the rest."""
    here: dict[Hashable, dict[int | None, list[int]]] = {}
    for core in free:
        here.setdefault(level(localities[core]), {}).setdefault(localities[core].cache, []).append(core)
    for domain, groups in here.items():
        near = [s for s in shares if domain is not None and level(s.home) == domain and len(s.cores) < s.size]
        # Neighbours in number are neighbours on the die: of two GPUs on NUMA nodes 3 and 1 the second takes node 0.
        near.sort(key=lambda s: (s.home.node is None, s.home.node))
        total = sum(len(group) for group in groups.values())
        for share, count in zip(near, _even([s.size - len(s.cores) for s in near], total), strict=True):
            share.cores += _take(groups, count)
    return sorted(core for groups in here.values() for group in groups.values() for core in group)


def _take(groups: dict[int | None, list[int]], count: int) -> list[int]:
    """Take ``count`` cores out of groups that share a cache: from the smallest sufficient group, else whole groups."""
    out: list[int] = []
    while len(out) < count:
        need = count - len(out)
        enough = [k for k, group in groups.items() if len(group) >= need]
        key = min(enough, key=lambda k: len(groups[k])) if enough else max(groups, key=lambda k: len(groups[k]))
        out += groups[key][:need]
        del groups[key][:need]
    return out


def _even(limits: Sequence[int], available: int) -> list[int]:
    """Return how many of the available each gets: at most its limit, and otherwise equal numbers within one."""
    out = [0] * len(limits)
    while available > 0 and (short := [i for i, limit in enumerate(limits) if out[i] < limit]):
        for i in short[:available]:
            out[i] += 1
        available -= len(short)
    return out

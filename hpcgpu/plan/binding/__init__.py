"""Decisions about one node: its workers, and the cores, memory and network ports of each, near its GPU.

Here are the bindings, and the division of cores, the nearest first, and of memory nodes. Distances on a tree of NUMA
nodes, packages and the machine are an ultrametric. So matching from the bottom up is optimal: near cores first, and the
surplus goes one level up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from hpcgpu.errors import BindingError, ConfigError
from hpcgpu.model import Binding, CpuSet, Gpu, NumaNode, Settings, Topology
from hpcgpu.plan.binding.network import plan_nics
from hpcgpu.units import counted

_DEFAULTS = Settings()


def plan_bindings(
    topology: Topology,
    gpus: Sequence[Gpu],
    allowed: CpuSet,
    settings: Settings = _DEFAULTS,
    allowed_nodes: CpuSet | None = None,
    masks: Sequence[CpuSet] = (),
    cpu_workers: int = 0,
) -> tuple[Binding, ...]:
    """Plan the bindings of one node's workers, in the order of ``gpus``; BindingError or ConfigError if impossible."""
    # The plan does not depend on the order. allowed are the job's PUs by its cgroup and its launcher's mask;
    # allowed_nodes its NUMA nodes, None: all. masks, one for each worker, bound its cores (respect_launcher). Workers
    # of one GPU are adjacent; the cpu_workers, without a GPU, are last, each with nthreads cores or an even share if
    # that is less. Cores are whole, within allowed, and disjoint; with fewer cores than workers each worker has all of
    # them (shared_cores).
    names = [(g.pci, g.uuid) for g in gpus]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise BindingError(f"the GPU at {twice[0]} ({twice[1] or 'UUID unknown'}) is given twice; give each GPU once")
    if not usable_cores(topology, allowed):
        raise BindingError(f"no CPU core is available to this process (allowed PUs: {str(allowed) or 'none'})")
    each = settings.workers_per_gpu
    order = sorted(range(len(gpus)), key=lambda i: (gpus[i].pci, gpus[i].uuid))
    workers = [*(gpus[i] for i in order for _ in range(each)), *[None] * cpu_workers]
    positions = [*(i * each + k for i in order for k in range(each)), *range(len(gpus) * each, len(workers))]
    inside = [masks[p] & allowed if masks else allowed for p in positions]
    planned = dict(zip(positions, _plan(topology, workers, inside, settings, allowed_nodes), strict=True))
    return tuple(planned[p] for p in sorted(planned))


def _plan(
    topology: Topology, workers: list[Gpu | None], masks: list[CpuSet], settings: Settings, allowed_nodes: CpuSet | None
) -> list[Binding]:
    """Plan the bindings of the workers, which are in PCI order, those without a GPU last."""
    gpus = [g for g in workers if g]
    cores = _cores(topology, workers, masks, settings)
    cpusets, homes, divide_all = [c for c, _, _ in cores], [g.numa_node for g in gpus], settings.cores == "all"
    memory = plan_memory_nodes(topology, homes, cpusets, allowed_nodes, settings.memory_policy, divide_all=divide_all)
    # Each kind is balanced on its own: workers without a GPU do not change the ports of the others.
    kinds = (gpus, [gpu_at(topology, cpuset) for cpuset in cpusets[len(gpus) :]])
    ports = [port for kind in kinds for port in plan_nics(topology, kind, settings.nics, settings.interface or "")]
    out = []
    for gpu, (cpuset, shared, notes), (policy, nodes), port in zip(workers, cores, memory, ports, strict=True):
        binding = Binding(
            cpuset=cpuset,
            gpus=_visible(gpu, gpus),
            nics=port.nics,
            memory_policy=policy,
            memory_nodes=nodes,
            interface=port.interface,
            shared_cores=shared,
        )
        out.append(replace(binding, reasons=(*notes, *_core_reasons(topology, gpu, binding), *port.reasons)))
    return out


def _visible(gpu: Gpu | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs that the worker sees: all whole GPUs, its own first."""
    if gpu is None or gpu.mig:  # a slice is alone: CUDA uses one slice per process, and slices have no IPC
        return (gpu,) if gpu else ()
    whole = list(dict.fromkeys(g for g in gpus if not g.mig))
    first = whole.index(gpu)
    return tuple(whole[first:] + whole[:first])


def gpu_at(topology: Topology, cpuset: CpuSet) -> Gpu:
    """Return an imaginary GPU near these PUs: a worker without a GPU gets the ports of such a GPU."""
    nearest = max(topology.numa_nodes, key=lambda n: len(n.cpuset & cpuset), default=None)
    return Gpu("", vendor="", numa_node=nearest.os_index if nearest and nearest.cpuset & cpuset else None)


def _cores(
    topology: Topology, workers: list[Gpu | None], masks: list[CpuSet], settings: Settings
) -> list[tuple[CpuSet, bool, tuple[str, ...]]]:
    """Return each worker's PUs, whether it shares them, and notes. Each mask is planned on its own."""
    out: list[tuple[CpuSet, bool, tuple[str, ...]]] = [(CpuSet(), False, ())] * len(workers)
    for mask in dict.fromkeys(masks):
        mine = [i for i, m in enumerate(masks) if m == mask]
        cores = usable_cores(topology, mask)
        if not cores:
            raise BindingError(f"none of the PUs {mask} of a rank's mask may be used by this job")
        homes = [gpu.numa_node for i in mine if (gpu := workers[i])]
        rules = (settings.cores, settings.reserved_cores, len(mine) - len(homes), settings.nthreads)
        division = split_cores(topology, cores, homes, *rules)
        notes = (division.note,) if division.note else ()
        shared = len(cores) < len(mine) or any(m & mask for m in set(masks) - {mask})
        if len(cores) < len(mine):
            notes = (*notes, f"{counted(len(cores), 'core')} for {len(mine)} workers: all workers share all cores")
        for i, share in zip(mine, division.shares, strict=True):
            out[i] = (CpuSet(pu for core in share for pu in core), shared, notes)
    return out


def _core_reasons(topology: Topology, gpu: Gpu | None, binding: Binding) -> tuple[str, ...]:
    """Return a reason if the cores are not local to the GPU."""
    if gpu is None:
        return ()
    mine = gpu.numa_nodes or CpuSet(() if gpu.numa_node is None else (gpu.numa_node,))
    homes = [n.cpuset for n in topology.numa_nodes if n.os_index in mine]
    if not homes:
        return ("the NUMA node of this GPU is unknown: cores are an even share, memory is not bound",)
    if binding.shared_cores or not (far := CpuSet(binding.cpuset.difference(*homes))):
        return ()
    if far == binding.cpuset:
        return (f"no core of its own NUMA node {mine} is left: PUs {far} are on other nodes",)
    return ("the GPU's NUMA node has fewer cores than its share: the rest are on other nodes",)


def simulated_gpus(topology: Topology, count: int, memory_bytes: int, node_name: str) -> tuple[Gpu, ...]:
    """Return simulated GPUs with stable UUIDs and addresses, spread over the NUMA nodes; ConfigError if impossible."""
    # No real device has the PCI domain ffff; a domain holds 8192.
    if not 1 <= count <= 8192 or memory_bytes <= 0:
        raise ConfigError(
            f"{count} simulated GPUs of {memory_bytes} bytes; allowed: 1 to 8192 GPUs with memory (simulate='4x256MiB')"
        )
    nodes = [n.os_index for n in sorted(topology.numa_nodes, key=lambda n: n.os_index)]
    return tuple(
        Gpu(
            pci=f"ffff:{i // 32:02x}:{i % 32:02x}.0",
            uuid=f"GPU-SIM-{node_name}-{i}",
            model="simulated",
            vendor="simulated",
            numa_node=nodes[i * len(nodes) // count] if nodes else None,
            memory_bytes=memory_bytes,
        )
        for i in range(count)
    )


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


@dataclass(slots=True, eq=False)
class _Share:
    """One worker's share of the cores."""

    home: _Locality
    size: int = 0  # the number of its cores
    cores: list[int] = field(default_factory=list)  # so far, as positions in the list of cores


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
    """Divide ``cores``, sorted by lowest PU, among workers; ConfigError if there are fewer than the rule asks for."""
    # homes are the NUMA nodes of the workers' GPUs, None: unknown. With fewer cores than workers, each worker has all
    # cores. The rule "all" divides all cores, the numbers differ by one at most; "local" divides only the cores of each
    # home among its workers; a number is that of each worker. reserved cores stay free, under "all" an equal part of
    # each worker's, the farthest first. The others, workers without a GPU, are last: each has a core for each of its
    # threads, or an even share if that is less, far from the workers with GPUs, on NUMA nodes without a GPU first.
    everyone, room = len(homes) + others, len(cores) - reserved
    if isinstance(rule, int):
        request = f"cores={rule} for each of {len(homes)} workers"
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
    kept = f" and reserved_cores={reserved}" if reserved else ""
    raise ConfigError(
        f"{request}{kept} are more than the {counted(available, 'core')} that this job may use on the node; ask the "
        "batch system for more, or leave cores and reserved_cores out for equal shares"
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
    note = "cores='local' is impossible here: some workers would get no core; cores are divided evenly instead"
    return reserved, note if rule == "local" else ""


def _give_up(shares: Sequence[_Share], localities: Sequence[_Locality]) -> int:
    """Take the farthest core from one of the largest shares; return it."""
    # Among equals take it from the NUMA node with the fewest cores of that share.

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
    """Divide each NUMA node among its workers. Workers without a core at home divide the nodes without workers."""
    # Return False if a worker would have no core.
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
    """Give all shares the same size within one; the shares with the nearest free cores get one more."""
    # One more core costs a step for each level (NUMA node, package) whose cores are all used. Such costs are convex on
    # a tree, so a greedy choice is optimal.
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


def plan_memory_nodes(
    topology: Topology,
    homes: Sequence[int | None],
    cpusets: Sequence[CpuSet] = (),
    allowed: CpuSet | None = None,
    policy: str = "preferred-many",
    *,
    divide_all: bool = True,
) -> tuple[tuple[str, CpuSet], ...]:
    """Plan each worker's memory policy and NUMA nodes; mostly ``none`` for one node or a GPU of unknown locality."""
    # homes are the NUMA nodes of the workers' GPUs (None: unknown), cpusets the workers' PUs; those after homes are of
    # workers without a GPU, which have the nodes of their cores. allowed are the NUMA nodes of the process (None: all).
    # The NUMA nodes of a package are divided among its workers: each has its home; a node
    # without a GPU goes to the workers with cores there, else (not without divide_all) to the worker with the least
    # memory so far. On machines with several NUMA nodes per package, half of the memory is on nodes without a GPU (all
    # 6 recorded types), and a worker that spills needs its share. preferred-many is a preference: if these nodes are
    # full, the kernel uses others.
    nodes = _usable_nodes(topology, allowed)
    everywhere = CpuSet(n.os_index for n in nodes)
    # Where a GPU's or other memory is a NUMA node too, only a strict policy keeps pages off it (Grace Hopper).
    if policy == "bind" and len(nodes) == 1 and topology.other_memory:
        return (("bind", everywhere),) * len(cpusets or homes)
    if policy == "none" or len(nodes) <= 1:
        return (("none", everywhere if policy != "none" else CpuSet()),) * len(cpusets or homes)
    if policy == "interleave":
        return ((policy, everywhere),) * len(cpusets or homes)
    near, others = cpusets[: len(homes)], cpusets[len(homes) :]
    divided = [n for n in nodes if divide_all or n.os_index in homes or any(n.cpuset & c for c in near)]
    shares = _shares(topology, divided, homes, near or [CpuSet()] * len(homes))
    shares += [CpuSet(n.os_index for n in nodes if n.cpuset & c) for c in others]
    return tuple((policy, share) if share else ("none", CpuSet()) for share in shares)


def _shares(
    topology: Topology, nodes: Sequence[NumaNode], homes: Sequence[int | None], cpusets: Sequence[CpuSet]
) -> list[CpuSet]:
    """Return which of these NUMA nodes each worker has; they are of its own package."""
    packages = {n.os_index: n.package for n in topology.numa_nodes}
    shares = [{n.os_index for n in nodes if n.os_index == h} for h in homes]
    room = [sum(n.memory_bytes / homes.count(h) for n in nodes if n.os_index == h) for h in homes]
    for node in nodes:
        mine = [i for i, h in enumerate(homes) if h in packages and packages[h] == node.package]
        if node.os_index in homes or not mine:
            continue
        users = [i for i in mine if cpusets[i] & node.cpuset]
        if not users:
            users = [min((room[i], abs((homes[i] or 0) - node.os_index), i) for i in mine)[-1]]
        for i in users:
            shares[i].add(node.os_index)
            room[i] += (node.memory_bytes or 1) / len(users)
    # Some homes are not in the cgroup, or have no memory: then the package's other nodes are the nearest.
    near = [[n.os_index for n in nodes if h in packages and packages[h] == n.package] for h in homes]
    return [CpuSet(share or others) for share, others in zip(shares, near, strict=True)]


def _usable_nodes(topology: Topology, allowed: CpuSet | None) -> list[NumaNode]:
    """Return the allowed NUMA nodes that have memory, by number."""
    has_sizes = any(n.memory_bytes for n in topology.numa_nodes)
    nodes = [n for n in topology.numa_nodes if n.memory_bytes or not has_sizes]
    return sorted((n for n in nodes if allowed is None or n.os_index in allowed), key=lambda n: n.os_index)

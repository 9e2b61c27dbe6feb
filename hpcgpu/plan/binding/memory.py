"""The memory of one worker: the NUMA nodes of its pages, its limit of host memory, its part of RMM and cuDF."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.errors import ConfigError
from hpcgpu.model import Allocation, CpuSet, HostMemory, NumaNode, RunDocument, Settings, Topology
from hpcgpu.model.allocation import ALL_OF_THE_NODE
from hpcgpu.model.settings import GPU_MEMORY, NODE_MEMORY, RMM, Limit
from hpcgpu.model.topology import Rapids
from hpcgpu.units import format_bytes


def plan_memory_nodes(
    topology: Topology,
    homes: Sequence[int | None],
    cpusets: Sequence[CpuSet] = (),
    allowed: CpuSet | None = None,
    policy: str = "preferred-many",
    *,
    divide_all: bool = True,
) -> tuple[tuple[str, CpuSet], ...]:
    """Plan each worker's memory policy and NUMA nodes; policy ``none`` for one node or a GPU of unknown locality."""
    # homes are the NUMA nodes of the workers' GPUs (None: unknown), cpusets the workers' PUs, allowed the NUMA nodes of
    # the process (None: all). The NUMA nodes of a package are divided among its workers: each has its home; a node
    # without a GPU goes to the workers with cores there, else (not without divide_all) to the worker with the least
    # memory so far. On machines with several NUMA nodes per package, half of the memory is on nodes without a GPU (all
    # 6 recorded types), and a worker that spills needs its share. preferred-many is a preference: if these nodes are
    # full, the kernel uses others.
    nodes = _usable_nodes(topology, allowed)
    everywhere = CpuSet(n.os_index for n in nodes)
    if policy == "none" or len(nodes) <= 1:
        return tuple(("none", everywhere if policy != "none" else CpuSet()) for _ in homes)
    if policy == "interleave":
        return tuple((policy, everywhere) for _ in homes)
    if not divide_all:
        nodes = [n for n in nodes if n.os_index in homes or any(n.cpuset & c for c in cpusets)]
    shares = _shares(topology, nodes, homes, cpusets or [CpuSet()] * len(homes))
    return tuple((policy, share) if share else ("none", CpuSet()) for share in shares)


def _shares(
    topology: Topology, nodes: Sequence[NumaNode], homes: Sequence[int | None], cpusets: Sequence[CpuSet]
) -> list[CpuSet]:
    """Return which of these NUMA nodes each worker has; they are of its own package."""
    packages = {n.os_index: n.package for n in topology.numa_nodes}
    shares: list[CpuSet] = [CpuSet()] * len(homes)
    for package in sorted(set(packages.values())):
        mine = [i for i, h in enumerate(homes) if h in packages and packages[h] == package]
        near = [n for n in nodes if n.package == package]
        divided = _divide(near, [homes[i] for i in mine], [cpusets[i] for i in mine])
        for i, share in zip(mine, divided, strict=True):
            shares[i] = share
    return shares


def plan_memory_nodes_of_cpu_workers(
    topology: Topology, cpusets: Sequence[CpuSet], allowed: CpuSet | None = None, policy: str = "preferred-many"
) -> tuple[tuple[str, CpuSet], ...]:
    """Return memory policy and NUMA nodes of workers without a GPU: the nodes of their cores."""
    nodes = _usable_nodes(topology, allowed)
    if policy in ("none", "interleave") or len(nodes) <= 1:
        return plan_memory_nodes(topology, [None] * len(cpusets), cpusets, allowed, policy)
    shares = [CpuSet(n.os_index for n in nodes if n.cpuset & cpuset) for cpuset in cpusets]
    return tuple((policy, share) if share else ("none", CpuSet()) for share in shares)


def _usable_nodes(topology: Topology, allowed: CpuSet | None) -> list[NumaNode]:
    """Return the allowed NUMA nodes that have memory, by number."""
    has_sizes = any(n.memory_bytes for n in topology.numa_nodes)
    nodes = [n for n in topology.numa_nodes if n.memory_bytes or not has_sizes]
    return sorted((n for n in nodes if allowed is None or n.os_index in allowed), key=lambda n: n.os_index)


def _divide(nodes: Sequence[NumaNode], homes: Sequence[int | None], cpusets: Sequence[CpuSet]) -> list[CpuSet]:
    """Divide the NUMA nodes of one package among the workers that are at home on it."""
    shares: list[set[int]] = [{n.os_index for n in nodes if n.os_index == h} for h in homes]
    room = [sum(n.memory_bytes / homes.count(h) for n in nodes if n.os_index == h) for h in homes]
    for node in nodes if homes else ():
        if node.os_index in homes:
            continue
        users = [i for i, c in enumerate(cpusets) if c & node.cpuset]
        if not users:
            users = [min((room[i], abs((h or 0) - node.os_index), i) for i, h in enumerate(homes))[-1]]
        for i in users:
            shares[i].add(node.os_index)
            room[i] += (node.memory_bytes or 1) / len(users)
    # Some homes are not in the cgroup, or have no memory: then the package's other nodes are the nearest.
    return [CpuSet(s) if s else CpuSet(n.os_index for n in nodes) for s in shares]


def strict_room_bytes(topology: Topology, shares: Sequence[CpuSet]) -> tuple[int, ...]:
    """Return the bytes that each worker's NUMA nodes have for it; a node of several workers is divided."""
    users = {n.os_index: sum(n.os_index in s for s in shares) for n in topology.numa_nodes}
    return tuple(
        sum(n.memory_bytes // users[n.os_index] for n in topology.numa_nodes if n.os_index in s) for s in shares
    )


def plan_host_memory(granted: HostMemory, allocation: Allocation, run: RunDocument | None = None) -> HostMemory:
    """Return the host memory that the job may use on its node: what the kernel grants, or less if the job has less."""
    # On many sites no cgroup limits a job to the memory that it has requested, and more would harm the other jobs of
    # its node. The batch system's answer comes before the run's memory, which counts in a job that was submitted for
    # the run, and in each job of PBS, which may not report it: a user's own allocation may have been made with another
    # number.
    requested, settings = allocation.memory, run.settings if run else None
    ours = run is not None and (run.shape != "in-allocation" or allocation.batch == "pbs")
    if requested is None and ours and allocation.batch != "local" and settings and settings.memory_bytes:
        source = f"memory={format_bytes(settings.memory_bytes)} (set by {settings.where('memory')})"
        requested = HostMemory(settings.memory_bytes, source)
    return requested if requested and requested.nbytes < granted.nbytes else granted


def asks_granted_memory(allocation: Allocation, settings: Settings, shape: str) -> bool:
    """Return whether to ask the batch system for the granted memory: PBS has no variable for it."""
    # A job that was submitted with memory needs no question. Jobs of arrays do not ask: the number of questions must
    # not grow with the number of jobs.
    knows = shape == "gang" and settings.memory_bytes
    return allocation.batch == "pbs" and shape != "member" and not knows


def share_of(memory: HostMemory, workers: int, together: int) -> HostMemory:
    """Return the memory of one leader's workers, if several leaders share the node."""
    if workers >= together:
        return memory
    return HostMemory(memory.nbytes * workers // together, f"{workers} of {together} parts of {memory.source}")


def memory_reason(limit_bytes: int | None, memory: HostMemory, *, others: bool) -> str:
    """Explain a worker's memory limit, None: unknown; "" if the job has the node without ``others``' jobs."""
    if limit_bytes is None:
        return f"no memory limit: {memory.source}"
    share = f"memory limit {format_bytes(limit_bytes)}: its share of {format_bytes(memory.nbytes)}, {memory.source}"
    if memory.source != ALL_OF_THE_NODE:
        return share if memory.source else ""
    return f"{share}, which other jobs may also use: nothing limits this job (ask for memory=)" if others else ""


def plan_memory_limit_bytes(limit: Limit, memory: HostMemory, workers: int, simulated_bytes: int = 0) -> int | None:
    """Return each worker's host memory limit, None for no limit; ConfigError if the limits of all do not fit."""
    # limit is a part of the node's memory, or bytes. simulated_bytes is the memory of the node's simulated GPUs: host
    # memory that the workers cannot use.
    room, why = memory.nbytes - simulated_bytes, f" ({memory.source})" if memory.source else ""
    if not limit:
        return None
    setting = f"memory_limit={limit!r}"
    if not memory.has_size:
        return limit.bytes_of(0, setting, NODE_MEMORY) or None
    if room <= 0:
        raise ConfigError(
            f"the simulated GPUs of this node have {format_bytes(simulated_bytes)} together, but this job may use "
            f"{format_bytes(memory.nbytes)} of host memory in all{why}: simulate fewer or smaller GPUs "
            "(simulate='2x256MiB'), or ask for more memory"
        )
    nbytes = limit.bytes_of(room, setting, NODE_MEMORY, workers)
    if nbytes * workers > room:
        raise ConfigError(
            f"{setting} for each of {workers} workers is {format_bytes(nbytes * workers)}, but this job "
            f"may use {format_bytes(room)} on this node{why}: leave memory_limit out for equal shares, or ask for more"
        )
    return nbytes


_ALIGNED_BYTES = 256  # of the sizes that RMM's pools take


def plan_rapids(settings: Settings, worker: str, device_memory_bytes: int) -> Rapids | None:
    """Plan a worker's RMM and cuDF, by its name and share of its GPU (0: unknown); ConfigError for a wrong size."""
    cite = settings.cite
    sizes = ("rmm_pool_size", "rmm_maximum_pool_size", "rmm_release_threshold")
    limits: list[Limit] = [getattr(settings, name) for name in sizes]
    nbytes = [limit.bytes_of(device_memory_bytes, cite(n), GPU_MEMORY) for n, limit in zip(sizes, limits, strict=True)]
    pool, most, threshold = (n // _ALIGNED_BYTES * _ALIGNED_BYTES if n else None for n in nbytes)
    if pool and not settings.rmm_managed_memory and 0 < device_memory_bytes < pool:
        raise ConfigError(f"{cite(sizes[0])}, but the worker's GPU has {format_bytes(device_memory_bytes)} for it")
    if pool and most and most < pool:
        raise ConfigError(f"{cite(sizes[1])} is less than {cite(sizes[0])}: {format_bytes(pool)} of the worker's GPU")
    layers: list[tuple[str, dict[str, int | str | None]]] = []
    if settings.rmm_async:
        layers.append(("CudaAsyncMemoryResource", {"initial_pool_size": pool, "release_threshold": threshold}))
        layers += [("LimitingResourceAdaptor", {"allocation_limit": most})] if most else []
    else:
        layers.append(("ManagedMemoryResource" if settings.rmm_managed_memory else "CudaMemoryResource", {}))
        layers += [("PoolMemoryResource", {"initial_pool_size": pool, "maximum_pool_size": most})] if pool else []
    if settings.rmm_log_directory:
        path = f"{settings.rmm_log_directory.rstrip('/')}/rmm_log_{worker}.txt"  # dask-cuda's name for it
        layers.append(("LoggingResourceAdaptor", {"log_file_name": path}))
    if settings.rmm_track_allocations:
        layers.append(("TrackingResourceAdaptor", {}))
    rmm_settings = [cite(name) for name in RMM if getattr(settings, name)]
    needs = [("rmm", rmm_settings[0])] if rmm_settings else []
    needs += [(name, cite("rmm_allocator_external_lib_list")) for name in settings.rmm_libraries]
    needs += [("cudf", cite("enable_cudf_spill"))] if settings.enable_cudf_spill else []
    layers_given = [(name, tuple((k, v) for k, v in arguments.items() if v is not None)) for name, arguments in layers]
    resources = () if layers_given == [("CudaMemoryResource", ())] else tuple(layers_given)  # RMM's own choice
    return Rapids(resources, settings.rmm_libraries, tuple(needs)) if needs else None

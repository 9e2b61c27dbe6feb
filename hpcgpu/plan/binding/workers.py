"""The workers of one node: the bindings, memory limits, parts of RMM and cuDF, and variables with which they start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcgpu.errors import ConfigError, LaunchError, ParseError, opt, plain
from hpcgpu.model import Binding, CpuSet, Gpu, RunDocument, Settings, Topology, WorkerSpec
from hpcgpu.model.allocation import ALL_OF_THE_NODE, NOT_TOLD, Allocation, HostMemory, NodeLayout
from hpcgpu.model.settings import GPU_MEMORY, NO_LIMIT, NODE_MEMORY, RMM, SHARE, Limit
from hpcgpu.model.worker import Rapids
from hpcgpu.model.worker_names import member_worker_name
from hpcgpu.plan.binding.bindings import cuda_env, plan_bindings
from hpcgpu.plan.binding.network import USER_VARIABLES, nccl_env, ucx_env
from hpcgpu.units import format_bytes

# Only users set these variables, no launcher and no batch system.
_JAX = ("JAX_CUDA_VISIBLE_DEVICES", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION")
_USERS = ("CUPY_GPU_MEMORY_LIMIT", *_JAX, "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", *USER_VARIABLES)
UCX_WITH_IB = (
    "Load a module of the site's UCX and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true, or take UCX and ucxx from conda"
)
_ALIGNED_BYTES = 256  # of the sizes that RMM's pools take


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """A node's facts, as its leader collects them."""

    name: str
    topology: Topology
    gpus: tuple[Gpu, ...]  # granted or simulated; a MIG slice counts as one
    allowed: CpuSet  # PUs that the job may use
    allowed_nodes: CpuSet  # NUMA nodes that the job may use
    memory: HostMemory  # of these workers together
    environ: Mapping[str, str]  # of the rank
    scratch: str = ""  # the run's folder on the node, for the workers' files
    masks: Mapping[int, CpuSet] = field(default_factory=dict)  # of each rank at its start; empty: not respected
    interfaces: frozenset[str] | None = None  # IP interfaces with an address; None: unknown
    job_id: str = ""  # of a member job, which names its workers; else the node names them
    restart_count: int = 0  # of that job
    in_job: bool = False  # in a job of a batch system: other jobs may run on the node
    ucx_without_ib: str = ""  # the folder of the workers' UCX, if it cannot use the node's InfiniBand and RoCE


def plan_workers(
    settings: Settings, node: NodeFacts, shares: NodeLayout, before: Sequence[NodeLayout] = ()
) -> tuple[tuple[int, WorkerSpec], ...]:
    """Plan the node's workers, each with its rank by ``shares``.

    Workers of one GPU are adjacent, those without a GPU are last. ``before`` are the layouts of the host's earlier
    leaders: the numbers in the workers' names continue after theirs. Raises LaunchError if the node has fewer GPUs than
    the layout; ConfigError or BindingError for memory limits or cores that the node does not have.
    """
    count = shares.worker_count
    needed = (count - shares.cpu_workers) // settings.workers_per_gpu
    if len(node.gpus) < needed:
        raise LaunchError(f"{node.name} should have {needed} GPUs, but only {len(node.gpus)} can be opened there")
    gpus = node.gpus[:needed]
    if settings.workers_per_gpu > 1 and (alone := next((g for g in gpus if g.compute_mode), None)):
        raise ConfigError(
            f"{settings.opt('workers_per_gpu')}, but the GPU at {alone.pci} on {node.name} is in compute mode "
            f"{alone.compute_mode}: leave it at 1, or start NVIDIA's MPS in the job (nvidia-cuda-mps-control -d)"
        )
    owners = {i: rank for rank, mine in zip(shares.ranks, shares.workers, strict=True) for i in mine}
    masks = [node.masks[owners[i]] for i in range(count)] if node.masks else ()
    bindings = plan_bindings(
        node.topology, gpus, node.allowed, settings.binding_rules, node.allowed_nodes or None, masks, shares.cpu_workers
    )
    bindings = tuple(_driven(_reachable(b, settings, node), settings, node) for b in bindings)
    limits = _memory_limits(settings, node, gpus, bindings)
    bindings = tuple(_explained(settings, node, b, limit) for b, limit in zip(bindings, limits, strict=True))
    common = nccl_env([b for b in bindings if b.gpus])
    names = _names(node, shares, before)
    specs = [
        _spec(settings, node, b, limit, common if b.gpus else (), name)
        for b, limit, name in zip(bindings, limits, names, strict=True)
    ]
    return tuple((rank, specs[i]) for i, rank in owners.items())


def _names(node: NodeFacts, shares: NodeLayout, before: Sequence[NodeLayout]) -> list[str]:
    count, first = shares.worker_count, sum(n.worker_count for n in before)
    first_cpu = sum(n.cpu_workers for n in before)
    if node.job_id:
        return [member_worker_name(node.job_id, node.restart_count, first + i) for i in range(count)]
    named = [f"{node.name}-{first - first_cpu + i}" for i in range(count - shares.cpu_workers)]
    return [*named, *(f"{node.name}-cpu{first_cpu + i}" for i in range(shares.cpu_workers))]


def node_warnings(
    settings: Settings, masks: Mapping[int, CpuSet], specs: Sequence[WorkerSpec], ucx_without_ib: str = ""
) -> tuple[str, ...]:
    """Return the warnings about one node's plan.

    srun --cpu-bind=cores and Open MPI's default bind each rank to cores of its own. This is not meant for workers: the
    cores of all ranks of the node are divided among them.
    """
    out = []
    together = CpuSet().union(*masks.values())
    if len(set(masks.values())) > 1 and not settings.respect_launcher:
        out.append(
            "the launcher bound each rank to cores of its own; the workers share out all these cores, PUs "
            f"{CpuSet(together)} (--respect-launcher keeps each worker on its rank's cores)"
        )
    if len(specs) > 1 and (shared := [s for s in specs if s.binding.shared_cores]):
        out.append(
            f"{len(shared)} workers share cores {CpuSet(together)}; in a job, ask for more, and let no launcher bind "
            "the ranks (srun --cpu-bind=none, mpirun --bind-to none)"
        )
    if settings.protocol == "ucx" and any(n.kind == "slingshot" for s in specs for n in s.binding.nics):
        ucx = plain(opt("protocol", "ucx"))
        out.append(f"{ucx} on Slingshot, for which UCX has no transport: UCX falls back to tcp; use 'tls'")
    if settings.protocol == "ucx" and ucx_without_ib:
        out.append(f"{without_infiniband(ucx_without_ib)}. {UCX_WITH_IB}; or use {plain(opt('protocol', 'tls'))}")
    return (*out, *device_limits_lowered(settings, specs))


def device_limits_lowered(settings: Settings, specs: Sequence[WorkerSpec]) -> tuple[str, ...]:
    """Return a warning if GPUs have less memory than ``device_memory_limit`` asks to fill."""
    limit = settings.device_memory_limit
    sizes = {s.device_memory_bytes for s in specs if s.gpu is not None and s.device_memory_bytes}
    if not sizes or min(sizes) >= limit.nbytes:
        return ()
    return (
        f"{settings.cite('device_memory_limit')} is lowered to {format_bytes(min(sizes))}, all that a worker has of "
        "its GPU: spilling begins when this memory is full; a fraction (0.8) leaves room for allocations of tasks",
    )


def _reachable(binding: Binding, settings: Settings, node: NodeFacts) -> Binding:
    """Drop an interface without an address, on which Dask could not listen; ConfigError if the user set it."""
    if node.interfaces is None or not binding.interface or binding.interface in node.interfaces:
        return binding
    if settings.interface:
        raise ConfigError(
            f"{settings.cite('interface')}: {node.name} has no such interface with an IP address; it has: "
            f"{', '.join(sorted(node.interfaces))}"
        )
    why = f"{binding.interface} has no IP address: Dask's own traffic uses the route to the scheduler"
    return binding._replace(interface="", reasons=(*binding.reasons, why))


def without_infiniband(folder: str) -> str:
    """Say that a UCX cannot use the node's ports, and what follows."""
    return f"the UCX in {folder} drives no InfiniBand (no libuct_ib): UCX_NET_DEVICES is not set, and UCX goes by tcp"


def _driven(binding: Binding, settings: Settings, node: NodeFacts) -> Binding:
    """Add why the worker's UCX does not get its ports: with a port that it does not drive it would not start."""
    if not node.ucx_without_ib or not ucx_env(binding) or "UCX_NET_DEVICES" in {**node.environ, **settings.env}:
        return binding
    return binding._replace(reasons=(*binding.reasons, without_infiniband(node.ucx_without_ib)))


def _memory_limits(
    settings: Settings, node: NodeFacts, gpus: Sequence[Gpu], bindings: Sequence[Binding]
) -> list[int | None]:
    """Return the host memory limit of each worker; under ``bind`` at most its share of its NUMA nodes' memory."""
    simulated_bytes = sum(g.memory_bytes for g in gpus if g.vendor == "simulated")
    limit = plan_memory_limit_bytes(settings.memory_limit, node.memory, max(len(bindings), 1), simulated_bytes)
    users = Counter(number for b in bindings for number in b.memory_nodes)
    out: list[int | None] = []
    for binding in bindings:
        mine = [n for n in node.topology.numa_nodes if n.os_index in binding.memory_nodes]
        room = sum(n.memory_bytes // users[n.os_index] for n in mine)
        if limit is None or binding.memory_policy != "bind" or not room or limit <= room:
            out.append(limit)
        elif settings.memory_limit == SHARE:
            out.append(room)
        else:
            raise ConfigError(
                f"{settings.opt('memory_limit')} is {format_bytes(limit)} for each worker, but "
                f"{opt('memory_policy', 'bind')} binds a worker to NUMA nodes {binding.memory_nodes}, which have "
                f"{format_bytes(room)} for it: leave {opt('memory_limit', None)} or {opt('memory_policy', None)} out"
            )
    return out


def _explained(settings: Settings, node: NodeFacts, binding: Binding, limit: int | None) -> Binding:
    """Add the reason of the worker's memory limit, unless nothing but the node limits it."""
    memory = node.memory
    if settings.memory_limit != SHARE or (limit is None and memory.has_size):
        return binding
    why = f"memory limit {format_bytes(limit or 0)}: its share of {format_bytes(memory.nbytes)}, {memory.source}"
    if limit is None:
        why = f"no memory limit: {memory.source}"
    elif memory.source == ALL_OF_THE_NODE:
        others = node.in_job and node.allowed < CpuSet(pu for core in node.topology.cores for pu in core)
        ask = f"nothing limits this job (ask for {plain(opt('memory'))})"
        why = f"{why}, which other jobs may also use: {ask}" if others else ""
    return binding._replace(reasons=(*binding.reasons, why)) if why and memory.source else binding


def _spec(
    settings: Settings,
    node: NodeFacts,
    binding: Binding,
    limit: int | None,
    common: Sequence[tuple[str, str]],
    name: str,
) -> WorkerSpec:
    gpu, device_limit = binding.gpus[0] if binding.gpus else None, settings.device_memory_limit
    simulated, each = gpu is not None and gpu.vendor == "simulated", settings.workers_per_gpu
    size = gpu.memory_bytes // each if gpu else 0
    ports = () if node.ucx_without_ib else ucx_env(binding)
    planned = dict([*cuda_env(binding.gpus), *ports, *(common if binding.nics else ())])
    if gpu and settings.enable_cudf_spill:  # cuDF reads them at its import (options.py, 26.10)
        planned |= {"CUDF_SPILL": "on", "CUDF_SPILL_STATS": str(settings.cudf_spill_stats)}
    if gpu and not simulated:
        planned |= _library_env(each)
    if binding.interface:  # torch's gloo takes a name; NCCL takes ib1 as a prefix, which ib10 has, too
        planned |= {"NCCL_SOCKET_IFNAME": f"={binding.interface}", "GLOO_SOCKET_IFNAME": binding.interface}
    # Resources that distinguish GPU workers from CPU workers, unless the user names some.
    resources = settings.resources or ({"GPU" if gpu else "CPU": 1.0} if settings.cpu_workers else {})
    kept = {name for name in planned if name in settings.env or (name in _USERS and name in node.environ)}
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" in {**node.environ, **settings.env}:  # JAX refuses both (jaxlib 0.10.2)
        planned.pop("XLA_CLIENT_MEM_FRACTION", None)
    if "UCX_NET_DEVICES" in kept:
        planned.pop("UCX_MAX_RNDV_RAILS", None)
    env = {k: v for k, v in planned.items() if k not in kept} | dict(settings.env)
    return WorkerSpec(
        name=name,
        binding=binding,
        nthreads=settings.nthreads,
        memory_limit_bytes=limit,
        device_memory_limit_bytes=device_limit.of_device(size, settings.where("device_memory_limit")) if gpu else 0,
        device_memory_bytes=size,
        simulated=simulated,
        jit_unspill=settings.jit_unspill,
        node_copies=settings.node_copies,
        rapids=plan_rapids(settings, name, size) if gpu and not settings.gpus else None,
        local_directory=node.scratch,
        env=tuple(sorted(env.items())),
        kept_env=tuple(sorted(kept)),
        resources=tuple(resources.items()),
        gpu_memory_nodes=node.topology.gpu_memory_nodes,
    )


def _library_env(each: int) -> dict[str, str]:
    """Return the variables by which libraries stay on a worker's own GPU and leave memory there to others."""
    # JAX would open all GPUs that the worker sees, and take 75 % of each at once (jaxlib 0.10.2, xla_client.py)
    out = {"JAX_CUDA_VISIBLE_DEVICES": "0", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if each > 1:  # their pools give nothing back to another process
        out |= {"CUPY_GPU_MEMORY_LIMIT": f"{97 // each}%", "XLA_CLIENT_MEM_FRACTION": f"0.{97 // each:02}"}
    return out


def facts_from(topology: Topology, where: str) -> NodeFacts:
    """Return a node's facts from its topology alone: all granted PUs may be used; ParseError if none was granted."""
    everything = CpuSet(pu for core in topology.cores for pu in core)
    size = sum(n.memory_bytes for n in topology.numa_nodes)
    allowed = everything if topology.allowed is None else everything & topology.allowed
    if not allowed:
        raise ParseError(f"{where}: none of its PUs {everything} was granted (allowed_cpuset: {topology.allowed})")
    return NodeFacts(
        name="",
        topology=topology,
        gpus=(),
        allowed=allowed,
        allowed_nodes=topology.allowed_nodes or CpuSet(),
        memory=HostMemory(size, ALL_OF_THE_NODE if size else NOT_TOLD),
        environ={},
    )


def plan_whole_node(settings: Settings, facts: NodeFacts, gpus: tuple[Gpu, ...]) -> tuple[WorkerSpec, ...]:
    """Plan the workers on these GPUs of a node, and those without a GPU, as if one rank had all of them."""
    count = len(gpus) * settings.workers_per_gpu + settings.cpu_workers
    everyone = NodeLayout(0, (0,), (tuple(range(count)),), settings.cpu_workers)
    unlimited = replace(settings, device_memory_limit=NO_LIMIT)
    return tuple(spec for _, spec in plan_workers(unlimited, replace(facts, name="worker", gpus=gpus), everyone))


def plan_host_memory(granted: HostMemory, allocation: Allocation, run: RunDocument | None = None) -> HostMemory:
    """Return the host memory that the job may use on its node: what the kernel grants, or less if the job has less.

    On many sites no cgroup limits a job to the memory that it has requested, and more would harm the other jobs of its
    node. The batch system's answer comes before the run's memory, which counts in a job that was submitted for the run,
    and in each job of PBS, which may not report it: a user's own allocation may have been made with another number.
    """
    requested, settings = allocation.memory, run.settings if run else None
    ours = run is not None and (run.shape != "in-allocation" or allocation.batch == "pbs")
    if requested is None and ours and allocation.batch != "local" and settings and settings.memory_bytes:
        source = plain(opt("memory", format_bytes(settings.memory_bytes), settings.where("memory")))
        requested = HostMemory(settings.memory_bytes, source)
    return requested if requested and requested.nbytes < granted.nbytes else granted


def asks_granted(allocation: Allocation, shape: str) -> bool:
    """Return whether to ask the batch system for the granted memory and time: PBS has no variables for them.

    Jobs of arrays do not ask: the number of questions must not grow with the number of jobs. The limit of their
    processes is their memory, and the client, which asks for all at once, retires them in time.
    """
    return allocation.batch == "pbs" and shape != "member"


def share_of(memory: HostMemory, workers: int, together: int) -> HostMemory:
    """Return the memory of one leader's workers, if several leaders share the node."""
    if workers >= together:
        return memory
    return HostMemory(memory.nbytes * workers // together, f"{workers} of {together} parts of {memory.source}")


def plan_memory_limit_bytes(limit: Limit, memory: HostMemory, workers: int, simulated_bytes: int = 0) -> int | None:
    """Return each worker's host memory limit, None for no limit; ConfigError if the limits of all do not fit.

    ``limit`` is a part of the node's memory, or bytes. ``simulated_bytes`` is the memory of the node's simulated GPUs:
    host memory that the workers cannot use.
    """
    room, why = memory.nbytes - simulated_bytes, f" ({memory.source})" if memory.source else ""
    if not limit:
        return None
    if not memory.has_size:
        return limit.bytes_of(0, "memory_limit", NODE_MEMORY) or None
    if room <= 0:
        raise ConfigError(
            f"the simulated GPUs of this node have {format_bytes(simulated_bytes)} together, but this job may use "
            f"{format_bytes(memory.nbytes)} of host memory in all{why}: simulate fewer or smaller GPUs "
            f"({opt('gpus', 'sim:2x256MiB')}), or ask for more memory"
        )
    nbytes = limit.bytes_of(room, "memory_limit", NODE_MEMORY, workers)
    if nbytes * workers > room:
        setting = opt("memory_limit", limit.value)
        raise ConfigError(
            f"{setting} for each of {workers} workers is {format_bytes(nbytes * workers)}, but this job "
            f"may use {format_bytes(room)} on this node{why}: leave {opt('memory_limit', None)} out for equal shares, "
            "or ask for more"
        )
    return nbytes


def plan_rapids(settings: Settings, worker: str, device_memory_bytes: int) -> Rapids | None:
    """Plan a worker's RMM and cuDF, by its name and share of its GPU (0: unknown); ConfigError for a wrong size."""
    cite = settings.cite
    sizes = ("rmm_pool_size", "rmm_maximum_pool_size", "rmm_release_threshold")
    limits: list[Limit] = [getattr(settings, name) for name in sizes]
    nbytes = [
        limit.bytes_of(device_memory_bytes, name, GPU_MEMORY, where=settings.where(name))
        for name, limit in zip(sizes, limits, strict=True)
    ]
    pool, most, threshold = (n // _ALIGNED_BYTES * _ALIGNED_BYTES if n else None for n in nbytes)
    if pool and not settings.rmm_managed_memory and 0 < device_memory_bytes < pool:
        raise ConfigError(
            f"{settings.opt(sizes[0])}, but the worker's GPU has {format_bytes(device_memory_bytes)} for it"
        )
    if pool and most and most < pool:
        most_cited, pool_cited = settings.opt(sizes[1]), settings.opt(sizes[0])
        raise ConfigError(f"{most_cited} is less than {pool_cited}: {format_bytes(pool)} of the worker's GPU")
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

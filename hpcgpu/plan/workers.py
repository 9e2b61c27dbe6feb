"""The workers of one node: every binding, limit and variable with which they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.model import Binding, CpuSet, Gpu, NodeLayout, Settings, Topology, WorkerSpec
from hpcgpu.model.settings import RMM
from hpcgpu.model.worker import Rapids
from hpcgpu.plan.binding import plan_bindings
from hpcgpu.plan.member_name import member_worker_name
from hpcgpu.plan.memory import plan_device_memory_limit_bytes, plan_memory_limit_bytes, strict_room_bytes
from hpcgpu.plan.network import nccl_env, ucx_env
from hpcgpu.units import format_bytes

# Variables that no launcher and no batch system sets: when they are there, the user wants them so.
_USERS = ("UCX_NET_DEVICES", "UCX_MAX_RNDV_RAILS", "NCCL_IB_HCA")
_ALIGNED_BYTES = 256  # of the sizes that RMM's pools take


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What the leader knows of its node.

    Attributes
    ----------
    gpus : tuple of Gpu
        The granted GPUs, or the simulated ones; a slice of a divided GPU counts as one.
    allowed, allowed_nodes : CpuSet
        PUs and NUMA nodes that the job may use.
    memory_bytes : int
        Host memory that the job may use.
    environ : mapping
        The rank's environment.
    scratch : str
        A folder of this run on the node, for the workers' files.
    masks : mapping of int to CpuSet
        The mask with which each rank was started; empty where none is to be respected.
    interfaces : frozenset of str, optional
        IP interfaces that have an address; None: not known.
    job_id, restart_count : str, int
        Of a member job, by which its workers are named; otherwise they are named by the node.

    """

    name: str
    topology: Topology
    gpus: tuple[Gpu, ...]
    allowed: CpuSet
    allowed_nodes: CpuSet
    memory_bytes: int
    environ: Mapping[str, str]
    scratch: str
    masks: Mapping[int, CpuSet] = field(default_factory=dict)
    interfaces: frozenset[str] | None = None
    job_id: str = ""
    restart_count: int = 0


def plan_workers(
    settings: Settings, node: NodeFacts, shares: NodeLayout, before: Sequence[NodeLayout] = ()
) -> tuple[tuple[int, WorkerSpec], ...]:
    """Return the node's workers, each with the rank that it belongs to.

    Parameters
    ----------
    settings : Settings
        The run's options.
    node : NodeFacts
        The machine as it is.
    shares : NodeLayout
        Which rank has which of the workers; those of one GPU follow each other, those without a GPU come last.
    before : sequence of NodeLayout
        Those of other leaders of the host that come before: numbers in the workers' names go on after them.

    Raises
    ------
    LaunchError
        The node has fewer GPUs than the layout counts on.
    ConfigError, BindingError
        Memory limits or cores that cannot be had.

    """
    wanted = sum(len(s) for s in shares.workers)
    needed = (wanted - shares.cpu_workers) // settings.workers_per_gpu
    if len(node.gpus) < needed:
        raise LaunchError(f"{node.name} was to have {needed} GPUs, but {len(node.gpus)} can be opened there")
    gpus = node.gpus[:needed]
    owners = {i: rank for rank, mine in zip(shares.ranks, shares.workers, strict=True) for i in mine}
    masks = [node.masks[owners[i]] for i in range(wanted)] if node.masks else ()
    bindings = plan_bindings(
        node.topology, gpus, node.allowed, settings, node.allowed_nodes or None, masks, shares.cpu_workers
    )
    bindings = tuple(_reachable(b, node.interfaces) for b in bindings)
    limits = _memory_limits(settings, node, gpus, bindings)
    common = nccl_env([b for b in bindings if b.gpus])
    names = _names(node, shares, before)
    specs = [
        _spec(settings, node, b, limit, common if b.gpus else (), name)
        for b, limit, name in zip(bindings, limits, names, strict=True)
    ]
    return tuple((rank, specs[i]) for i, rank in owners.items())


def _names(node: NodeFacts, shares: NodeLayout, before: Sequence[NodeLayout]) -> list[str]:
    def on_gpus(layout: NodeLayout) -> int:
        return sum(len(s) for s in layout.workers) - layout.cpu_workers

    if node.job_id:
        earlier = sum(len(s) for n in before for s in n.workers)
        count = sum(len(s) for s in shares.workers)
        return [member_worker_name(node.job_id, node.restart_count, earlier + i) for i in range(count)]
    first, first_cpu = sum(on_gpus(n) for n in before), sum(n.cpu_workers for n in before)
    named = [f"{node.name}-{first + i}" for i in range(on_gpus(shares))]
    return [*named, *(f"{node.name}-cpu{first_cpu + i}" for i in range(shares.cpu_workers))]


def node_warnings(settings: Settings, masks: Mapping[int, CpuSet], specs: Sequence[WorkerSpec]) -> tuple[str, ...]:
    """Say what people should know of one node's plan before the workers start.

    ``srun --cpu-bind=cores`` and Open MPI's default tie each rank to cores of its own, which was not
    meant for the workers: what the node's ranks have together is shared out among them.
    """
    out = []
    together = CpuSet().union(*masks.values())
    if len(set(masks.values())) > 1 and not settings.respect_launcher:
        out.append(
            "the launcher tied each rank to cores of its own; the workers have all of these together, PUs "
            f"{CpuSet(together)} (--respect-launcher keeps each to its rank's)"
        )
    if len(specs) > 1 and (shared := [s for s in specs if s.binding.shared_cores]):
        out.append(
            f"{len(shared)} workers share PUs {CpuSet(together)}: ask for more cores, or start the ranks without masks "
            "of their own (srun --cpu-bind=none, mpirun --bind-to none)"
        )
    if settings.protocol == "ucx" and any(n.kind == "slingshot" for s in specs for n in s.binding.nics):
        out.append("protocol='ucx' on Slingshot, for which UCX has no transport: it falls back to tcp; take 'tls'")
    return tuple(out)


def plan_rapids(settings: Settings, worker: str, device_memory_bytes: int) -> Rapids | None:
    """Return what a worker sets up of RMM and cuDF; None where nothing is asked for.

    Parameters
    ----------
    settings : Settings
        The run's options.
    worker : str
        The worker's name, for its log.
    device_memory_bytes : int
        The worker's share of its GPU or slice; 0 when unknown.

    Raises
    ------
    ConfigError
        A fraction of a memory whose size is unknown, a pool that is larger than the GPU, or than its own maximum.

    """
    said = settings.said
    sizes = ("rmm_pool_size", "rmm_maximum_pool_size", "rmm_release_threshold")
    pool, most, threshold = (_rmm_bytes(settings, name, device_memory_bytes) for name in sizes)
    if pool and not settings.rmm_managed_memory and 0 < device_memory_bytes < pool:
        raise ConfigError(f"{said(sizes[0])}, but the worker's GPU has {format_bytes(device_memory_bytes)} for it")
    if pool and most and most < pool:
        raise ConfigError(f"{said(sizes[1])} is less than {said(sizes[0])}: {format_bytes(pool)} of the worker's GPU")
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
    asked = [said(name) for name in RMM if getattr(settings, name)]
    needs = [("rmm", asked[0])] if asked else []
    needs += [(name, said("rmm_allocator_external_lib_list")) for name in settings.rmm_libraries]
    needs += [("cudf", said("enable_cudf_spill"))] if settings.enable_cudf_spill else []
    given = [(name, tuple((k, v) for k, v in arguments.items() if v is not None)) for name, arguments in layers]
    resources = () if given == [("CudaMemoryResource", ())] else tuple(given)  # RMM's own choice
    return Rapids(resources, settings.rmm_libraries, tuple(needs)) if needs else None


def _rmm_bytes(settings: Settings, name: str, device_memory_bytes: int) -> int | None:
    value = getattr(settings, name)
    if not value:
        return None
    if isinstance(value, float):
        if not device_memory_bytes:
            raise ConfigError(
                f"{settings.said(name)} is a fraction, but the size of this GPU's memory is not known (NVML does not "
                f"answer): give it in bytes, such as {name}='30GB'"
            )
        value *= device_memory_bytes
    return int(value) // _ALIGNED_BYTES * _ALIGNED_BYTES


def _cudf_env(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return what cuDF reads when it is imported (options.py, 26.10): workers that do not use it import nothing."""
    if not settings.enable_cudf_spill:
        return ()
    return ("CUDF_SPILL", "on"), ("CUDF_SPILL_STATS", str(settings.cudf_spill_stats))


def _reachable(binding: Binding, interfaces: frozenset[str] | None) -> Binding:
    """Leave an interface out that has no address: Dask could not listen there."""
    if interfaces is None or not binding.interface or binding.interface in interfaces:
        return binding
    why = f"{binding.interface} has no IP address: Dask's own traffic takes the route to the scheduler"
    return replace(binding, interface="", reasons=(*binding.reasons, why))


def _memory_limits(
    settings: Settings, node: NodeFacts, gpus: Sequence[Gpu], bindings: Sequence[Binding]
) -> list[int | None]:
    """Return the host memory of each worker; under ``bind`` never more than its NUMA nodes have for it."""
    simulated_bytes = sum(g.memory_bytes for g in gpus if g.vendor == "simulated")
    limit = plan_memory_limit_bytes(settings.memory_limit, node.memory_bytes, max(len(bindings), 1), simulated_bytes)
    rooms = strict_room_bytes(node.topology, [b.memory_nodes for b in bindings])
    out: list[int | None] = []
    for binding, room in zip(bindings, rooms, strict=True):
        if limit is None or binding.memory_policy != "bind" or not room or limit <= room:
            out.append(limit)
        elif settings.memory_limit is None:
            out.append(room)
        else:
            raise ConfigError(
                f"memory_limit={settings.memory_limit!r} (set by {settings.where('memory_limit')}) is "
                f"{format_bytes(limit)} for each worker, but memory_policy='bind' ties one to NUMA nodes "
                f"{binding.memory_nodes}, which have {format_bytes(room)} for it: leave one of the two out"
            )
    return out


def _spec(
    settings: Settings,
    node: NodeFacts,
    binding: Binding,
    limit: int | None,
    common: Sequence[tuple[str, str]],
    name: str,
) -> WorkerSpec:
    gpu = binding.gpus[0] if binding.gpus else None
    size = gpu.memory_bytes // settings.workers_per_gpu if gpu else 0
    cudf = _cudf_env(settings) if gpu else ()
    planned = dict([*_cuda_env(binding.gpus), *ucx_env(binding), *(common if binding.nics else ()), *cudf])
    kept = {name for name in planned if name in settings.env or (name in _USERS and name in node.environ)}
    if "UCX_NET_DEVICES" in kept:
        planned.pop("UCX_MAX_RNDV_RAILS", None)
    env = {k: v for k, v in planned.items() if k not in kept} | dict(settings.env)
    return WorkerSpec(
        name=name,
        binding=binding,
        nthreads=settings.nthreads,
        memory_limit_bytes=limit,
        device_memory_limit_bytes=plan_device_memory_limit_bytes(settings.device_memory_limit, size) if gpu else 0,
        device_memory_bytes=size,
        simulated=gpu is not None and gpu.vendor == "simulated",
        jit_unspill=settings.jit_unspill,
        rapids=plan_rapids(settings, name, size) if gpu else None,
        local_directory=node.scratch,
        env=tuple(sorted(env.items())),
        kept_env=tuple(sorted(kept)),
        resources=_resources(settings, gpu),
    )


def _resources(settings: Settings, gpu: Gpu | None) -> tuple[tuple[str, float], ...]:
    """Return the user's, or what tells the two kinds of workers apart where there are both."""
    if settings.resources or not settings.cpu_workers:
        return tuple(settings.resources.items())
    return (("GPU" if gpu else "CPU", 1.0),)


def _cuda_env(gpus: Sequence[Gpu]) -> tuple[tuple[str, str], ...]:
    """All whole GPUs stay visible, the own one first: CUDA IPC and NVLink need the others."""
    if not gpus:
        return (("CUDA_VISIBLE_DEVICES", ""),)
    if gpus[0].vendor == "simulated":
        return ()
    return (
        ("CUDA_VISIBLE_DEVICES", ",".join(g.uuid for g in gpus if g.uuid)),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    )

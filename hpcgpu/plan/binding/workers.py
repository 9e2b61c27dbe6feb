"""The workers of one node: the bindings, limits and variables with which they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.model import Binding, CpuSet, Gpu, HostMemory, NodeLayout, Settings, Topology, WorkerSpec
from hpcgpu.plan.binding.bindings import plan_bindings
from hpcgpu.plan.binding.memory import (
    memory_reason,
    plan_memory_limit_bytes,
    strict_room_bytes,
)
from hpcgpu.plan.binding.network import nccl_env, ucx_env
from hpcgpu.plan.binding.rapids import cudf_env, plan_rapids
from hpcgpu.plan.jobs.worker_names import member_worker_name
from hpcgpu.units import format_bytes

# No launcher and no batch system sets these variables: if they are set, the user has set them.
_USERS = ("CUPY_GPU_MEMORY_LIMIT", "UCX_NET_DEVICES", "UCX_MAX_RNDV_RAILS", "NCCL_IB_HCA")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """The facts of a node, as its leader knows them.

    Attributes
    ----------
    gpus : tuple of Gpu
        The granted GPUs, or the simulated ones; a MIG slice counts as one.
    allowed, allowed_nodes : CpuSet
        PUs and NUMA nodes that the job may use.
    memory : HostMemory
        The memory that these workers may use together.
    in_job : bool
        The process is in a job of a batch system; other jobs may run on the node.
    environ : mapping
        The rank's environment.
    scratch : str
        The run's folder on the node for the workers' files.
    masks : mapping of int to CpuSet
        The mask with which each rank was started; empty if masks are not respected.
    interfaces : frozenset of str, optional
        IP interfaces with an address; None: unknown.
    job_id, restart_count : str, int
        Of a member job, which names its workers; otherwise the node names them.

    """

    name: str
    topology: Topology
    gpus: tuple[Gpu, ...]
    allowed: CpuSet
    allowed_nodes: CpuSet
    memory: HostMemory
    environ: Mapping[str, str]
    scratch: str
    masks: Mapping[int, CpuSet] = field(default_factory=dict)
    interfaces: frozenset[str] | None = None
    job_id: str = ""
    restart_count: int = 0
    in_job: bool = False


def plan_workers(
    settings: Settings, node: NodeFacts, shares: NodeLayout, before: Sequence[NodeLayout] = ()
) -> tuple[tuple[int, WorkerSpec], ...]:
    """Return the node's workers, each with its rank.

    Parameters
    ----------
    settings : Settings
        The run's options.
    node : NodeFacts
        The facts of the node.
    shares : NodeLayout
        Which rank has which workers. The workers of one GPU follow each other; workers without a GPU come last.
    before : sequence of NodeLayout
        The layouts of the host's earlier leaders: the numbers in the workers' names continue after theirs.

    Raises
    ------
    LaunchError
        The node has fewer GPUs than the layout assumes.
    ConfigError, BindingError
        The options ask for memory limits or cores that the node cannot give.

    """
    wanted = sum(len(s) for s in shares.workers)
    needed = (wanted - shares.cpu_workers) // settings.workers_per_gpu
    if len(node.gpus) < needed:
        raise LaunchError(f"{node.name} was to have {needed} GPUs, but {len(node.gpus)} can be opened there")
    gpus = node.gpus[:needed]
    if settings.workers_per_gpu > 1 and (alone := next((g for g in gpus if g.compute_mode), None)):
        raise ConfigError(
            f"{settings.said('workers_per_gpu')}, but the GPU at {alone.pci} on {node.name} is in compute mode "
            f"{alone.compute_mode}: leave it at 1, or start NVIDIA's MPS in the job (nvidia-cuda-mps-control -d)"
        )
    owners = {i: rank for rank, mine in zip(shares.ranks, shares.workers, strict=True) for i in mine}
    masks = [node.masks[owners[i]] for i in range(wanted)] if node.masks else ()
    bindings = plan_bindings(
        node.topology, gpus, node.allowed, settings, node.allowed_nodes or None, masks, shares.cpu_workers
    )
    bindings = tuple(_reachable(b, settings, node) for b in bindings)
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
    """Return the warnings about one node's plan.

    ``srun --cpu-bind=cores`` and Open MPI's default bind each rank to cores of its own. That is not meant for workers:
    the cores of all ranks of the node are divided among them.
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
            f"{len(shared)} workers share PUs {CpuSet(together)}: ask for more cores; if a launcher tied the ranks to "
            "these, start them untied (srun --cpu-bind=none, mpirun --bind-to none)"
        )
    if settings.protocol == "ucx" and any(n.kind == "slingshot" for s in specs for n in s.binding.nics):
        out.append("protocol='ucx' on Slingshot, for which UCX has no transport: it falls back to tcp; take 'tls'")
    return (*out, *device_limits_lowered(settings, specs))


def device_limits_lowered(settings: Settings, specs: Sequence[WorkerSpec]) -> tuple[str, ...]:
    """Return a warning if GPUs have less memory than ``device_memory_limit`` asks to fill."""
    asked = settings.device_memory_limit
    sizes = {s.device_memory_bytes for s in specs if s.gpu is not None and s.device_memory_bytes}
    if not sizes or min(sizes) >= asked.nbytes:
        return ()
    return (
        f"{settings.said('device_memory_limit')} is lowered to {format_bytes(min(sizes))}, all that a worker has of "
        "its GPU: spilling begins when that is full; a fraction (0.8) leaves room for what tasks allocate",
    )


def _reachable(binding: Binding, settings: Settings, node: NodeFacts) -> Binding:
    """Drop an interface without an address: Dask could not listen on it. One that was asked for must have one."""
    if node.interfaces is None or not binding.interface or binding.interface in node.interfaces:
        return binding
    if settings.interface:
        raise LaunchError(
            f"{settings.said('interface')}: {node.name} has no such interface with an IP address; it has: "
            f"{', '.join(sorted(node.interfaces))}"
        )
    why = f"{binding.interface} has no IP address: Dask's own traffic takes the route to the scheduler"
    return replace(binding, interface="", reasons=(*binding.reasons, why))


def _memory_limits(
    settings: Settings, node: NodeFacts, gpus: Sequence[Gpu], bindings: Sequence[Binding]
) -> list[int | None]:
    """Return the host memory limit of each worker; under ``bind`` at most what its NUMA nodes have for it."""
    simulated_bytes = sum(g.memory_bytes for g in gpus if g.vendor == "simulated")
    limit = plan_memory_limit_bytes(settings.memory_limit, node.memory, max(len(bindings), 1), simulated_bytes)
    rooms = strict_room_bytes(node.topology, [b.memory_nodes for b in bindings])
    out: list[int | None] = []
    for binding, room in zip(bindings, rooms, strict=True):
        if limit is None or binding.memory_policy != "bind" or not room or limit <= room:
            out.append(limit)
        elif settings.memory_limit.is_share:
            out.append(room)
        else:
            raise ConfigError(
                f"memory_limit={settings.memory_limit!r} (set by {settings.where('memory_limit')}) is "
                f"{format_bytes(limit)} for each worker, but memory_policy='bind' ties one to NUMA nodes "
                f"{binding.memory_nodes}, which have {format_bytes(room)} for it: leave one of the two out"
            )
    return out


def _explained(settings: Settings, node: NodeFacts, binding: Binding, limit: int | None) -> Binding:
    """Add the reason of the worker's memory limit."""
    if not settings.memory_limit.is_share or (limit is None and node.memory.known):
        return binding
    others = node.in_job and node.allowed < CpuSet(pu for core in node.topology.cores for pu in core)
    why = memory_reason(limit, node.memory, others=others)
    return replace(binding, reasons=(*binding.reasons, why)) if why else binding


def _spec(
    settings: Settings,
    node: NodeFacts,
    binding: Binding,
    limit: int | None,
    common: Sequence[tuple[str, str]],
    name: str,
) -> WorkerSpec:
    gpu, asked = binding.gpus[0] if binding.gpus else None, settings.device_memory_limit
    size = gpu.memory_bytes // settings.workers_per_gpu if gpu else 0
    cudf = cudf_env(settings) if gpu else ()
    planned = dict(
        [
            *_cuda_env(binding.gpus),
            *_cupy_env(binding.gpus, settings.workers_per_gpu),
            *ucx_env(binding),
            *(common if binding.nics else ()),
            *cudf,
        ]
    )
    kept = {name for name in planned if name in settings.env or (name in _USERS and name in node.environ)}
    if "UCX_NET_DEVICES" in kept:
        planned.pop("UCX_MAX_RNDV_RAILS", None)
    env = {k: v for k, v in planned.items() if k not in kept} | dict(settings.env)
    return WorkerSpec(
        name=name,
        binding=binding,
        nthreads=settings.nthreads,
        memory_limit_bytes=limit,
        device_memory_limit_bytes=asked.of_device(size, settings.said("device_memory_limit")) if gpu else 0,
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
    """Return the user's resources, or resources that distinguish GPU workers from CPU workers if there are both."""
    if settings.resources or not settings.cpu_workers:
        return tuple(settings.resources.items())
    return (("GPU" if gpu else "CPU", 1.0),)


def _cupy_env(gpus: Sequence[Gpu], each: int) -> tuple[tuple[str, str], ...]:
    """Return the part of a shared GPU that CuPy's pool may hold: it gives nothing back to another process."""
    shared = gpus and gpus[0].vendor != "simulated" and each > 1
    return (("CUPY_GPU_MEMORY_LIMIT", f"{97 // each}%"),) if shared else ()


def _cuda_env(gpus: Sequence[Gpu]) -> tuple[tuple[str, str], ...]:
    """Return CUDA's variables. All whole GPUs are visible, the worker's own first: CUDA IPC and NVLink need them."""
    if not gpus:
        return (("CUDA_VISIBLE_DEVICES", ""),)
    if gpus[0].vendor == "simulated":
        return ()
    order = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Files may not tell UUIDs. Without the UUID of its own GPU a worker would see none, or another one first.
    if not all(g.uuid for g in gpus):
        return (order,)
    return (("CUDA_VISIBLE_DEVICES", ",".join(g.uuid for g in gpus)), order)

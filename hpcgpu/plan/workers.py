"""The workers of one node: every binding, limit and variable with which they start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcgpu.errors import LaunchError
from hpcgpu.model import Binding, CpuSet, Gpu, NodeLayout, Settings, Topology, WorkerSpec
from hpcgpu.plan.binding import plan_bindings
from hpcgpu.plan.memory import plan_device_memory_limit_bytes, plan_memory_limit_bytes
from hpcgpu.plan.network import ucx_env

# Variables that no launcher and no batch system sets: when they are there, the user wants them so.
_USERS = ("UCX_NET_DEVICES", "UCX_TLS")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What the leader knows of its node.

    Attributes
    ----------
    gpus : tuple of Gpu
        The granted GPUs, or the simulated ones.
    allowed, allowed_nodes : CpuSet
        PUs and NUMA nodes that the job may use.
    memory_bytes : int
        Host memory that the job may use.
    environ : mapping
        The rank's environment.
    scratch : str
        A folder of this run on the node, for the workers' files.

    """

    name: str
    topology: Topology
    gpus: tuple[Gpu, ...]
    allowed: CpuSet
    allowed_nodes: CpuSet
    memory_bytes: int
    environ: Mapping[str, str]
    scratch: str


def plan_workers(
    settings: Settings, node: NodeFacts, shares: NodeLayout, first: int = 0
) -> tuple[tuple[int, WorkerSpec], ...]:
    """Return the node's workers, each with the rank that it belongs to.

    Parameters
    ----------
    settings : Settings
        The run's options.
    node : NodeFacts
        The machine as it is.
    shares : NodeLayout
        Which rank has which of the GPUs.
    first : int
        Number of the first worker in its name; above 0 where other leaders of the host come before.

    Raises
    ------
    LaunchError
        The node has fewer GPUs than the layout counts on.
    ConfigError, BindingError
        Memory limits or cores that cannot be had.

    """
    wanted = sum(len(s) for s in shares.workers)
    if len(node.gpus) < wanted:
        raise LaunchError(f"{node.name} was to have {wanted} GPUs, but {len(node.gpus)} can be opened there")
    gpus = node.gpus[:wanted]
    bindings = plan_bindings(node.topology, gpus, node.allowed, allowed_nodes=node.allowed_nodes or None)
    simulated_bytes = sum(g.memory_bytes for g in gpus if g.vendor == "simulated")
    limit = plan_memory_limit_bytes(settings.memory_limit, node.memory_bytes, max(wanted, 1), simulated_bytes)
    owners = [(rank, i) for rank, mine in zip(shares.ranks, shares.workers, strict=True) for i in mine]
    return tuple((rank, _spec(settings, node, bindings[i], limit, first + i)) for rank, i in owners)


def _spec(settings: Settings, node: NodeFacts, binding: Binding, limit: int | None, number: int) -> WorkerSpec:
    gpu = binding.gpus[0]
    kept = tuple(name for name in _USERS if name in node.environ and name not in settings.env)
    planned = dict([*_cuda_env(binding.gpus), *ucx_env(binding)])
    env = {k: v for k, v in planned.items() if k not in kept} | dict(settings.env)
    return WorkerSpec(
        name=f"{node.name}-{number}",
        binding=binding,
        nthreads=settings.nthreads,
        memory_limit_bytes=limit,
        device_memory_limit_bytes=plan_device_memory_limit_bytes(settings.device_memory_limit, gpu.memory_bytes),
        device_memory_bytes=gpu.memory_bytes,
        simulated=gpu.vendor == "simulated",
        local_directory=node.scratch,
        env=tuple(sorted(env.items())),
        kept_env=kept,
        resources=tuple(settings.resources.items()),
    )


def _cuda_env(gpus: Sequence[Gpu]) -> tuple[tuple[str, str], ...]:
    """All whole GPUs stay visible, the own one first: CUDA IPC and NVLink need the others."""
    if gpus[0].vendor == "simulated":
        return ()
    return (
        ("CUDA_VISIBLE_DEVICES", ",".join(g.uuid for g in gpus if g.uuid)),
        ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    )

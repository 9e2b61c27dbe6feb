"""A node that something describes, a file or a site's document, and the workers of all of it."""

from __future__ import annotations

from dataclasses import replace

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet, Gpu, HostMemory, NodeLayout, Settings, Topology, WorkerSpec
from hpcgpu.model.allocation import ALL_OF_THE_NODE, NOT_TOLD
from hpcgpu.model.limit import NO_LIMIT
from hpcgpu.plan.binding.workers import NodeFacts, plan_workers


def facts_from(topology: Topology, where: str) -> NodeFacts:
    """Return what is known of a node from its topology alone: all that was granted may be used.

    Parameters
    ----------
    topology : Topology
        The node.
    where : str
        The name of its description, for the message.

    Raises
    ------
    ParseError
        None of its PUs was granted.

    """
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
        scratch="",
    )


def plan_whole_node(settings: Settings, facts: NodeFacts, gpus: tuple[Gpu, ...]) -> tuple[WorkerSpec, ...]:
    """Return the workers on these GPUs of a node, and those without a GPU, as if one rank had them all.

    Their limits of device memory are left out: they would be refused where a GPU's size is unknown, as in documents.

    Raises
    ------
    ConfigError, BindingError
        The options ask for cores or host memory that the node cannot give.

    """
    count = len(gpus) * settings.workers_per_gpu + settings.cpu_workers
    everyone = NodeLayout(0, (0,), (tuple(range(count)),), settings.cpu_workers)
    wanted = replace(settings, device_memory_limit=NO_LIMIT)
    planned = plan_workers(wanted, replace(facts, name="worker", gpus=gpus), everyone)
    return tuple(spec for _, spec in planned)

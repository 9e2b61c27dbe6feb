"""What each worker of one node is tied to: cores, memory and network port next to its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcgpu.errors import BindingError, ConfigError
from hpcgpu.model import Binding, CpuSet, Gpu, Topology
from hpcgpu.plan.cores import split_cores, usable_cores
from hpcgpu.plan.memory import plan_memory_nodes
from hpcgpu.plan.network import plan_nics


def plan_bindings(
    topology: Topology,
    gpus: Sequence[Gpu],
    allowed: CpuSet,
    workers_per_gpu: int = 1,
    allowed_nodes: CpuSet | None = None,
) -> tuple[Binding, ...]:
    """Return the bindings of one node's workers, in the order of ``gpus``.

    The plan depends on which GPUs there are, not on their order.

    Parameters
    ----------
    topology : Topology
        This node's own: names of ports differ between nodes of one cluster.
    gpus : sequence of Gpu
        The granted GPUs, each once; ``numa_node`` says where each is.
    allowed : CpuSet
        PUs that this job may use: the cgroup's and the launcher's mask.
    workers_per_gpu : int
        Bindings for each GPU; those of one GPU follow each other.
    allowed_nodes : CpuSet, optional
        NUMA nodes that this job may use; all if not given.

    Returns
    -------
    tuple of Binding
        Cores are whole, never outside ``allowed``, and disjoint; where there are fewer cores than
        workers all have all of them and ``shared_cores`` is set.

    Raises
    ------
    BindingError
        No core is allowed, or a GPU is given twice.

    """
    names = [(g.pci, g.uuid) for g in gpus]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise BindingError(f"the GPU at {twice[0]} ({twice[1] or 'UUID unknown'}) is given twice; give each GPU once")
    cores = usable_cores(topology, allowed)
    if not cores:
        raise BindingError(f"no core is granted to this process (allowed PUs: {str(allowed) or 'none'}): bind to what?")
    ranked = sorted(gpus, key=lambda g: (g.pci, g.uuid))
    planned = _plan(topology, ranked, cores, workers_per_gpu, allowed_nodes)
    return tuple(b for g in gpus for b in planned[ranked.index(g)])


def _plan(
    topology: Topology, gpus: list[Gpu], cores: tuple[CpuSet, ...], each: int, allowed_nodes: CpuSet | None
) -> list[list[Binding]]:
    """Return the bindings of each GPU, all in PCI order."""
    if not gpus:
        return []
    workers = [g for g in gpus for _ in range(each)]
    shares = split_cores(topology, cores, [g.numa_node for g in workers])
    ports = plan_nics(topology, workers)
    out: list[list[Binding]] = [[] for _ in gpus]
    for k, gpu in enumerate(workers):
        i = k // each
        policy, nodes = plan_memory_nodes(topology, gpu, allowed_nodes)
        nic, passed_over = ports[k] or (None, ())
        binding = Binding(
            cpuset=CpuSet(pu for core in shares[k] for pu in core),
            gpus=tuple(gpus[i:] + gpus[:i]),
            nics=(nic,) if nic else (),
            memory_policy=policy,
            memory_nodes=nodes,
            interface=nic.interface if nic else "",
            shared_cores=len(cores) < len(workers),
        )
        reasons = (*_core_reasons(topology, gpu, binding, len(cores), len(workers)), *passed_over)
        out[i].append(replace(binding, reasons=reasons))
    return out


def _core_reasons(topology: Topology, gpu: Gpu, binding: Binding, cores: int, workers: int) -> tuple[str, ...]:
    """Say what is not as one would wish."""
    out = []
    home = next((n for n in topology.numa_nodes if n.os_index == gpu.numa_node), None)
    if home is None:
        out.append("nobody knows which NUMA node this GPU is on: cores are an even share, memory is not bound")
    if binding.shared_cores:
        out.append(f"{cores} core{'s' if cores > 1 else ''} for {workers} workers: all of them share what there is")
    elif home is not None and (far := CpuSet(binding.cpuset - home.cpuset)):
        if far == binding.cpuset:
            out.append(f"no core of its own NUMA node {home.os_index} for it: PUs {far} are on others")
        else:
            out.append(f"NUMA node {home.os_index} has fewer cores than an even share: PUs {far} are on others")
    return tuple(out)


def place_simulated(topology: Topology, count: int, memory_bytes: int, node_name: str) -> tuple[Gpu, ...]:
    """Return ``count`` simulated GPUs, spread evenly over the NUMA nodes of this machine.

    UUID and PCI address are stable (``GPU-SIM-<node_name>-<i>``); the PCI domain ``ffff`` is one
    that no real device has.

    Raises
    ------
    ConfigError
        Not between 1 and 8192 GPUs (what one PCI domain holds), or GPUs without memory.

    """
    if not 1 <= count <= 8192 or memory_bytes <= 0:
        raise ConfigError(
            f"{count} simulated GPUs of {memory_bytes} bytes; allowed: 1 to 8192 of them, with some memory "
            "(gpus='sim:4x256MiB')"
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

"""What each worker of one node is tied to: cores, memory and network port next to its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcgpu.errors import BindingError, ConfigError
from hpcgpu.model import Binding, CpuSet, Gpu, Settings, Topology
from hpcgpu.plan.cores import split_cores, usable_cores
from hpcgpu.plan.memory import plan_memory_nodes
from hpcgpu.plan.network import plan_nics

_DEFAULTS = Settings()


def plan_bindings(
    topology: Topology,
    gpus: Sequence[Gpu],
    allowed: CpuSet,
    wanted: Settings = _DEFAULTS,
    allowed_nodes: CpuSet | None = None,
    masks: Sequence[CpuSet] = (),
) -> tuple[Binding, ...]:
    """Return the bindings of one node's workers, in the order of ``gpus``, which is the only use of that order.

    Parameters
    ----------
    topology : Topology
        This node's own: names of ports differ between nodes of one cluster.
    gpus : sequence of Gpu
        The granted GPUs, each once; ``numa_node`` says where each is.
    allowed : CpuSet
        PUs that this job may use: the cgroup's and the launcher's mask.
    wanted : Settings
        ``workers_per_gpu``, ``cores``, ``reserved_cores``, ``memory_policy`` and ``nics``; those of one GPU follow
        each other.
    allowed_nodes : CpuSet, optional
        NUMA nodes that this job may use; all if not given.
    masks : sequence of CpuSet, optional
        A mask for each worker that it stays inside (``respect_launcher``).

    Returns
    -------
    tuple of Binding
        Cores are whole, never outside ``allowed``, and disjoint; where there are fewer cores than
        workers all have all of them and ``shared_cores`` is set.

    Raises
    ------
    BindingError
        No core is allowed, or a GPU is given twice.
    ConfigError
        Cores or ports that are not there.

    """
    _check(topology, gpus, allowed)
    each = wanted.workers_per_gpu
    order = sorted(range(len(gpus)), key=lambda i: (gpus[i].pci, gpus[i].uuid))
    workers = [gpus[i] for i in order for _ in range(each)]
    inside = [masks[i * each + k] & allowed if masks else allowed for i in order for k in range(each)]
    planned = _plan(topology, workers, inside, wanted, allowed_nodes)
    at = {i: rank for rank, i in enumerate(order)}
    return tuple(planned[at[i] * each + k] for i in range(len(gpus)) for k in range(each))


def _check(topology: Topology, gpus: Sequence[Gpu], allowed: CpuSet) -> None:
    names = [(g.pci, g.uuid) for g in gpus]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise BindingError(f"the GPU at {twice[0]} ({twice[1] or 'UUID unknown'}) is given twice; give each GPU once")
    if not usable_cores(topology, allowed):
        raise BindingError(f"no core is granted to this process (allowed PUs: {str(allowed) or 'none'}): bind to what?")


def _plan(
    topology: Topology, workers: list[Gpu], masks: list[CpuSet], wanted: Settings, allowed_nodes: CpuSet | None
) -> list[Binding]:
    """Return the bindings of the workers, which are in PCI order."""
    whole = list(dict.fromkeys(g for g in workers if not g.mig))
    cores = _cores(topology, workers, masks, wanted)
    homes, cpusets = [g.numa_node for g in workers], [c for c, _, _ in cores]
    memory = plan_memory_nodes(topology, homes, cpusets, allowed_nodes, wanted.memory_policy)
    ports = plan_nics(topology, workers, wanted.nics)
    out = []
    for gpu, (cpuset, shared, notes), (policy, nodes), port in zip(workers, cores, memory, ports, strict=True):
        first = 0 if gpu.mig else whole.index(gpu)
        binding = Binding(
            cpuset=cpuset,
            # CUDA takes one slice per process, and slices have no IPC
            gpus=(gpu,) if gpu.mig else tuple(whole[first:] + whole[:first]),
            nics=port.nics,
            memory_policy=policy,
            memory_nodes=nodes,
            interface=port.interface,
            shared_cores=shared,
        )
        out.append(replace(binding, reasons=(*notes, *_core_reasons(topology, gpu, binding), *port.reasons)))
    return out


def _cores(
    topology: Topology, workers: list[Gpu], masks: list[CpuSet], wanted: Settings
) -> list[tuple[CpuSet, bool, tuple[str, ...]]]:
    """Return each worker's PUs, whether it shares them, and what is to be said of it; masks are planned one by one."""
    out: list[tuple[CpuSet, bool, tuple[str, ...]]] = [(CpuSet(), False, ())] * len(workers)
    for mask in dict.fromkeys(masks):
        mine = [i for i, m in enumerate(masks) if m == mask]
        cores = usable_cores(topology, mask)
        if not cores:
            raise BindingError(f"none of the PUs {mask} of a rank's mask may be used by this job")
        homes = [workers[i].numa_node for i in mine]
        found = split_cores(topology, cores, homes, wanted.cores, wanted.reserved_cores)
        notes = (found.note,) if found.note else ()
        shared = len(cores) < len(mine) or any(m & mask for m in set(masks) - {mask})
        if len(cores) < len(mine):
            few = f"{len(cores)} core{'s' if len(cores) > 1 else ''} for {len(mine)} workers"
            notes = (*notes, f"{few}: all of them share what there is")
        for i, share in zip(mine, found.shares, strict=True):
            out[i] = (CpuSet(pu for core in share for pu in core), shared, notes)
    return out


def _core_reasons(topology: Topology, gpu: Gpu, binding: Binding) -> tuple[str, ...]:
    """Say what is not as one would wish."""
    home = next((n for n in topology.numa_nodes if n.os_index == gpu.numa_node), None)
    if home is None:
        return ("nobody knows which NUMA node this GPU is on: cores are an even share, memory is not bound",)
    if binding.shared_cores or not (far := CpuSet(binding.cpuset - home.cpuset)):
        return ()
    if far == binding.cpuset:
        return (f"no core of its own NUMA node {home.os_index} for it: PUs {far} are on others",)
    return (f"NUMA node {home.os_index} has fewer cores than its share: PUs {far} are on others",)


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

"""What each worker of one node is tied to: cores, memory and network port next to its GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpcgpu.errors import BindingError, ConfigError
from hpcgpu.model import Binding, CpuSet, Gpu, Settings, Topology
from hpcgpu.plan.binding.cores import split_cores_beside, usable_cores
from hpcgpu.plan.binding.memory import plan_memory_nodes, plan_memory_nodes_beside
from hpcgpu.plan.binding.network import plan_nics

_DEFAULTS = Settings()


def plan_bindings(
    topology: Topology,
    gpus: Sequence[Gpu],
    allowed: CpuSet,
    wanted: Settings = _DEFAULTS,
    allowed_nodes: CpuSet | None = None,
    masks: Sequence[CpuSet] = (),
    cpu_workers: int = 0,
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
        ``nthreads``, ``workers_per_gpu`` (they follow each other), and the options of bindings.
    allowed_nodes : CpuSet, optional
        NUMA nodes that this job may use; all if not given.
    masks : sequence of CpuSet, optional
        A mask for each worker, which it stays inside (``respect_launcher``).
    cpu_workers : int
        Workers without a GPU, which come last; each has ``nthreads`` cores or an even share of all.

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
    workers = [*(gpus[i] for i in order for _ in range(each)), *[None] * cpu_workers]
    positions = [*(i * each + k for i in order for k in range(each)), *range(len(gpus) * each, len(workers))]
    inside = [masks[p] & allowed if masks else allowed for p in positions]
    planned = dict(zip(positions, _plan(topology, workers, inside, wanted, allowed_nodes), strict=True))
    return tuple(planned[p] for p in sorted(planned))


def _check(topology: Topology, gpus: Sequence[Gpu], allowed: CpuSet) -> None:
    names = [(g.pci, g.uuid) for g in gpus]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise BindingError(f"the GPU at {twice[0]} ({twice[1] or 'UUID unknown'}) is given twice; give each GPU once")
    if not usable_cores(topology, allowed):
        raise BindingError(f"no core is granted to this process (allowed PUs: {str(allowed) or 'none'}): bind to what?")


def _plan(
    topology: Topology, workers: list[Gpu | None], masks: list[CpuSet], wanted: Settings, allowed_nodes: CpuSet | None
) -> list[Binding]:
    """Return the bindings of the workers, which are in PCI order, those without a GPU last."""
    own = [g for g in workers if g]
    cores = _cores(topology, workers, masks, wanted)
    cpusets, rule = [c for c, _, _ in cores], wanted.memory_policy
    near, others = cpusets[: len(own)], cpusets[len(own) :]
    homes, everything = [g.numa_node for g in own], wanted.cores == "all"
    memory = (
        *plan_memory_nodes(topology, homes, near, allowed_nodes, rule, everything=everything),
        *plan_memory_nodes_beside(topology, others, allowed_nodes, rule),
    )
    # each kind is balanced for itself: workers without a GPU leave the others' ports as they would be without them
    ports = (
        *plan_nics(topology, own, wanted.nics),
        *plan_nics(topology, [place_of(topology, c) for c in others], wanted.nics),
    )
    out = []
    for gpu, (cpuset, shared, notes), (policy, nodes), port in zip(workers, cores, memory, ports, strict=True):
        binding = Binding(
            cpuset=cpuset,
            gpus=_visible(gpu, own),
            nics=port.nics,
            memory_policy=policy,
            memory_nodes=nodes,
            interface=port.interface,
            shared_cores=shared,
        )
        out.append(replace(binding, reasons=(*notes, *_core_reasons(topology, gpu, binding), *port.reasons)))
    return out


def _visible(gpu: Gpu | None, own: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return all whole GPUs, the worker's own first; CUDA takes one slice per process, and slices have no IPC."""
    if gpu is None or gpu.mig:
        return (gpu,) if gpu else ()
    whole = list(dict.fromkeys(g for g in own if not g.mig))
    first = whole.index(gpu)
    return tuple(whole[first:] + whole[:first])


def place_of(topology: Topology, cpuset: CpuSet) -> Gpu:
    """Return a GPU that would stand where these PUs are: a worker without one has the ports that it would have."""
    there = max(topology.numa_nodes, key=lambda n: len(n.cpuset & cpuset), default=None)
    return Gpu("", vendor="", numa_node=there.os_index if there and there.cpuset & cpuset else None)


def _cores(
    topology: Topology, workers: list[Gpu | None], masks: list[CpuSet], wanted: Settings
) -> list[tuple[CpuSet, bool, tuple[str, ...]]]:
    """Return each worker's PUs, whether it shares them, and what is to be said of it; masks are planned one by one."""
    out: list[tuple[CpuSet, bool, tuple[str, ...]]] = [(CpuSet(), False, ())] * len(workers)
    for mask in dict.fromkeys(masks):
        mine = [i for i, m in enumerate(masks) if m == mask]
        cores = usable_cores(topology, mask)
        if not cores:
            raise BindingError(f"none of the PUs {mask} of a rank's mask may be used by this job")
        homes = [gpu.numa_node for i in mine if (gpu := workers[i])]
        others, threads = len(mine) - len(homes), wanted.nthreads
        found = split_cores_beside(topology, cores, homes, others, threads, wanted.cores, wanted.reserved_cores)
        notes = (found.note,) if found.note else ()
        shared = len(cores) < len(mine) or any(m & mask for m in set(masks) - {mask})
        if len(cores) < len(mine):
            few = f"{len(cores)} core{'s' if len(cores) > 1 else ''} for {len(mine)} workers"
            notes = (*notes, f"{few}: all of them share what there is")
        for i, share in zip(mine, found.shares, strict=True):
            out[i] = (CpuSet(pu for core in share for pu in core), shared, notes)
    return out


def _core_reasons(topology: Topology, gpu: Gpu | None, binding: Binding) -> tuple[str, ...]:
    """Say what is not as one would wish."""
    if gpu is None:
        return ()
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

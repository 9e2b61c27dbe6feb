"""The binding of each worker of a node: cores, memory and network ports near its GPU."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.errors import BindingError, ConfigError, opt
from hpcgpu.model.allocation import BindingRules, CpuSet
from hpcgpu.model.topology import Binding, Gpu, Topology
from hpcgpu.plan.binding.cores import split_cores, usable_cores
from hpcgpu.plan.binding.memory import plan_memory_nodes
from hpcgpu.plan.binding.network import plan_nics
from hpcgpu.units import counted

_DEFAULTS = BindingRules()


def plan_bindings(
    topology: Topology,
    gpus: Sequence[Gpu],
    allowed: CpuSet,
    rules: BindingRules = _DEFAULTS,
    allowed_nodes: CpuSet | None = None,
    masks: Sequence[CpuSet] = (),
    cpu_workers: int = 0,
) -> tuple[Binding, ...]:
    """Plan the bindings of one node's workers, in the order of ``gpus``; BindingError or ConfigError if impossible.

    The plan does not depend on the order. ``allowed`` are the job's PUs by its cgroup and its launcher's mask,
    ``allowed_nodes`` its NUMA nodes (None: all); ``masks``, one for each worker, bound its cores (respect_launcher).
    Workers of one GPU are adjacent; the ``cpu_workers``, without a GPU, are last, each with nthreads cores or an even
    share if that is less. Cores are whole, within ``allowed``, and disjoint; with fewer cores than workers each worker
    has all of them (shared_cores).
    """
    names = [(g.pci, g.uuid) for g in gpus]
    if len(set(names)) < len(names):
        twice = next(n for n in names if names.count(n) > 1)
        raise BindingError(f"the GPU at {twice[0]} ({twice[1] or 'UUID unknown'}) is given twice; give each GPU once")
    if not usable_cores(topology, allowed):
        raise BindingError(f"no CPU core is available to this process (allowed PUs: {str(allowed) or 'none'})")
    each = rules.workers_per_gpu
    order = sorted(range(len(gpus)), key=lambda i: (gpus[i].pci, gpus[i].uuid))
    workers = [*(gpus[i] for i in order for _ in range(each)), *[None] * cpu_workers]
    positions = [*(i * each + k for i in order for k in range(each)), *range(len(gpus) * each, len(workers))]
    inside = [masks[p] & allowed if masks else allowed for p in positions]
    planned = dict(zip(positions, _plan(topology, workers, inside, rules, allowed_nodes), strict=True))
    return tuple(planned[p] for p in sorted(planned))


def _plan(
    topology: Topology,
    workers: list[Gpu | None],
    masks: list[CpuSet],
    rules: BindingRules,
    allowed_nodes: CpuSet | None,
) -> list[Binding]:
    """Plan the bindings of the workers, which are in PCI order, those without a GPU last."""
    gpus = [g for g in workers if g]
    cores = _cores(topology, workers, masks, rules)
    cpusets, homes, divide_all = [c for c, _, _ in cores], [g.numa_node for g in gpus], rules.cores == "all"
    memory = plan_memory_nodes(topology, homes, cpusets, allowed_nodes, rules.memory_policy, divide_all=divide_all)
    # Each kind is balanced on its own: workers without a GPU do not change the ports of the others.
    kinds = (gpus, [gpu_at(topology, cpuset) for cpuset in cpusets[len(gpus) :]])
    ports = [port for kind in kinds for port in plan_nics(topology, kind, rules.nics, rules.interface or "")]
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
        out.append(binding._replace(reasons=(*notes, *_core_reasons(topology, gpu, binding), *port.reasons)))
    return out


def _visible(gpu: Gpu | None, gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    """Return the GPUs that the worker sees: all whole GPUs, its own first."""
    if gpu is None or gpu.mig:  # a slice is alone: CUDA uses one slice per process, and slices have no IPC
        return (gpu,) if gpu else ()
    whole = list(dict.fromkeys(g for g in gpus if not g.mig))
    first = whole.index(gpu)
    return tuple(whole[first:] + whole[:first])


def cuda_env(gpus: Sequence[Gpu]) -> tuple[tuple[str, str], ...]:
    """Return the variables that show these GPUs to CUDA, in this order: CUDA IPC and NVLink need peers', too."""
    if not gpus:
        return (("CUDA_VISIBLE_DEVICES", ""),)
    if gpus[0].vendor == "simulated":
        return ()
    order = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    # Files may lack UUIDs. Without the UUID of its own GPU a worker would see no GPU, or another GPU first.
    if not all(g.uuid for g in gpus):
        return (order,)
    return (("CUDA_VISIBLE_DEVICES", ",".join(g.uuid for g in gpus)), order)


def gpu_at(topology: Topology, cpuset: CpuSet) -> Gpu:
    """Return an imaginary GPU near these PUs: a worker without a GPU gets the ports of such a GPU."""
    nearest = max(topology.numa_nodes, key=lambda n: len(n.cpuset & cpuset), default=None)
    return Gpu("", vendor="", numa_node=nearest.os_index if nearest and nearest.cpuset & cpuset else None)


def _cores(
    topology: Topology, workers: list[Gpu | None], masks: list[CpuSet], rules: BindingRules
) -> list[tuple[CpuSet, bool, tuple[str, ...]]]:
    """Return each worker's PUs, whether it shares them, and notes. Each mask is planned on its own."""
    out: list[tuple[CpuSet, bool, tuple[str, ...]]] = [(CpuSet(), False, ())] * len(workers)
    for mask in dict.fromkeys(masks):
        mine = [i for i, m in enumerate(masks) if m == mask]
        cores = usable_cores(topology, mask)
        if not cores:
            raise BindingError(f"none of the PUs {mask} of a rank's mask may be used by this job")
        homes = [gpu.numa_node for i in mine if (gpu := workers[i])]
        cpu_workers = len(mine) - len(homes)
        division = split_cores(topology, cores, homes, rules.cores, rules.reserved_cores, cpu_workers, rules.nthreads)
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
    """Return simulated GPUs with stable UUIDs and addresses, spread over the NUMA nodes; ConfigError if impossible.

    No real device has the PCI domain ffff; a domain holds 8192.
    """
    if not 1 <= count <= 8192 or memory_bytes <= 0:
        raise ConfigError(
            f"{count} simulated GPUs of {memory_bytes} bytes; allowed: 1 to 8192 GPUs with memory "
            f"({opt('simulate', '4x256MiB')})"
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

"""A worker's binding as text, and where a process differs from its plan."""

from __future__ import annotations

from hpcgpu.model import ActualBinding, Binding, CpuSet, Gpu, Nic, Topology, WorkerSpec
from hpcgpu.units import format_bytes

MAKERS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}


def differences(spec: WorkerSpec, actual: ActualBinding) -> tuple[str, ...]:
    """Return the differences between a process and its plan, for people; () without differences."""
    binding = spec.binding
    out = []
    wrong: dict[CpuSet, list[int]] = {}
    for thread, mask in actual.threads:
        if mask != binding.cpuset:
            wrong.setdefault(mask, []).append(thread)
    for mask, threads in wrong.items():
        out.append(
            f"{len(threads)} of {len(actual.threads)} threads may run on PUs {mask}, planned: {binding.cpuset} "
            f"(thread {threads[0]}{', …' if len(threads) > 1 else ''})"
        )
    if not actual.threads:
        out.append("no thread of the process could be read")
    planned = (binding.memory_policy, binding.memory_nodes)
    if binding.memory_policy != "none" and (actual.memory_policy, actual.memory_nodes) != planned:
        out.append(f"memory policy is {format_memory(actual)}, planned: {format_memory(binding)}")
    now = dict(actual.env)
    for name, value in spec.env:
        if now.get(name) != value:
            out.append(f"{name} is {now.get(name, 'not set')}, planned: {value}")
    return tuple(out)


def format_memory(binding: Binding | ActualBinding) -> str:
    """Return NUMA nodes and policy of a worker's memory."""
    policy = binding.memory_policy or "unknown"
    return f"{binding.memory_nodes} {policy}" if binding.memory_nodes and policy != "none" else policy


def port_name(nic: Nic) -> str:
    """Return the port as UCX names it, a plain interface as the kernel does."""
    return nic.name if nic.name == nic.interface else f"{nic.name}:{nic.port}"


def format_ports(binding: Binding) -> str:
    """Return the ports, as UCX names them, and the IP interface."""
    ports = [port_name(nic) for nic in binding.nics]
    if binding.interface not in ("", *(n.name for n in binding.nics)):
        ports.append(f"({binding.interface})")
    return " ".join(ports) or "-"


def format_gpu(gpu: Gpu, *, address: bool = True) -> str:
    """Return address, model, slice and size of a GPU; the maker if the model is unknown."""
    size = format_bytes(gpu.memory_bytes) if gpu.memory_bytes else ""
    part = gpu.mig if gpu.mig not in gpu.model else ""
    maker = MAKERS.get(gpu.vendor, gpu.vendor)
    # NVIDIA's model names of older GPUs lack its name ("Tesla V100-SXM2-16GB").
    has_maker = gpu.model and (gpu.vendor == "nvidia" or maker.lower() in gpu.model.lower())
    named = gpu.model if has_maker else f"{maker} {gpu.model}"
    return " ".join(filter(None, (gpu.pci if address else "", named.strip(), part, size)))


def format_other_gpus(topology: Topology) -> str:
    """Format the node's GPUs on which no worker can run; "" without such GPUs."""
    others = [f"{g.pci} {format_gpu(g, address=False)}" for g in topology.gpus if not g.can_run]
    return f"seen, not NVIDIA: no worker: {'; '.join(others)}" if others else ""


def worker_reasons(spec: WorkerSpec) -> tuple[str, ...]:
    """Return the faults of a worker's binding, and the variables that keep the user's values."""
    kept = tuple(f"{name} is kept as you set it" for name in spec.kept_env)
    return (*spec.binding.reasons, *kept)

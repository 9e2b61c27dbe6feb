"""The bindings of a node's workers as tables for people: planned and actual ones."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.model import ActualBinding, Binding, CpuSet, Gpu, Nic, Topology, WorkerSpec
from hpcgpu.units import format_bytes

MAKERS = {"nvidia": "NVIDIA", "amd": "AMD", "intel": "Intel"}


def render_actual(specs: Sequence[WorkerSpec], actual: Sequence[ActualBinding]) -> str:
    """Return a table of planned and actual bindings; differences and reasons are below each row."""
    columns = ("worker", "GPU", "cores planned", "cores now", "memory planned", "memory now", "OS threads", "NIC")
    rows = []
    for spec, now in zip(specs, actual, strict=True):
        binding = spec.binding
        memory = _memory(now.memory_policy or "unknown", now.memory_nodes)
        cells = (
            *(spec.name, format_gpu(spec.gpu) if spec.gpu else "none", str(binding.cpuset), str(now.cpuset)),
            *(format_memory(binding), memory, str(len(now.threads)), format_ports(binding)),
        )
        rows.append((cells, (*(f"NOT AS PLANNED: {d}" for d in differences(spec, now)), *worker_reasons(spec))))
    return aligned(columns, rows)


def aligned(columns: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]) -> str:
    """Return a table; the notes on a row are below it."""
    cells = [columns, *(row for row, _ in rows)]
    widths = [max(len(c) for c in column) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    out = [lines[0]]
    for line, (_, below) in zip(lines[1:], rows, strict=True):
        out += [line, *(f"    {text}" for text in below)]
    return "\n".join(out) + "\n"


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
        memory = _memory(actual.memory_policy or "unknown", actual.memory_nodes)
        out.append(f"memory policy is {memory}, planned: {_memory(*planned)}")
    now = dict(actual.env)
    for name, value in spec.env:
        if now.get(name) != value:
            out.append(f"{name} is {now.get(name, 'not set')}, planned: {value}")
    return tuple(out)


def _memory(policy: str, nodes: CpuSet) -> str:
    return f"{nodes} {policy}" if nodes else policy


def format_memory(binding: Binding) -> str:
    """Return NUMA nodes and policy of a worker's memory."""
    return _memory(binding.memory_policy, binding.memory_nodes)


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

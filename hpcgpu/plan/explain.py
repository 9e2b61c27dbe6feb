"""The bindings of a node's workers as tables for people: as planned, and as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcgpu.model import ActualBinding, Binding, CpuSet, Gpu, WorkerSpec
from hpcgpu.units import format_bytes


class BindingRow(NamedTuple):
    """One worker, in words."""

    worker: str
    gpu: str
    cores: str
    memory: str
    nic: str
    shared: str
    reasons: tuple[str, ...]


def binding_table(specs: Sequence[WorkerSpec]) -> tuple[BindingRow, ...]:
    """Return a row for each worker: what it is tied to, and why it is not as one would wish."""
    return tuple(_row(s) for s in specs)


def render_table(rows: Sequence[BindingRow]) -> str:
    """Return the rows as aligned text; a worker's reasons stand below its row."""
    columns = ("worker", "GPU", "cores", "memory nodes", "NIC", "cores shared")
    return _aligned(columns, [(r[:-1], r.reasons) for r in rows])


def render_actual(specs: Sequence[WorkerSpec], actual: Sequence[ActualBinding]) -> str:
    """Return what was planned beside what the processes have; differences and reasons stand below each row."""
    columns = ("worker", "GPU", "cores planned", "cores now", "memory planned", "memory now", "threads", "NIC")
    rows = []
    for spec, now in zip(specs, actual, strict=True):
        row = _row(spec)
        memory = _memory(now.memory_policy or "unknown", now.memory_nodes)
        cells = (row.worker, row.gpu, row.cores, str(now.cpuset), row.memory, memory, str(len(now.threads)), row.nic)
        rows.append((cells, (*(f"NOT AS PLANNED: {d}" for d in differences(spec, now)), *row.reasons)))
    return _aligned(columns, rows)


def _aligned(columns: tuple[str, ...], rows: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]) -> str:
    cells = [columns, *(row for row, _ in rows)]
    widths = [max(len(c) for c in column) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    out = [lines[0]]
    for line, (_, below) in zip(lines[1:], rows, strict=True):
        out += [line, *(f"    {text}" for text in below)]
    return "\n".join(out) + "\n"


def differences(spec: WorkerSpec, actual: ActualBinding) -> tuple[str, ...]:
    """Say in words where a process differs from its plan; nothing when it has what was planned."""
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
    out += _memory_differences(binding, actual)
    now = dict(actual.env)
    for name, value in spec.env:
        if now.get(name) != value:
            out.append(f"{name} is {now.get(name, 'not set')}, planned: {value}")
    return tuple(out)


def _memory_differences(binding: Binding, actual: ActualBinding) -> list[str]:
    planned = (binding.memory_policy, binding.memory_nodes)
    if binding.memory_policy == "none" or (actual.memory_policy, actual.memory_nodes) == planned:
        return []
    now = _memory(actual.memory_policy or "unknown", actual.memory_nodes)
    return [f"memory policy is {now}, planned: {_memory(*planned)}"]


def _memory(policy: str, nodes: CpuSet) -> str:
    return f"{nodes} {policy}" if nodes else policy


def _row(spec: WorkerSpec) -> BindingRow:
    binding, gpu = spec.binding, spec.gpu
    ports = [f"{nic.name}:{nic.port}" if nic.name != nic.interface else nic.name for nic in binding.nics]
    if binding.interface not in ("", *(n.name for n in binding.nics)):
        ports.append(f"({binding.interface})")
    return BindingRow(
        spec.name,
        _gpu(gpu) if gpu else "none",
        str(binding.cpuset),
        _memory(binding.memory_policy, binding.memory_nodes),
        " ".join(ports) or "-",
        "yes" if binding.shared_cores else "no",
        worker_reasons(spec),
    )


def _gpu(gpu: Gpu) -> str:
    size = f" {format_bytes(gpu.memory_bytes)}" if gpu.memory_bytes else ""
    return f"{gpu.pci} {gpu.model}{f' {gpu.mig}' if gpu.mig and gpu.mig not in gpu.model else ''}".rstrip() + size


def worker_reasons(spec: WorkerSpec) -> tuple[str, ...]:
    """Return why the worker is not tied as one would wish, and what is kept as the user set it."""
    kept = tuple(f"{name} is kept as you set it" for name in spec.kept_env)
    return (*spec.binding.reasons, *kept)

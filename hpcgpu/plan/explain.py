"""The bindings of a node's workers as a table, for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hpcgpu.model import WorkerSpec
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
    cells = [columns, *(r[:-1] for r in rows)]
    widths = [max(len(c) for c in column) for column in zip(*cells, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
    out = [lines[0]]
    for line, row in zip(lines[1:], rows, strict=True):
        out += [line, *(f"    {reason}" for reason in row.reasons)]
    return "\n".join(out) + "\n"


def _row(spec: WorkerSpec) -> BindingRow:
    binding, gpu = spec.binding, spec.gpu
    size = f" {format_bytes(gpu.memory_bytes)}" if gpu.memory_bytes else ""
    memory = f"{binding.memory_nodes} {binding.memory_policy}" if binding.memory_nodes else binding.memory_policy
    ports = [f"{nic.name}:{nic.port}" if nic.name != nic.interface else nic.name for nic in binding.nics]
    if binding.interface not in ("", *(n.name for n in binding.nics)):
        ports.append(f"({binding.interface})")
    return BindingRow(
        spec.name,
        f"{gpu.pci} {gpu.model}{f' {gpu.mig}' if gpu.mig and gpu.mig not in gpu.model else ''}".rstrip() + size,
        str(binding.cpuset),
        memory,
        " ".join(ports) or "-",
        "yes" if binding.shared_cores else "no",
        worker_reasons(spec),
    )


def worker_reasons(spec: WorkerSpec) -> tuple[str, ...]:
    """Return why the worker is not tied as one would wish, and what is kept as the user set it."""
    kept = tuple(f"{name} is kept as you set it" for name in spec.kept_env)
    return (*spec.binding.reasons, *kept)

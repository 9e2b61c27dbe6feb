"""Prometheus' metrics of workers in text format 0.0.4. By its practice names end with a unit, of sums with _total."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hpcgpu.report.energy import EnergyUse
from hpcgpu.report.workers import DIRECTIONS, TIERS, WorkerFacts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_METRICS = {  # kind and meaning
    "hpcgpu_memory_bytes": ("gauge", "Dask's data in each tier."),
    "hpcgpu_memory_limit_bytes": ("gauge", "Where spilling begins (device, process), and the device's size."),
    "hpcgpu_device_memory_used_bytes": ("gauge", "Memory in use on the device, by all of its users."),
    "hpcgpu_spill_moved_bytes_total": ("counter", "Bytes that the store has moved between tiers."),
    "hpcgpu_gpu_utilization_ratio": ("gauge", "Part of the time in which the GPU was in use."),
    "hpcgpu_worker_restarts_total": ("counter", "Processes that took the place of the worker's first one."),
    "hpcgpu_gpu_energy_joules_total": ("counter", "Energy of the whole GPU while it had a worker."),
    "hpcgpu_gpu_busy_energy_joules_total": ("counter", "Part of it while a task ran."),
    "hpcgpu_cpu_energy_joules_total": ("counter", "Energy of the node's CPUs while it had a worker."),
    "hpcgpu_binding_differences": ("gauge", "In how many ways the process differs from its plan."),
}
_Sample = tuple[str, Mapping[str, str], float | None]  # a metric, its labels, and the number; None: unknown


def render(rows: Sequence[WorkerFacts], energy: EnergyUse, *, is_folded: bool = False) -> str:
    """Format all metrics of GPUs, or (``is_folded``) of nodes; unknown numbers are left out."""
    lines = {name: [f"# HELP {name} {text}", f"# TYPE {name} {kind}"] for name, (kind, text) in _METRICS.items()}
    samples = (sample for gpu in rows for sample in _samples(gpu, is_folded=is_folded))
    for name, labels, number in (*samples, *_energy_samples(energy, is_folded=is_folded)):
        if number is not None:
            pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
            lines[name].append(f"{name}{{{pairs}}} {number}")
    return "".join(f"{line}\n" for metric in lines.values() for line in metric)


def _energy_samples(energy: EnergyUse, *, is_folded: bool) -> Iterator[_Sample]:
    """Yield the energy of each GPU, or of each node's GPUs, and of each node's CPUs."""
    total: dict[tuple[str, ...], tuple[float, float]] = {}
    for (node, pci), counter in energy.gpus.items():
        place: tuple[str, ...] = (node,) if is_folded else (node, pci)
        joules, busy = total.get(place, (0.0, 0.0))
        total[place] = joules + counter.joules, busy + counter.busy_joules
    for place, (joules, busy) in total.items():
        labels = dict(zip(("node", "pci"), place, strict=False))
        yield "hpcgpu_gpu_energy_joules_total", labels, joules
        yield "hpcgpu_gpu_busy_energy_joules_total", labels, busy
    for node, cpus in energy.nodes.items():
        yield "hpcgpu_cpu_energy_joules_total", {"node": node}, cpus.joules


def _samples(gpu: WorkerFacts, *, is_folded: bool) -> Iterator[_Sample]:
    """Yield the samples of a GPU's worker, or of a node."""
    mine = {"node": gpu.node} if is_folded else {"worker": gpu.name, "node": gpu.node, "gpu": gpu.gpu}
    for tier in TIERS:
        yield "hpcgpu_memory_bytes", {**mine, "tier": tier}, gpu.tiers.get(tier)
    for limit, nbytes in gpu.limits.items():
        yield "hpcgpu_memory_limit_bytes", {**mine, "of": limit}, nbytes
    yield "hpcgpu_device_memory_used_bytes", mine, gpu.device_used_bytes
    for way in DIRECTIONS:
        moved = gpu.moved[way].nbytes if way in gpu.moved else None
        yield "hpcgpu_spill_moved_bytes_total", {**mine, "direction": way}, moved
    percent = gpu.utilisation_percent
    yield "hpcgpu_gpu_utilization_ratio", mine, None if percent is None else percent / 100
    yield "hpcgpu_worker_restarts_total", mine, gpu.restarts
    yield "hpcgpu_binding_differences", mine, len(gpu.differences)

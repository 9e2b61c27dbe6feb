"""Prometheus' metrics of workers in text format 0.0.4. By its practice names end with a unit, of sums with _total."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    "hpcgpu_binding_differences": ("gauge", "In how many ways the process differs from its plan."),
}


def render(rows: Sequence[WorkerFacts], *, is_folded: bool = False) -> str:
    """Format all metrics of GPUs, or (``is_folded``) of nodes; unknown numbers are left out."""
    lines = {name: [f"# HELP {name} {text}", f"# TYPE {name} {kind}"] for name, (kind, text) in _METRICS.items()}
    for gpu in rows:
        for name, labels, number in _samples(gpu):
            if number is not None:
                mine = {"node": gpu.node} if is_folded else {"worker": gpu.name, "node": gpu.node, "gpu": gpu.gpu}
                pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in {**mine, **labels}.items())
                lines[name].append(f"{name}{{{pairs}}} {number}")
    return "".join(f"{line}\n" for metric in lines.values() for line in metric)


def _samples(gpu: WorkerFacts) -> Iterator[tuple[str, dict[str, str], float | None]]:
    """Yield a metric, labels beside those of the GPU, and the number; None: unknown."""
    for tier in TIERS:
        yield "hpcgpu_memory_bytes", {"tier": tier}, gpu.tiers.get(tier)
    for limit, nbytes in gpu.limits.items():
        yield "hpcgpu_memory_limit_bytes", {"of": limit}, nbytes
    yield "hpcgpu_device_memory_used_bytes", {}, gpu.device_used_bytes
    for way in DIRECTIONS:
        yield "hpcgpu_spill_moved_bytes_total", {"direction": way}, gpu.moved[way].nbytes if way in gpu.moved else None
    percent = gpu.utilisation_percent
    yield "hpcgpu_gpu_utilization_ratio", {}, None if percent is None else percent / 100
    yield "hpcgpu_worker_restarts_total", {}, gpu.restarts
    yield "hpcgpu_binding_differences", {}, len(gpu.differences)

"""Format the metrics of a run's GPUs in Prometheus' text format, version 0.0.4.

Names end with their unit, and those of sums with ``_total``, as Prometheus' naming practice requires.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from hpcgpu.report.workers import DIRECTIONS, TIERS, WorkerFacts

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


class _Metric(NamedTuple):
    """A metric and its samples."""

    name: str
    kind: str
    text: str
    label: str
    # of one GPU: the last label's value, and the number
    samples: Callable[[WorkerFacts], Iterable[tuple[str, float | None]]]


_METRICS = (
    _Metric(
        *("hpcgpu_memory_bytes", "gauge", "Dask's data in each tier.", "tier"),
        lambda g: [(tier, g.tiers.get(tier)) for tier in TIERS],
    ),
    _Metric(
        *("hpcgpu_memory_limit_bytes", "gauge", "Where spilling begins (device, process), and the device's size."),
        *("of", lambda g: list(g.limits.items())),
    ),
    _Metric(
        *("hpcgpu_device_memory_used_bytes", "gauge", "Memory in use on the device, by all of its users.", ""),
        lambda g: [("", g.device_used_bytes)],
    ),
    _Metric(
        *("hpcgpu_spill_moved_bytes_total", "counter", "Bytes that the store has moved between tiers.", "direction"),
        lambda g: [(way, g.moved[way].nbytes) for way in DIRECTIONS if way in g.moved],
    ),
    _Metric(
        *("hpcgpu_gpu_utilization_ratio", "gauge", "Part of the time in which the GPU was in use.", ""),
        lambda g: [("", None if g.utilisation_percent is None else g.utilisation_percent / 100)],
    ),
    _Metric(
        *("hpcgpu_worker_restarts_total", "counter", "Processes that took the place of the worker's first one.", ""),
        lambda g: [("", g.restarts)],
    ),
    _Metric(
        *("hpcgpu_binding_differences", "gauge", "In how many ways the process differs from its plan.", ""),
        lambda g: [("", len(g.differences))],
    ),
)


def render(gpus: Sequence[WorkerFacts]) -> str:
    """Format all metrics; unknown numbers are left out."""
    return "".join(f"{line}\n" for metric in _METRICS for line in _lines(metric, gpus))


def _lines(metric: _Metric, gpus: Sequence[WorkerFacts]) -> Iterator[str]:
    yield f"# HELP {metric.name} {metric.text}"
    yield f"# TYPE {metric.name} {metric.kind}"
    for gpu in gpus:
        base = {"worker": gpu.name, "node": gpu.node, "gpu": gpu.gpu}
        for value, number in metric.samples(gpu):
            if number is not None:
                labels = {**base, metric.label: value} if metric.label else base
                pairs = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())
                yield f"{metric.name}{{{pairs}}} {number}"

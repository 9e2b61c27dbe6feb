"""The summary of a run: lines for people, and plain data."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hpcgpu.plan.jobs.advice import advise
from hpcgpu.plan.jobs.usage import DIRECTION_TEXTS, RunUsage
from hpcgpu.units import counted, format_bytes, format_duration


@dataclass(frozen=True, slots=True)
class Summary:
    """A run's use, and advice for the next one; shown as lines in a terminal and in a notebook."""

    usage: RunUsage  # the figures

    @classmethod
    def read(cls, facts: Mapping[str, Any]) -> Self:
        """Restore a summary from the :meth:`facts` of another process."""
        return cls(RunUsage(**facts))

    def facts(self) -> dict[str, Any]:
        """Return the usage as plain data, under the names of its attributes."""
        values = {name: getattr(self.usage, name) for name in RunUsage.__slots__}
        return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    @property
    def advice(self) -> tuple[str, ...]:
        """The advice for the next run; () if the request fits, or the run was short."""
        return advise(self.usage)

    def as_dict(self) -> dict[str, Any]:
        """Return all as plain data: the figures with their units in their names, and the advice."""
        usage = self.usage
        return {
            **self.facts(),
            "gpu_hours": usage.gpu_s / 3600,
            "idle_gpu_minutes": usage.idle_gpu_s / 60,
            "advice": list(self.advice),
        }

    def as_json(self) -> str:
        """Return :meth:`as_dict` as one line of JSON; numbers have at most three decimals."""
        return json.dumps({name: round(v, 3) if isinstance(v, float) else v for name, v in self.as_dict().items()})

    @property
    def lines(self) -> tuple[str, ...]:
        """The summary for people, a few lines."""
        usage = self.usage
        peaks = [
            f"{tier} {format_bytes(size)}" + (f" of {format_bytes(limit)}" if limit else "")
            for tier, size in usage.peak_bytes.items()
            for limit in [usage.limit_bytes.get(tier)]
        ]
        moves = [
            f"{text} {format_bytes(n)}" for way, text in DIRECTION_TEXTS.items() if (n := usage.moved_bytes.get(way, 0))
        ]
        lines = (
            _time(usage),
            f"peak of one worker: {', '.join(peaks)}" if peaks else "",
            f"moved: {', '.join(moves)}" if moves else "nothing was spilled",
            *(f"next time: {line}" for line in self.advice),
        )
        return tuple(filter(None, lines))

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _time(usage: RunUsage) -> str:
    workers = counted(usage.gpus, "GPU") if usage.gpus else counted(usage.workers, "worker") + " without a GPU"
    parts = [f"{format_duration(int(usage.wall_s))} with {workers}"]
    if usage.gpus:
        parts.append(f"{usage.gpu_s / 3600:.2f} GPU hours")
    if usage.busy_share is not None:
        parts.append(f"a task ran in {usage.busy_share:.0%} of the workers' time")
    if usage.gpus:
        parts.append(f"{usage.idle_gpu_s / 60:.1f} GPU minutes idle")
    if usage.restarts:
        parts.append(f"{counted(usage.restarts, 'worker')} started anew")
    return ", ".join(parts)

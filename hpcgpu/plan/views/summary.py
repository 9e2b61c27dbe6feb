"""The summary of a run: lines for people, and plain data."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from hpcgpu.plan.jobs.advice import advise
from hpcgpu.plan.jobs.usage import DIRECTION_WORDS, RunUsage
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
        return {name: _plain(getattr(self.usage, name)) for name in RunUsage.__slots__}

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
        found = {name: round(v, 3) if isinstance(v, float) else v for name, v in self.as_dict().items()}
        return json.dumps(found)

    @property
    def lines(self) -> tuple[str, ...]:
        """The summary for people, a few lines."""
        return tuple(filter(None, (_time(self.usage), _peaks(self.usage), _moves(self.usage), *_next(self))))

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def _plain(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else value


def _time(usage: RunUsage) -> str:
    had = counted(usage.gpus, "GPU") if usage.gpus else counted(usage.workers, "worker") + " without a GPU"
    said = [f"{format_duration(int(usage.wall_s))} with {had}"]
    if usage.gpus:
        said.append(f"{usage.gpu_s / 3600:.2f} GPU hours")
    if usage.busy_share is not None:
        said.append(f"a task ran in {usage.busy_share:.0%} of the workers' time")
    if usage.gpus:
        said.append(f"{usage.idle_gpu_s / 60:.1f} GPU minutes idle")
    if usage.restarts:
        said.append(f"{counted(usage.restarts, 'worker')} started anew")
    return ", ".join(said)


def _peaks(usage: RunUsage) -> str:
    names = {"device": "device", "host": "host", "disk": "disk", "process": "process"}
    said = []
    for what, size in usage.peak_bytes.items():
        limit = usage.limit_bytes.get(what)
        said.append(f"{names[what]} {format_bytes(size)}{f' of {format_bytes(limit)}' if limit else ''}")
    return f"peak of one worker: {', '.join(said)}" if said else ""


def _moves(usage: RunUsage) -> str:
    moved = [
        f"{words} {format_bytes(n)}" for way, words in DIRECTION_WORDS.items() if (n := usage.moved_bytes.get(way, 0))
    ]
    return f"moved: {', '.join(moved)}" if moved else "nothing was spilled"


def _next(summary: Summary) -> tuple[str, ...]:
    return tuple(f"next time: {line}" for line in summary.advice)

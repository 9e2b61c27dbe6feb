"""The page "GPUs" of the dashboard: memory by tier, utilisation, spill traffic and bindings of all GPUs, 4 or 400.

All of it is one Bokeh document of one browser tab. It reads the usage while it is open; a closed page costs nothing.
"""

from __future__ import annotations

import functools
import html
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.layouts import column, row
from bokeh.models import Column, Div
from distributed import Scheduler
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from hpcgpu.deploy.dashboard import UsagePlugin, figures
from hpcgpu.report.workers import DIRECTIONS, TIERS, Moved, WorkerFacts, headline

# Workers send heartbeats 0.5 to 3 s apart (distributed 2026.8.0): with many workers, seldom.
_FEW, _OFTEN_MS, _SELDOM_MS = 64, 1000, 3000
_SAMPLES = 200
_ALL = "all GPUs"
# Rows of a sample: bytes by tier, bytes moved by direction, part of the device's limit, utilisation in percent.
SHARE, UTILISATION = len(TIERS) + len(DIRECTIONS), len(TIERS) + len(DIRECTIONS) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """All GPUs at one moment."""

    time_s: float  # since the epoch
    names: tuple[str, ...]  # of the workers
    values: np.ndarray  # float64, shape (rows, GPUs); NaN: unknown

    @classmethod
    def of(cls, time_s: float, gpus: Sequence[WorkerFacts]) -> Sample:
        """Return a sample of these facts."""
        values = np.array([_row(g) for g in gpus], np.float64).reshape(len(gpus), UTILISATION + 1).T
        return cls(time_s, tuple(g.name for g in gpus), values)


def _row(g: WorkerFacts) -> tuple[float | None, ...]:
    tiers, moved = g.tiers, g.moved
    share = g.device_share
    return (
        *(tiers.get(tier, 0) for tier in TIERS),
        *(moved.get(way, Moved()).nbytes for way in DIRECTIONS),
        None if share is None else 100 * share,
        g.utilisation_percent,
    )


class History:
    """The last ``length`` samples."""

    def __init__(self, length: int) -> None:
        self.samples: deque[Sample] = deque(maxlen=length)

    def add(self, sample: Sample) -> bool:
        """Add a sample; return True if it has the workers of the sample before."""
        same = bool(self.samples) and self.samples[-1].names == sample.names
        self.samples.append(sample)
        return same

    def series(self, worker: str) -> dict[str, list[float]]:
        """Return times in ms, bytes by tier, and bytes per second by direction, of one worker or, for "", of all."""
        # A worker that is restarted begins to count anew: negative rates are 0.
        out: dict[str, list[float]] = {name: [] for name in ("time", *TIERS, *DIRECTIONS)}
        before: tuple[float, np.ndarray] | None = None
        for sample in self.samples:
            chosen = [i for i, name in enumerate(sample.names) if name == worker] if worker else slice(None)
            sums = sample.values[: len(TIERS) + len(DIRECTIONS), chosen].sum(axis=1)
            moved = sums[len(TIERS) :]
            past_s, past = before or (sample.time_s, moved)
            rates = np.maximum(moved - past, 0) / max(sample.time_s - past_s, 1e-3)
            before = sample.time_s, moved
            for name, value in zip(out, (1e3 * sample.time_s, *sums[: len(TIERS)], *rates), strict=True):
                out[name].append(float(value))
        return out

    def strip(self, row: int) -> list[np.ndarray]:
        """Return each sample's row as an image, one pixel wide, float32 of shape (GPUs of now, 1)."""
        names = self.samples[-1].names
        return [strip_column(sample, row, names) for sample in self.samples]


def strip_column(sample: Sample, row: int, names: tuple[str, ...]) -> np.ndarray:
    """Return one row of a sample as an image, its GPUs in the order of ``names``, the first on top."""
    values = sample.values[row]
    if sample.names != names:
        by_name = dict(zip(sample.names, values, strict=True))
        values = np.array([by_name.get(name, np.nan) for name in names])
    return values[::-1, None].astype(np.float32)


def gpus_doc(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Fill the document of a browser tab; Bokeh calls this when the page is opened."""
    page = GpuPage(scheduler.plugins[UsagePlugin.name])
    page.update()
    add_periodic_callback(doc, page, page.every_ms)
    doc.title = "Dask: GPUs"
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


class GpuPage:
    """The page of a tab, with the facts of the usage plugin."""

    def __init__(self, usage: UsagePlugin) -> None:
        self._usage = usage
        self._history, self._gpus = History(_SAMPLES), list[WorkerFacts]()
        self._chosen = ""
        self._fixed: tuple[object, ...] = ()
        self._head = Div(sizing_mode="stretch_width")
        self._bars = figures.Bars()
        self._strips = {
            SHARE: figures.Strip("Dask's data on each device over time, % of its limit"),
            UTILISATION: figures.Strip("Utilisation of each GPU over time, %"),
        }
        self._lines = figures.Lines()
        self._table = figures.Table()
        for source in (self._bars.source, self._table.source):
            source.selected.on_change("indices", functools.partial(self._choose, source))
        self.root: Column = column(
            self._head,
            self._bars.root,
            row(*(strip.root for strip in self._strips.values()), sizing_mode="stretch_width"),
            row(self._lines.memory, self._lines.traffic, sizing_mode="stretch_width"),
            self._table.root,
            sizing_mode="stretch_width",
        )

    @property
    def every_ms(self) -> int:
        """The interval of updates: about that of a worker's heartbeats."""
        return _OFTEN_MS if len(self._gpus) <= _FEW else _SELDOM_MS

    def update(self) -> None:
        """Show the present state; Bokeh calls this at intervals while the page is open."""
        self._gpus = self._usage.gpus()
        self._head.text = _head(self._gpus)
        if not self._gpus:
            return
        sample = Sample.of(time.time(), self._gpus)
        same = self._history.add(sample)
        for number, strip in self._strips.items():
            if same:
                strip.append(sample.time_s, strip_column(sample, number, sample.names))
            else:
                strip.show([s.time_s for s in self._history.samples], self._history.strip(number), sample.names)
        self._bars.show(self._gpus, fresh=not same)
        if (fixed := tuple((g.name, *g.differences, g.restarts) for g in self._gpus)) != self._fixed:
            self._fixed = fixed
            self._table.show(self._gpus)
        if self._chosen not in {"", *sample.names}:
            self._chosen = ""
        self._lines.show(self._history.series(self._chosen), self._chosen or _ALL)

    def _choose(self, source: Any, attr: str, old: Sequence[int], new: Sequence[int]) -> None:
        """Show one GPU over time, tapped as a bar or a row; Bokeh calls this."""
        names = source.data["name"]
        chosen = names[new[0]] if new and new[0] < len(names) else ""
        if chosen != self._chosen:
            self._chosen = chosen
            self._lines.show(self._history.series(chosen), chosen or _ALL)


def _head(gpus: Sequence[WorkerFacts]) -> str:
    """Return the headline, with differences from the plan in red; names are not broken at their hyphens."""
    if not gpus:
        return "no worker with a GPU is registered; workers of hpcgpu report their GPUs in heartbeats"
    wrong = [g for g in gpus if g.differences]
    text = f"<span style='font-size:14px'>{html.escape(headline(gpus))}"
    if wrong:
        names = [f"<span style='white-space:nowrap'>{html.escape(g.name)}</span>" for g in wrong[:5]]
        listed = ", ".join([*names, "…"] if len(wrong) > 5 else names)
        text += f"; <b style='color:{figures.RED}'>{len(wrong)} of {len(gpus)} workers not as planned: {listed}</b>"
    return f"{text}</span>"

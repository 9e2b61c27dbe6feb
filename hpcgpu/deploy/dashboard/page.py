"""The page "GPUs" of the dashboard: memory by tier, utilisation, spill traffic and bindings of 4 or 4,000 GPUs."""

from __future__ import annotations

import asyncio
import functools
import html
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
from bokeh import models
from bokeh.layouts import column, row
from bokeh.palettes import Viridis256
from bokeh.plotting import figure
from distributed import Scheduler
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from hpcgpu.deploy.dashboard.usage import UsagePlugin
from hpcgpu.plan.jobs.job_text import absence
from hpcgpu.report.workers import DIRECTIONS, TIER_COLOURS, TIERS, Moved, WorkerFacts, headline
from hpcgpu.units import format_bytes

RED = "#CC3311"
# Moves down have the colour of their target tier; moves up from disk have another one.
_WAYS = dict(
    zip(DIRECTIONS, (TIER_COLOURS["host"], TIER_COLOURS["disk"], "#AA3377", TIER_COLOURS["device"]), strict=True)
)
_ABSENT = "#E8E8E8"
_HEIGHT, _HIGH = 220, 320
_BYTES = """
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let value = tick, i = 0;
    while (Math.abs(value) >= 1024 && i < units.length - 1) { value /= 1024; i += 1; }
    return (Number.isInteger(value) ? value : value.toFixed(1)) + " " + units[i] + unit;
"""
_CLOCK = "return new Date(tick).toTimeString().slice(0, 8)"  # in the browser's time zone
_CELL = (
    "<div title='<%- value %>' style='white-space:normal;overflow-wrap:anywhere;line-height:14px;max-height:70px;"
    "overflow:hidden;STYLE'><%= _.escape(value).replace(/,/g, ',<wbr>') %></div>"
)
_FEW = 64  # with more GPUs, marks are in one line above all bars
_ROW = 74  # of the table: five lines; the whole text stands in a tooltip
_ACROSS, _DOWN = 16, 12  # names per axis


_TITLES = (
    "Dask's data of each {}'s workers by tier; tap one to see it over time",
    "Dask's data on the devices of each {} over time, %",
    "Utilisation of each {} over time, %",
)
# Intervals of updates. Workers send heartbeats 0.5 to 3 s apart, 4,000 workers 21 s (distributed 2026.8.0): with many
# workers, seldom.
_SMALL, _OFTEN_MS, _SELDOM_MS, _EACH_MS = 64, 1000, 3000, 5
_SAMPLES = 200
_ALL = "all GPUs"
# Rows of a sample: bytes by tier, bytes moved by direction, part of the device's limit, utilisation in percent.
SHARE, UTILISATION = len(TIERS) + len(DIRECTIONS), len(TIERS) + len(DIRECTIONS) + 1


def _figure(**more: Any) -> Any:  # bokeh has no types
    plot = figure(title="", tools="", toolbar_location=None, height=_HEIGHT, sizing_mode="stretch_width", **more)
    if more.get("x_axis_type") == "datetime":
        plot.xaxis.formatter = models.CustomJSTickFormatter(code=_CLOCK)
    plot.xgrid.visible = False
    plot.xaxis.minor_tick_line_color = plot.yaxis.minor_tick_line_color = None
    return plot


def _in_bytes(plot: Any, unit: str = "") -> None:
    """Count a figure's y axis in bytes, from 0, and put its legend beside it."""
    plot.yaxis.ticker = models.BasicTicker(base=1024, mantissas=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    plot.yaxis.formatter = models.CustomJSTickFormatter(args={"unit": unit}, code=_BYTES)
    plot.y_range.start = 0
    legend = plot.legend[0]
    plot.add_layout(legend, "right")
    legend.border_line_color, legend.background_fill_alpha = None, 0
    legend.label_text_font_size, legend.padding, legend.spacing = "9pt", 2, 0


def _name_places(axis: Any, names: Sequence[str], places: Sequence[float], room: int) -> None:
    """Label an axis with names at equal distances, as many as have room."""
    step = -(-len(names) // room)
    axis.ticker = models.FixedTicker(ticks=list(places[::step]))
    axis.major_label_overrides = dict(zip(places[::step], names[::step], strict=True))


class Bars:
    """Each worker's data by tier, now: one bar, with a red triangle over a worker that is not as planned."""

    def __init__(self) -> None:
        self.source = models.ColumnDataSource({name: [] for name in (*self._columns(()),)})
        self.root = _figure(x_range=(0, 1))
        look = {"color": [TIER_COLOURS[tier] for tier in TIERS], "line_color": None, "legend_label": list(TIERS)}
        self.root.vbar_stack([f"{tier}_now" for tier in TIERS], x="x", width=0.85, source=self.source, **look)
        limit = {"x0": "left", "x1": "right", "y0": "limit", "y1": "limit", "legend_label": "spilling begins"}
        self.root.segment(**limit, source=self.source, color="black", line_width=2)
        mark = {"marker": "inverted_triangle", "size": 11, "fill_color": RED, "line_color": "black"}
        self.root.scatter("x", "mark", **mark, source=self.source, legend_label="not as planned")
        _in_bytes(self.root)
        hover = models.HoverTool(tooltips=[("worker", "@name"), ("GPU", "@gpu"), ("now", "@said"), ("", "@wrong")])
        self.root.add_tools(hover, models.TapTool())

    def show(self, gpus: Sequence[WorkerFacts], *, fresh: bool) -> None:
        """Show these GPUs; ``fresh``: the workers have changed."""
        self.source.data = self._columns(gpus)
        if fresh:
            self.root.x_range.start, self.root.x_range.end = -0.6, len(gpus) - 0.4
            _name_places(self.root.xaxis, [g.name for g in gpus], range(len(gpus)), _ACROSS)
            self.root.xaxis.major_label_orientation = "horizontal" if len(gpus) <= 8 else 0.5

    @staticmethod
    def _columns(gpus: Sequence[WorkerFacts]) -> dict[str, Any]:
        tiers = np.array([[g.tiers.get(tier, 0) for g in gpus] for tier in TIERS], np.float64)
        x, limit = np.arange(len(gpus), dtype=np.float64), np.array([g.limits.get("device", np.nan) for g in gpus])
        tops = tiers.sum(axis=0)
        over = 0.06 * max(tops.max(initial=0), np.nan_to_num(limit).max(initial=0))
        wrong = np.array([bool(g.differences) for g in gpus], bool)
        return {
            **{f"{tier}_now": values for tier, values in zip(TIERS, tiers, strict=True)},
            **{"x": x, "left": x - 0.42, "right": x + 0.42},
            "limit": limit.astype(np.float64),
            "mark": np.where(wrong, over + (tops if len(gpus) <= _FEW else tops.max(initial=0)), np.nan),
            "name": [g.name for g in gpus],
            "gpu": [g.gpu_text for g in gpus],
            "said": [_describe_tiers(g) for g in gpus],
            "wrong": ["; ".join(g.differences) for g in gpus],
        }


def _describe_tiers(g: WorkerFacts) -> str:
    parts = [f"{tier} {g.use(tier)}" for tier in TIERS]
    if g.utilisation_percent is not None:
        parts.append(f"utilisation {g.utilisation_percent} %")
    return ", ".join(parts)


class Strip:
    """A row of the samples over time, as colour: a row of pixels for each GPU, the first on top."""

    def __init__(self, row: int) -> None:
        self._row = row
        self.source = models.ColumnDataSource({"image": [], "x": [], "dw": [], "dh": []})
        self.root = _figure(x_axis_type="datetime", y_range=(0, 1))
        colours = models.LinearColorMapper(Viridis256, low=0, high=100, nan_color=_ABSENT)
        self.root.image("image", x="x", y=0, dw="dw", dh="dh", color_mapper=colours, source=self.source)
        self.root.add_layout(models.ColorBar(color_mapper=colours, width=10, padding=2), "right")
        self.root.x_range.range_padding = 0

    def show(self, samples: Sequence[Sample], *, fresh: bool) -> None:
        """Add the last sample; ``fresh``: the workers have changed, so show all samples anew."""
        names, new = samples[-1].names, list(samples if fresh else (samples[-1],))
        times_s = [sample.time_s for sample in samples]
        begin_s = 2 * times_s[0] - times_s[1] if len(times_s) > 1 else times_s[0] - 1.0
        times = 1e3 * np.array([begin_s, *times_s][-len(new) - 1 :])
        images = [strip_column(sample, self._row, names) for sample in new]
        data = {"image": images, "x": times[:-1], "dw": np.diff(times), "dh": [float(len(names))] * len(new)}
        if not fresh:
            self.source.stream(data, rollover=_SAMPLES)
            return
        self.source.data = data
        self.root.y_range.end = len(names)
        _name_places(self.root.yaxis, [*reversed(names)], [i + 0.5 for i in range(len(names))], _DOWN)
        self.root.height = _HEIGHT if len(names) <= _DOWN else _HIGH


class Lines:
    """One worker, or all together, over time: data by tier, and the bytes that are moved."""

    def __init__(self) -> None:
        self.source = models.ColumnDataSource({name: [] for name in ("time", *TIERS, *DIRECTIONS)})
        self.memory = _figure(x_axis_type="datetime")
        self.memory.varea_stack(
            list(TIERS), x="time", color=[TIER_COLOURS[t] for t in TIERS], legend_label=list(TIERS), source=self.source
        )
        self.traffic = _figure(x_axis_type="datetime")
        for way, colour in _WAYS.items():
            label = way.replace("_", " ")
            self.traffic.line("time", way, color=colour, line_width=2, legend_label=label, source=self.source)
        for plot, unit in ((self.memory, ""), (self.traffic, "/s")):
            _in_bytes(plot, unit)
            plot.x_range.range_padding = 0

    def show(self, series: Mapping[str, Sequence[float]], title: str) -> None:
        """Show a series."""
        self.memory.title.text = f"Dask's data by tier over time: {title}"
        self.traffic.title.text = f"Spilled and unspilled, bytes per second: {title}"
        self.source.data = {name: np.asarray(values) for name, values in series.items()}


class Table:
    """The workers' bindings; differences from the plan are red."""

    _COLUMNS: ClassVar[dict[str, tuple[str, int, Callable[[WorkerFacts], object]]]] = {
        "name": ("worker", 85, lambda g: g.name),
        "gpu": ("GPU", 140, lambda g: g.gpu_text),
        "cores": ("cores", 115, lambda g: g.cores),
        "memory": ("memory", 90, lambda g: g.numa),
        "nic": ("NIC", 70, lambda g: g.nic),
        "limit": ("limit", 70, lambda g: format_bytes(g.limits.get("device", 0))),
        "restarts": ("restarts", 55, lambda g: g.restarts),
        "wrong": ("not as planned", 160, lambda g: "; ".join(g.differences)),
        "reasons": ("why so", 265, lambda g: "; ".join(g.reasons)),
    }

    def __init__(self) -> None:
        self.source = models.ColumnDataSource({name: [] for name in self._COLUMNS})
        styles = dict.fromkeys(self._COLUMNS, "") | {"wrong": f"color:{RED};font-weight:bold"}
        cells = {name: models.HTMLTemplateFormatter(template=_CELL.replace("STYLE", styles[name])) for name in styles}
        columns = [
            models.TableColumn(field=name, title=title, width=width, formatter=cells[name])
            for name, (title, width, _) in self._COLUMNS.items()
        ]
        options = {"autosize_mode": "none", "row_height": _ROW, "index_position": None}
        self.root = models.DataTable(
            source=self.source, columns=columns, height=60, sizing_mode="stretch_width", **options
        )

    def show(self, gpus: Sequence[WorkerFacts]) -> None:
        """Show these workers, first those that are not as planned."""
        gpus = sorted(gpus, key=lambda g: not g.differences)
        self.source.data = {name: [read(g) for g in gpus] for name, (_, _, read) in self._COLUMNS.items()}
        self.root.height = 27 + _ROW * min(6, len(gpus))
        first, *others = self.root.columns
        first.title = "node" if gpus[0].name == gpus[0].node else "worker"
        for each in others:  # nodes have no cores
            each.visible = each.field == "wrong" or any(map(str, self.source.data[each.field]))
        widths = {name: width for name, (_, width, _) in self._COLUMNS.items()}
        (wrong,) = (each for each in others if each.field == "wrong")
        wrong.width = widths["wrong"] + sum(widths[each.field] for each in others if not each.visible)


class Sample(NamedTuple):
    """All GPUs at one moment."""

    time_s: float  # since the epoch
    names: tuple[str, ...]  # of the workers
    values: np.ndarray  # float64, shape (rows, GPUs); NaN: unknown


def _row(g: WorkerFacts) -> tuple[float | None, ...]:
    share = g.device_share
    return (
        *(g.tiers.get(tier, 0) for tier in TIERS),
        *(g.moved.get(way, Moved()).nbytes for way in DIRECTIONS),
        None if share is None else 100 * share,
        g.utilisation_percent,
    )


class History:
    """The last ``length`` samples."""

    def __init__(self, length: int) -> None:
        self.samples: deque[Sample] = deque(maxlen=length)

    def add(self, time_s: float, gpus: Sequence[WorkerFacts]) -> bool:
        """Add a sample of these facts; return True if it has the workers of the sample before."""
        values = np.array([_row(g) for g in gpus], np.float64).reshape(len(gpus), UTILISATION + 1).T
        sample = Sample(time_s, tuple(g.name for g in gpus), values)
        same = bool(self.samples) and self.samples[-1].names == sample.names
        self.samples.append(sample)
        return same

    def series(self, worker: str) -> dict[str, list[float]]:
        """Return times in ms, bytes by tier, and bytes per second by direction, of one worker or, for "", of all."""
        rows = len(TIERS) + len(DIRECTIONS)
        chosen = [np.array([worker in ("", name) for name in sample.names]) for sample in self.samples]
        sums = np.array([s.values[:rows, c].sum(axis=1) for s, c in zip(self.samples, chosen, strict=True)])
        times = np.array([sample.time_s for sample in self.samples])
        moved = np.diff(sums[:, len(TIERS) :], axis=0, prepend=sums[:1, len(TIERS) :])
        seconds = np.maximum(np.diff(times, prepend=times[:1]), 1e-3)
        # a worker that is restarted begins to count anew: negative rates are 0
        columns = np.column_stack([1e3 * times, sums[:, : len(TIERS)], np.maximum(moved, 0) / seconds[:, None]])
        return dict(zip(("time", *TIERS, *DIRECTIONS), columns.T.tolist(), strict=True))


def strip_column(sample: Sample, row: int, names: tuple[str, ...]) -> np.ndarray:
    """Return a row of a sample as an image, float32 of shape (GPUs, 1), in the order of ``names``, the first on top."""
    values = sample.values[row]
    if sample.names != names:
        by_name = dict(zip(sample.names, values, strict=True))
        values = np.array([by_name.get(name, np.nan) for name in names])
    return values[::-1, None].astype(np.float32)


def gpus_doc(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Fill the document of a browser tab; Bokeh calls this when the page is opened."""
    usage = scheduler.plugins[UsagePlugin.name]
    page, count = GpuPage(usage, scheduler.handlers.get("hpcgpu_absent", tuple)), usage.count
    # distributed's add_periodic_callback awaits no coroutine; as there, Bokeh's callbacks do not keep the page
    doc.components, last = {page}, weakref.ref(page)

    async def update() -> None:
        if present := last():
            await present.update()

    doc.add_next_tick_callback(update)
    doc.add_periodic_callback(update, _OFTEN_MS if count <= _SMALL else max(_SELDOM_MS, _EACH_MS * count))
    doc.title = "Dask: GPUs"
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


class GpuPage:
    """The page of a tab, with the facts of the usage plugin, and node and reason of each worker that is ``absent``."""

    def __init__(self, usage: UsagePlugin, absent: Callable[[], Collection[tuple[str, str]]] = tuple) -> None:
        self._usage, self._absent = usage, absent
        self._history, self._gpus = History(_SAMPLES), list[WorkerFacts]()
        self._chosen = ""
        self._fixed: tuple[object, ...] = ()
        self._head = models.Div(sizing_mode="stretch_width")
        self._bars = Bars()
        self._strips = (Strip(SHARE), Strip(UTILISATION))
        self._lines = Lines()
        self._table = Table()
        for source in (self._bars.source, self._table.source):
            source.selected.on_change("indices", functools.partial(self._choose, source))
        self.root: models.Column = column(
            self._head,
            self._bars.root,
            row(*(strip.root for strip in self._strips), sizing_mode="stretch_width"),
            row(self._lines.memory, self._lines.traffic, sizing_mode="stretch_width"),
            self._table.root,
            sizing_mode="stretch_width",
        )

    async def update(self) -> None:
        """Show the present state; Bokeh calls this at intervals while the page is open."""
        gpus, rows = await self._usage.rows()
        for _ in self._parts(gpus, rows):
            await asyncio.sleep(0)

    def _parts(self, gpus: list[WorkerFacts], rows: list[WorkerFacts]) -> Iterator[None]:
        """Show the parts of the page, one after the other: all together hold the scheduler's loop for long."""
        self._head.text = _head(gpus, absence(self._absent()))
        yield
        if not gpus:
            return
        self._gpus = rows
        fresh = not self._history.add(time.time(), self._gpus)
        for plot, title in zip((self._bars.root, *(strip.root for strip in self._strips)), _TITLES, strict=True):
            plot.title.text = title.format("GPU" if rows is gpus else "node")
        for strip in self._strips:
            yield
            strip.show(self._history.samples, fresh=fresh)
        yield
        self._bars.show(self._gpus, fresh=fresh)
        yield
        if (fixed := tuple((g.name, *g.differences, g.restarts) for g in self._gpus)) != self._fixed:
            self._fixed = fixed
            self._table.show(self._gpus)
        if self._chosen not in {"", *(g.name for g in self._gpus)}:
            self._chosen = ""
        self._lines.show(self._history.series(self._chosen), self._chosen or _ALL)

    def _choose(self, source: Any, attr: str, old: Sequence[int], new: Sequence[int]) -> None:
        """Show one GPU over time, tapped as a bar or a row; Bokeh calls this."""
        names = source.data["name"]
        chosen = names[new[0]] if new and new[0] < len(names) else ""
        if chosen != self._chosen:
            self._chosen = chosen
            self._lines.show(self._history.series(chosen), chosen or _ALL)


def _head(gpus: Sequence[WorkerFacts], absence: str) -> str:
    """Return the headline, with what is not as planned in red; names are not broken at their hyphens."""
    away = f"<br><b style='color:{RED}'>{html.escape(absence)}</b>" if absence else ""
    if not gpus:
        return f"no worker with a GPU is registered; workers of hpcgpu report their GPUs in heartbeats{away}"
    wrong = [g for g in gpus if g.differences]
    text = f"<span style='font-size:14px'>{html.escape(headline(gpus))}"
    if wrong:
        names = [f"<span style='white-space:nowrap'>{html.escape(g.name)}</span>" for g in wrong[:5]]
        listed = ", ".join([*names, "…"] if len(wrong) > 5 else names)
        text += f"; <b style='color:{RED}'>{len(wrong)} of {len(gpus)} workers not as planned: {listed}</b>"
    return f"{text}{away}</span>"

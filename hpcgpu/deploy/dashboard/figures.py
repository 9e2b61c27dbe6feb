"""The parts of the page "GPUs": bars of now, strips and lines over time, and the table of bindings.

They are made for 4 GPUs and for 400: a bar and a row of pixels for each, and names where there is room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import (
    BasicTicker,
    ColorBar,
    ColumnDataSource,
    CustomJSTickFormatter,
    DataTable,
    FixedTicker,
    HoverTool,
    HTMLTemplateFormatter,
    LinearColorMapper,
    TableColumn,
    TapTool,
)
from bokeh.palettes import Viridis256
from bokeh.plotting import figure

from hpcgpu.report.workers import DIRECTIONS, TIER_COLOURS, TIERS, WorkerFacts
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


def _figure(title: str, **more: Any) -> Any:  # bokeh has no types
    plot = figure(title=title, tools="", toolbar_location=None, height=_HEIGHT, sizing_mode="stretch_width", **more)
    if more.get("x_axis_type") == "datetime":
        plot.xaxis.formatter = CustomJSTickFormatter(code=_CLOCK)
    plot.xgrid.visible = False
    plot.xaxis.minor_tick_line_color = plot.yaxis.minor_tick_line_color = None
    return plot


def _in_bytes(plot: Any, unit: str = "") -> None:
    """Count a figure's y axis in bytes, from 0, and put its legend beside it."""
    plot.yaxis.ticker = BasicTicker(base=1024, mantissas=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512])
    plot.yaxis.formatter = CustomJSTickFormatter(args={"unit": unit}, code=_BYTES)
    plot.y_range.start = 0
    legend = plot.legend[0]
    plot.add_layout(legend, "right")
    legend.border_line_color, legend.background_fill_alpha = None, 0
    legend.label_text_font_size, legend.padding, legend.spacing = "9pt", 2, 0


def _name_places(axis: Any, names: Sequence[str], places: Sequence[float], room: int) -> None:
    """Label an axis with names at equal distances, as many as have room."""
    step = -(-len(names) // room)
    axis.ticker = FixedTicker(ticks=list(places[::step]))
    axis.major_label_overrides = dict(zip(places[::step], names[::step], strict=True))


class Bars:
    """Each worker's data by tier, now: one bar, with a red triangle over a worker that is not as planned."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in (*self._columns(()),)})
        self.root = _figure("Dask's data of each GPU's worker by tier; tap one to see it over time", x_range=(0, 1))
        for tier, below in zip(TIERS, ("", *TIERS), strict=False):
            self.root.vbar(
                x="x",
                bottom=f"{below}_top" if below else 0,
                top=f"{tier}_top",
                width=0.85,
                source=self.source,
                color=TIER_COLOURS[tier],
                line_color=None,
                legend_label=tier,
            )
        limit = {"x0": "left", "x1": "right", "y0": "limit", "y1": "limit", "legend_label": "spilling begins"}
        self.root.segment(**limit, source=self.source, color="black", line_width=2)
        mark = {"marker": "inverted_triangle", "size": 11, "fill_color": RED, "line_color": "black"}
        self.root.scatter("x", "mark", **mark, source=self.source, legend_label="not as planned")
        _in_bytes(self.root)
        hover = HoverTool(tooltips=[("worker", "@name"), ("GPU", "@gpu"), ("now", "@said"), ("", "@wrong")])
        self.root.add_tools(hover, TapTool())

    def show(self, gpus: Sequence[WorkerFacts], *, fresh: bool) -> None:
        """Show these GPUs; ``fresh``: the workers have changed."""
        self.source.data = self._columns(gpus)
        if fresh:
            self.root.x_range.start, self.root.x_range.end = -0.6, len(gpus) - 0.4
            _name_places(self.root.xaxis, [g.name for g in gpus], range(len(gpus)), _ACROSS)
            self.root.xaxis.major_label_orientation = "horizontal" if len(gpus) <= 8 else 0.5

    @staticmethod
    def _columns(gpus: Sequence[WorkerFacts]) -> dict[str, Any]:
        tops = np.cumsum([[g.tiers.get(t, 0) for t in TIERS] for g in gpus] or np.zeros((0, 3)), axis=1)
        x, limit = np.arange(len(gpus), dtype=np.float64), np.array([g.limits.get("device", np.nan) for g in gpus])
        over = 0.06 * max(tops.max(initial=0), np.nan_to_num(limit).max(initial=0))
        wrong = np.array([bool(g.differences) for g in gpus], bool)
        return {
            **{f"{tier}_top": tops[:, i].astype(np.float64) for i, tier in enumerate(TIERS)},
            **{"x": x, "left": x - 0.42, "right": x + 0.42},
            "limit": limit.astype(np.float64),
            "mark": np.where(wrong, over + (tops[:, -1] if len(gpus) <= _FEW else tops.max(initial=0)), np.nan),
            "name": [g.name for g in gpus],
            "gpu": [g.gpu_text for g in gpus],
            "said": [_describe_tiers(g) for g in gpus],
            "wrong": ["; ".join(g.differences) for g in gpus],
        }


def _describe_tiers(g: WorkerFacts) -> str:
    parts = [f"{tier} {format_bytes(g.tiers.get(tier, 0))}" for tier in TIERS]
    if limit := g.limits.get("device"):
        parts[0] += f" of {format_bytes(limit)}"
    if g.utilisation_percent is not None:
        parts.append(f"utilisation {g.utilisation_percent} %")
    return ", ".join(parts)


class Strip:
    """A number of each GPU over time, as colour: a row of pixels for each GPU, the first on top."""

    def __init__(self, title: str) -> None:
        self.source = ColumnDataSource({"image": [], "x": [], "dw": [], "dh": []})
        self.root = _figure(title, x_axis_type="datetime", y_range=(0, 1))
        colours = LinearColorMapper(Viridis256, low=0, high=100, nan_color=_ABSENT)
        self.root.image("image", x="x", y=0, dw="dw", dh="dh", color_mapper=colours, source=self.source)
        self.root.add_layout(ColorBar(color_mapper=colours, width=10, padding=2), "right")
        self.root.x_range.range_padding = 0
        self._last_s = 0.0
        self._length = 0

    def append(self, time_s: float, image: np.ndarray) -> None:
        """Add one sample of the same workers."""
        self._length = min(self._length + 1, 200)
        self.source.stream(self._columns([self._last_s, time_s], [image]), rollover=200)
        self._last_s = time_s

    def show(self, times_s: Sequence[float], images: Sequence[np.ndarray], names: Sequence[str]) -> None:
        """Show all samples anew, because the workers have changed."""
        begin_s = times_s[0] - (times_s[1] - times_s[0] if len(times_s) > 1 else 1.0)
        self.source.data = self._columns([begin_s, *times_s], images)
        self._last_s = times_s[-1]
        self.root.y_range.end = len(names)
        _name_places(self.root.yaxis, [*reversed(names)], [i + 0.5 for i in range(len(names))], _DOWN)
        self.root.height = _HEIGHT if len(names) <= _DOWN else _HIGH

    @staticmethod
    def _columns(times_s: Sequence[float], images: Sequence[np.ndarray]) -> dict[str, Any]:
        times = 1e3 * np.asarray(times_s)
        dh = [float(len(image)) for image in images]
        return {"image": list(images), "x": times[:-1], "dw": np.diff(times), "dh": dh}


class Lines:
    """One worker, or all together, over time: data by tier, and the bytes that are moved."""

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in ("time", *TIERS, *DIRECTIONS)})
        self.memory = _figure("", x_axis_type="datetime")
        self.memory.varea_stack(
            list(TIERS), x="time", color=[TIER_COLOURS[t] for t in TIERS], legend_label=list(TIERS), source=self.source
        )
        self.traffic = _figure("", x_axis_type="datetime")
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

    _COLUMNS = (
        *(("name", "worker", 85), ("gpu", "GPU", 140), ("cores", "cores", 115), ("memory", "memory", 90)),
        *(("nic", "NIC", 70), ("limit", "limit", 70), ("restarts", "restarts", 55)),
    )

    def __init__(self) -> None:
        self.source = ColumnDataSource({name: [] for name in (*(c[0] for c in self._COLUMNS), "wrong", "reasons")})
        red = HTMLTemplateFormatter(template=_CELL.replace("STYLE", f"color:{RED};font-weight:bold"))
        plain = HTMLTemplateFormatter(template=_CELL.replace("STYLE", ""))
        shown = (*((*c, plain) for c in self._COLUMNS), ("wrong", "not as planned", 160, red))
        columns = [
            TableColumn(field=field, title=title, width=width, formatter=how)
            for field, title, width, how in (*shown, ("reasons", "why so", 265, plain))
        ]
        options = {"autosize_mode": "none", "row_height": _ROW, "index_position": None}
        self.root = DataTable(source=self.source, columns=columns, height=60, sizing_mode="stretch_width", **options)

    def show(self, gpus: Sequence[WorkerFacts]) -> None:
        """Show these workers, first those that are not as planned."""
        gpus = sorted(gpus, key=lambda g: not g.differences)
        self.source.data = {
            "name": [g.name for g in gpus],
            "gpu": [g.gpu_text for g in gpus],
            "cores": [g.cores for g in gpus],
            "memory": [g.numa for g in gpus],
            "nic": [g.nic for g in gpus],
            "limit": [format_bytes(g.limits.get("device", 0)) for g in gpus],
            "restarts": [g.restarts for g in gpus],
            "wrong": ["; ".join(g.differences) for g in gpus],
            "reasons": ["; ".join(g.reasons) for g in gpus],
        }
        self.root.height = 27 + _ROW * min(6, len(gpus))

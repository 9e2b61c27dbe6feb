"""Draw the charts of ``docs/benchmarks.md`` as SVG that follows the reader's light or dark scheme."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import matplotlib.ticker
from matplotlib.figure import Figure as Canvas

if TYPE_CHECKING:
    from bench_model import Mark, Panel, Question

# Text stays text, and nothing depends on the time: the same figures make the same file.
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "hpcgpu",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}
FONTS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
# Stand-ins that become the scheme's colours: text, fine lines.
INK, RULE = "#010203", "#040506"
SCHEME = """<style>
svg { --ink: #1f2328; --rule: #d4d8dd; --paper: #ffffff }
@media (prefers-color-scheme: dark) { svg { --ink: #dfe3e8; --rule: #3a4048; --paper: #14171b } }
</style>
<rect width="100%" height="100%" style="fill: var(--paper)"/>
"""
# On white and on the dark paper each has a contrast of 3 and more; ours are blue.
OURS = ("#2f81c9", "#4fb3d9", "#9a7be0", "#6f86dd", "#5f9ea0")
OTHERS = ("#d9730d", "#8a8f98", "#3f9142", "#b5543c")
WIDTH, ROW, EXTRA = 8.0, 0.235, 0.72  # inches: of a chart, of a bar, of a panel's title and axis


def draw(question: Question, data: str) -> str:
    """Return a chart as SVG, with the data as its description."""
    with mpl.rc_context(STYLE):
        rows = [question.panels[i : i + question.columns] for i in range(0, len(question.panels), question.columns)]
        heights = [max(height_of(panel) for panel in row) for row in rows]
        canvas = Canvas(figsize=(WIDTH, sum(heights)), layout="constrained")
        parts = canvas.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
        for part, row in zip(parts, rows, strict=True):
            for panel, axes in zip(row, part.subplots(1, question.columns, squeeze=False)[0], strict=True):
                {"bars": bars, "dots": dots, "lines": lines}[panel.kind](axes, panel)
                finish(axes, panel)
                if panel is not row[0] and labels_of(panel) == labels_of(row[0]) and panel.kind != "lines":
                    axes.tick_params(labelleft=False)
            if has_legend(row[0]):
                legend(part, row[0])
        canvas.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
        file = io.StringIO()
        canvas.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return adapt(file.getvalue(), question.title, data)


def adapt(svg: str, title: str, data: str) -> str:
    """Put colours of the scheme in the place of stand-ins; add title, data and a background."""
    svg = svg.replace(INK, "var(--ink)").replace(RULE, "var(--rule)")
    svg = re.sub(r"'DejaVu Sans'[^;\"]*", FONTS, svg)
    svg = re.sub(r"[ \t]+$", "", svg, flags=re.M)
    head, tag, rest = re.split(r"(<svg [^>]*>)", svg, maxsplit=1)
    return f"{head}{tag}\n<title>{title}</title>\n<desc>{data}</desc>\n{SCHEME}{rest}"


def labels_of(panel: Panel) -> list[str]:
    """Return the labels of the axis."""
    return list(dict.fromkeys(mark.label for mark in panel.marks))


def series_of(panel: Panel) -> list[str]:
    """Return the series."""
    return list(dict.fromkeys(mark.series for mark in panel.marks))


def is_ours(name: str) -> bool:
    """Tell whether a series is one of hpcgpu."""
    return name.startswith("hpcgpu")


def colours_of(panel: Panel) -> dict[str, str]:
    """Give each series a colour: blue ones to hpcgpu."""
    names = series_of(panel)
    if panel.colours == "peers":
        return {name: OURS[0] if is_ours(name) else OTHERS[1] for name in names}
    ours, others = ([n for n in names if is_ours(n) is flag] for flag in (True, False))
    return dict(zip(ours, OURS, strict=False)) | dict(zip(others, OTHERS, strict=False))


def height_of(panel: Panel) -> float:
    """Return the height of a panel in inches."""
    if panel.kind == "lines":
        return 3.6
    each = (0.9 * len(series_of(panel)) if panel.log else 1.6) if has_legend(panel) else 1  # with figures: apart
    across = len(panel.marks) if panel.kind == "bars" else len(labels_of(panel)) * each
    return ROW * across + EXTRA + 0.4 * has_legend(panel) + 0.18 * panel.title.count("\n")


def has_legend(panel: Panel) -> bool:
    """Tell whether colours need an explanation."""
    return panel.colours == "series" and len(series_of(panel)) > 1


def places(panel: Panel, apart: float) -> list[tuple[float, Mark]]:
    """Return the y of each mark: those with the same label lie beside each other."""
    labels, series = labels_of(panel), series_of(panel)
    single = panel.colours == "peers"
    middle = (len(series) - 1) / 2
    return [
        (labels.index(m.label) + (0 if single else (series.index(m.series) - middle) * apart), m) for m in panel.marks
    ]


def spread(axes: Any, y: float, mark: Mark, colour: str) -> None:
    """Draw a line from the least to the most of the runs."""
    if mark.figure.least is not None:
        axes.plot([mark.figure.least, mark.figure.most], [y, y], color=colour, linewidth=1.4, zorder=3)


def write(axes: Any, x: float, y: float, mark: Mark) -> None:
    """Write the figure beside its mark."""
    text = f"{mark.figure.value:.3g}"
    axes.annotate(text, (x, y), (4, 0), textcoords="offset points", va="center", fontsize=8, color=INK)


def bars(axes: Any, panel: Panel) -> None:
    """Draw horizontal bars."""
    colours, single = colours_of(panel), panel.colours == "peers"
    high = 0.72 if single else 0.84 / len(series_of(panel))
    for y, mark in places(panel, high):
        axes.barh(y, mark.figure.value, height=high * 0.94, color=colours[mark.series], zorder=2)
        spread(axes, y, mark, INK)
        write(axes, max(mark.figure.value, mark.figure.most or 0), y, mark)
    axes.set_xlim(0, axes.get_xlim()[1] * 1.1)


def dots(axes: Any, panel: Panel) -> None:
    """Draw a dot for each figure, or pale ones for the points of a distribution."""
    colours = colours_of(panel)
    axes.set_xscale("log" if panel.log else "linear")
    for y, mark in places(panel, 0.6 / max(1, len(series_of(panel)))):
        colour, points = colours[mark.series], mark.figure.points
        if points:
            axes.plot(points, [y] * len(points), "o", color=colour, markersize=4, alpha=0.35, markeredgewidth=0)
            axes.plot([mark.figure.value] * 2, [y - 0.33, y + 0.33], color=INK, linewidth=2, zorder=4)
        else:
            spread(axes, y, mark, colour)
            axes.plot(mark.figure.value, y, "o", color=colour, markersize=5, zorder=4)
        if points or panel.log:
            write(axes, max((*points, mark.figure.most or mark.figure.value)), y, mark)
    low, high = axes.get_xlim()
    axes.set_xlim(*((low, high * (high / low) ** 0.15) if panel.log else (0, high * 1.05)))


def lines(axes: Any, panel: Panel) -> None:
    """Draw a line for each series, over the labels."""
    labels, colours = labels_of(panel), colours_of(panel)
    for name, colour in colours.items():
        marks = [mark for mark in panel.marks if mark.series == name]
        x, y = [labels.index(m.label) for m in marks], [m.figure.value for m in marks]
        style = "--" if "node_copies=False" in name else "-"
        axes.plot(x, y, style, marker="o", markersize=4, color=colour, label=name)
        for mark, place in zip(marks, x, strict=True):
            if mark.figure.least is not None:
                axes.plot([place] * 2, [mark.figure.least, mark.figure.most], color=colour, linewidth=1)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_yscale("log")


def finish(axes: Any, panel: Panel) -> None:
    """Set title, labels, legend and colours."""
    axes.set_title(panel.title, color=INK)
    value = axes.yaxis if panel.kind == "lines" else axes.xaxis
    if panel.kind != "lines":
        labels = labels_of(panel)
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(len(labels) - 0.4, -0.6)
    if panel.log:
        value.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5) if is_narrow(panel) else (1,)))
        value.set_major_formatter(lambda v, _: f"{v:g}")
        value.set_minor_formatter("")
    value.grid(visible=True, color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0, which="both", labelsize=8.5)
    for side, spine in axes.spines.items():
        spine.set_visible(side == ("bottom" if panel.kind == "lines" else "left"))
        spine.set_color(INK)


def is_narrow(panel: Panel) -> bool:
    """Tell whether the values are within a factor of 1000, so that their axis needs more labels."""
    values = [mark.figure.value for mark in panel.marks]
    return max(values) < 1000 * min(values)


def legend(part: Any, panel: Panel) -> None:
    """Write the series of a panel below the row of panels."""
    colours = {name: colours_of(panel)[name] for name in series_of(panel)}
    handles = [mpl.lines.Line2D([], [], marker="s", linestyle="", color=colour) for colour in colours.values()]
    style = {"frameon": False, "fontsize": 8.5, "labelcolor": INK, "handletextpad": 0.3, "columnspacing": 1.2}
    part.legend(handles, list(colours), loc="outside lower left", ncols=min(len(colours), 4), **style)

"""The page "GPUs" of the dashboard: memory by tier, utilisation, spill traffic and bindings of all GPUs, 4 or 400.

All of it is one Bokeh document of one browser tab. It reads the ledger while it is open; a closed page costs nothing.
"""

from __future__ import annotations

import base64
import functools
import html
import time
from collections.abc import Sequence
from typing import Any

from bokeh.layouts import column, row
from bokeh.models import Column, Div
from distributed import Scheduler
from distributed.dashboard.components import add_periodic_callback
from distributed.dashboard.components.scheduler import BOKEH_THEME, env

from hpcgpu.deploy.dashboard import figures, node_picture
from hpcgpu.deploy.dashboard.history import SHARE, UTILISATION, History, Sample
from hpcgpu.deploy.dashboard.history import column as strip_column
from hpcgpu.deploy.dashboard.ledger import Ledger
from hpcgpu.plan.views.gpus import GpuFacts, headline
from hpcgpu.supervise.rounds import reason_of

# Workers send heartbeats 0.5 to 3 s apart (distributed 2026.8.0): with many workers, seldom.
_FEW, _OFTEN_MS, _SELDOM_MS = 64, 1000, 3000
_SAMPLES = 200
_ALL = "all GPUs"


def gpus_doc(scheduler: Scheduler, extra: dict[str, Any], doc: Any) -> None:
    """Fill the document of a browser tab; Bokeh calls this when the page is opened."""
    ledger = scheduler.plugins[Ledger.name]
    page = GpuPage(scheduler, ledger, doc)
    page.update()
    add_periodic_callback(doc, page, page.every_ms)
    doc.title = "Dask: GPUs"
    doc.add_root(page.root)
    doc.template = env.get_template("simple.html")
    doc.template_variables.update(extra)
    doc.theme = BOKEH_THEME


class GpuPage:
    """One tab's page; the ledger has the facts, the scheduler is asked only for a node's picture."""

    def __init__(self, scheduler: Scheduler, ledger: Ledger, doc: Any) -> None:
        self._scheduler, self._ledger, self._doc = scheduler, ledger, doc
        self._history, self._gpus = History(_SAMPLES), list[GpuFacts]()
        self._chosen, self._drawn = "", ""
        self._fixed: tuple[object, ...] = ()
        self._head, self._picture = Div(sizing_mode="stretch_width"), Div(sizing_mode="stretch_width")
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
            self._picture,
            sizing_mode="stretch_width",
        )

    @property
    def every_ms(self) -> int:
        """The interval of updates: about that of a worker's heartbeats."""
        return _OFTEN_MS if len(self._gpus) <= _FEW else _SELDOM_MS

    def update(self) -> None:
        """Show the present state; Bokeh calls this at intervals while the page is open."""
        self._gpus = self._ledger.gpus()
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
        self._look_at_node()

    def _choose(self, source: Any, attr: str, old: Sequence[int], new: Sequence[int]) -> None:
        """Show one GPU over time, tapped as a bar or a row; Bokeh calls this."""
        names = source.data["name"]
        chosen = names[new[0]] if new and new[0] < len(names) else ""
        if chosen != self._chosen:
            self._chosen = chosen
            self._lines.show(self._history.series(chosen), chosen or _ALL)
            self._look_at_node()

    def _look_at_node(self) -> None:
        """Request the picture of the chosen worker's node, or of the first one."""
        node = next((g.node for g in self._gpus if g.name == self._chosen), self._gpus[0].node)
        if node != self._drawn:
            self._drawn = node
            self._doc.add_next_tick_callback(self._draw)

    async def _draw(self) -> None:
        node = self._drawn
        here = [(self._ledger.address(g.name), g.name) for g in self._gpus if g.node == node]
        try:
            found = await node_picture.ask(self._scheduler, here)
        except Exception as e:  # the worker's, from reading its machine
            text = f"the picture of node {html.escape(node)} could not be drawn: {html.escape(reason_of(e))}"
        else:
            dead = "".join(
                f"<br><span style='color:{figures.RED}'>{html.escape(p)}</span>" for p in found["dead_ports"]
            )
            image = base64.b64encode(found["svg"].encode()).decode()
            text = (
                f"<b>{html.escape(node)}</b>{dead}"
                f"<br><img style='max-width:1000px;width:100%' src='data:image/svg+xml;base64,{image}'>"
            )
        if node == self._drawn:
            self._picture.text = text


def _head(gpus: Sequence[GpuFacts]) -> str:
    """Return the headline, with differences from the plan in red; names are not broken at their hyphens."""
    if not gpus:
        return "no worker with a GPU is there; those of hpcgpu say what they have in their heartbeats"
    wrong = [g for g in gpus if g.differences]
    said = f"<span style='font-size:14px'>{html.escape(headline(gpus))}"
    if wrong:
        names = [f"<span style='white-space:nowrap'>{html.escape(g.name)}</span>" for g in wrong[:5]]
        listed = ", ".join([*names, "…"] if len(wrong) > 5 else names)
        said += f"; <b style='color:{figures.RED}'>{len(wrong)} of {len(gpus)} workers not as planned: {listed}</b>"
    return f"{said}</span>"

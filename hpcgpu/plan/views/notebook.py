"""Render a cluster and its tables as HTML for notebooks: facts in, HTML out.

The colours are those of the page, light or dark: text in the current colour, lines in transparent grey.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcgpu.model import WorkerSpec
from hpcgpu.plan.views.explain import format_gpu, format_memory, format_ports, worker_reasons
from hpcgpu.plan.views.memory_table import TIER_COLOURS, WorkerMemory, total
from hpcgpu.units import format_bytes

# More rows are too many to read; the dashboard has all.
_MOST_ROWS = 64
_OPEN_ROWS = 16
_STYLE = """<style>
.hpcgpu { font-size: 13px; line-height: 1.4; max-width: 1000px; overflow-x: auto }
.hpcgpu h3 { margin: 0; font-size: 16px } .hpcgpu p { margin: 2px 0 6px }
.hpcgpu .dim { opacity: .65 } .hpcgpu .bad { color: #d93a2b; font-weight: 600 }
.hpcgpu .dot { display: inline-block; width: 9px; height: 9px; border-radius: 50%; margin-right: 6px }
.hpcgpu table { border-collapse: collapse; margin: 4px 0 8px; width: auto }
.hpcgpu th, .hpcgpu td { text-align: left !important; vertical-align: top; padding: 3px 14px 3px 0; border: 0;
  border-bottom: 1px solid rgba(127,127,127,.25); background: none;
  font-size: 12px; overflow-wrap: anywhere; white-space: normal }
.hpcgpu th { font-weight: 600; white-space: nowrap; opacity: .75 }
.hpcgpu .fix { white-space: nowrap } .hpcgpu a { color: var(--jp-content-link-color, #3b82c4) }
.hpcgpu .track { position: relative; height: 8px; min-width: 120px; border-radius: 3px; margin-top: 4px;
  background: rgba(127,127,127,.22); overflow: hidden }
.hpcgpu .track i { position: absolute; top: 0; bottom: 0; display: block }
.hpcgpu .track b { position: absolute; top: 0; bottom: 0; width: 2px; background: currentColor; opacity: .8 }
.hpcgpu summary { cursor: pointer; font-weight: 600; margin: 4px 0 } .hpcgpu .tiers td { min-width: 160px; border: 0 }
.hpcgpu .key { font-size: 12px; margin: 0 0 8px } .hpcgpu .key span { margin-right: 16px; white-space: nowrap }
.hpcgpu .key em { display: inline-block; width: 12px; height: 8px; border-radius: 2px; margin-right: 6px;
  background: currentColor; opacity: .85 }
.hpcgpu .key em.light { opacity: .35 } .hpcgpu .key em.mark { width: 2px; border-radius: 0; height: 11px;
  vertical-align: -1px }
.hpcgpu pre { white-space: pre-wrap; overflow-wrap: anywhere; font-size: 12px; margin: 0 }
</style>"""
_KEY = (
    '<p class="key"><span><em></em>Dask\'s data</span><span><em class="light"></em>other memory in use</span>'
    '<span><em class="mark"></em>spilling begins</span></p>'
)
# By the first word of a state; all others are red.
_STATES = {
    "running": "#5a9e1f",
    **dict.fromkeys(("starting", "not", "stalled", "closing"), "#c98a1b"),
    **dict.fromkeys(("created", "closed", "closed;", "detached"), "#8a8a8a"),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table: text, or finished HTML."""

    text: str = ""
    html: str = ""
    bad: bool = False
    fixed: bool = False  # not broken into lines


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker; unknown facts are None or empty."""

    name: str
    host: str = ""
    spec: WorkerSpec | None = None
    memory: WorkerMemory | None = None
    differences: tuple[str, ...] = ()  # between process and plan


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The visible facts of a cluster."""

    kind: str = ""
    name: str = ""
    state: str = ""  # for people, as "running"
    link: str = ""  # the dashboard's; empty: none
    jobs: tuple[tuple[str, str, str, str], ...] = ()  # id, state, purpose, log
    workers: tuple[WorkerView, ...] = ()
    target: int = 0  # number of workers


def cluster_page(view: ClusterView) -> str:
    """Render a cluster: its state, link, jobs, memory by tier, and its workers by GPU."""
    present, hosts = len(view.workers), len({w.host for w in view.workers})
    gpus = len({w.spec.gpu.uuid or w.spec.gpu.pci for w in view.workers if w.spec and w.spec.gpu})
    count = f"{present}" if present >= view.target else f"{present} of {view.target}"
    where = f" on {gpus} GPU{'s' * (gpus != 1)}" if gpus else ""
    where += f", {hosts} node{'s' * (hosts != 1)}" if present else ""
    colour = _STATES.get(view.state.split(":")[0].split(" ")[0], "#d93a2b")
    parts = [
        f'<h3>{_e(view.kind)} <span class="dim" style="font-weight: normal">{_e(view.name)}</span></h3>',
        f'<p><span class="dot" style="background: {colour}"></span>Status: <strong>{_e(view.state)}</strong>'
        f" &nbsp; Workers: <strong>{count}</strong>{where}</p>",
    ]
    if view.link:
        parts.append(f"<p>Dashboard: {linked(view.link)}</p>")
    if view.jobs:
        cells = [(Cell(i, fixed=True), Cell(s), Cell(h), Cell(log)) for i, s, h, log in view.jobs]
        parts.append(_table(("job", "state", "has", "log"), cells))
    memories = [w.memory for w in view.workers if w.memory]
    if memories:
        most = sum(m.spilled_to_disk_bytes for m in memories)
        tiers = "".join(f"<td>{cell.html}</td>" for cell in _tiers(total(memories), most, titled=True))
        parts.append(f'<table class="tiers"><tr>{tiers}</tr></table>{_KEY}')
    if view.workers:
        opened = " open" if present <= _OPEN_ROWS else ""
        parts.append(f"<details{opened}><summary>Workers by GPU</summary>{_workers(view.workers)}</details>")
    return page(*parts)


def memory_page(workers: Sequence[WorkerMemory], moves: str) -> str:
    """Render the memory of workers as bars, their sum last; ``moves`` is the same and more as text."""
    rows = [*workers[:_MOST_ROWS], total(workers)]
    most = max((m.spilled_to_disk_bytes for m in rows), default=0)
    cells = [(Cell(m.name, fixed=True), *_tiers(m, most)) for m in rows]
    table = _table(("worker", "device", "host", "disk"), cells) + _KEY + _left_out(len(workers))
    return page(table, f"<details><summary>Numbers and moves</summary><pre>{_e(moves)}</pre></details>")


def bindings_page(workers: Sequence[WorkerView], note: str) -> str:
    """Render the bindings of workers; ``note`` below tells whether all is as planned."""
    return page(_workers(workers, notes=True), f'<p class="dim">{_e(note)}</p>')


def jobs_page(rows: Iterable[tuple[str, str, str, str, str]]) -> str:
    """Render jobs: id, state, processes, number of nodes and log of each."""
    cells = [(Cell(i, fixed=True), Cell(s), Cell(h), Cell(n), Cell(log)) for i, s, h, n, log in rows]
    return page(_table(("job", "state", "has", "nodes", "log"), cells))


def page(*parts: str) -> str:
    """Join parts below each other, with their style."""
    return f'{_STYLE}<div class="hpcgpu">{"".join(parts)}</div>'


def linked(address: str) -> str:
    """Render an address as a link."""
    return f'<a href="{_e(address)}" target="_blank">{_e(address)}</a>'


class Explanation(str):
    """A text of several lines that notebooks and prompts show without quotes and escapes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return page(f"<pre>{_e(self)}</pre>")


def _workers(workers: Sequence[WorkerView], *, notes: bool = False) -> str:
    most = sum(w.memory.spilled_to_disk_bytes for w in workers if w.memory)
    bars = any(w.memory for w in workers)
    head = ("worker", "GPU", *(("device", "host", "disk") if bars else ()), "cores", "NUMA memory", "NIC")
    rows = []
    for w in workers[:_MOST_ROWS]:
        tiers = (_tiers(w.memory, most) if w.memory else (Cell(), Cell(), Cell())) if bars else ()
        gpu = Cell("none" if w.spec else "")
        if w.spec and w.spec.gpu:  # the address of a simulated GPU is meaningless
            gpu = Cell(format_gpu(w.spec.gpu, address=not w.spec.simulated))
        rows.append((_named(w, notes=notes), gpu, *tiers, *_tied(w)))
    return _table(head, rows) + _left_out(len(workers))


def _named(worker: WorkerView, *, notes: bool) -> Cell:
    below = "".join(f'<div class="bad">not as planned: {_e(d)}</div>' for d in worker.differences)
    if notes and worker.spec:
        below += "".join(f'<div class="dim">{_e(reason)}</div>' for reason in worker_reasons(worker.spec))
    return Cell(html=f'<span class="fix">{_e(worker.name)}</span>{below}')


def _tied(worker: WorkerView) -> tuple[Cell, Cell, Cell]:
    if worker.spec is None:
        return Cell(), Cell(), Cell()
    binding, bad = worker.spec.binding, bool(worker.differences)
    memory = format_memory(binding) if binding.memory_policy != "none" else "-"
    return Cell(str(binding.cpuset), bad=bad), Cell(memory), Cell(format_ports(binding))


def _tiers(m: WorkerMemory, most_disk: int, *, titled: bool = False) -> tuple[Cell, Cell, Cell]:
    """Render a bar for each tier: Dask's data, other memory in use, and a mark where spilling begins."""
    used = max(m.device_managed_bytes, m.device_used_bytes or 0)
    device_end = m.device_capacity_bytes or m.device_limit_bytes or used
    device = _bar("device", (m.device_managed_bytes, used), device_end, m.device_limit_bytes)
    host_used = max(m.process_bytes, m.host_managed_bytes)
    host = _bar("host", (m.host_managed_bytes, host_used), m.host_limit_bytes or host_used, m.host_limit_bytes)
    disk = _bar("disk", (m.spilled_to_disk_bytes, m.spilled_to_disk_bytes), most_disk, None)
    texts = (
        _of(used, m.device_capacity_bytes, m.device_limit_bytes),
        _of(host_used, m.host_limit_bytes, None),
        format_bytes(m.spilled_to_disk_bytes) if m.spilled_to_disk_bytes else "-",
    )
    titles = ("Device memory: ", "Host memory: ", "Spilled to disk: ") if titled else ("", "", "")
    cells = (f"<span>{_e(t + s)}</span>{b}" for t, s, b in zip(titles, texts, (device, host, disk), strict=True))
    first, second, third = (Cell(html=c) for c in cells)
    return first, second, third


def _of(used: int, end: int | None, limit: int | None) -> str:
    text = f"{format_bytes(used)} of {format_bytes(end)}" if end else format_bytes(used)
    return f"{text}, limit {format_bytes(limit)}" if limit and limit != end else text


def _bar(tier: str, filled: tuple[int, int], end: int, limit: int | None) -> str:
    """Render a bar: managed bytes in full colour, others in use in a lighter one; a mark at a limit within it."""
    managed, used = (_percent(size, end) for size in filled)
    colour = TIER_COLOURS[tier]
    if not end:
        return ""
    mark = f'<b style="left: calc({_percent(limit, end):.1f}% - 2px)"></b>' if limit and limit != end else ""
    return (
        f'<div class="track"><i style="width: {used:.1f}%; background: {colour}; opacity: .45"></i>'
        f'<i style="width: {managed:.1f}%; background: {colour}"></i>{mark}</div>'
    )


def _percent(size: int, end: int) -> float:
    return min(100.0, 100.0 * size / end) if end else 0.0


def _table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Render a table without its empty columns."""
    shown = [i for i in range(len(head)) if any(row[i].text not in ("", "-") or row[i].html for row in rows)]
    top = "".join(f"<th>{_e(head[i])}</th>" for i in shown)
    body = "".join(f"<tr>{''.join(_td(row[i]) for i in shown)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _td(cell: Cell) -> str:
    kinds = " ".join(name for name, is_so in (("bad", cell.bad), ("fix", cell.fixed)) if is_so)
    return f"<td{f' class={kinds!r}' if kinds else ''}>{cell.html or _e(cell.text)}</td>"


def _left_out(count: int) -> str:
    return f'<p class="dim">and {count - _MOST_ROWS} more: see the dashboard</p>' if count > _MOST_ROWS else ""


def _e(text: str) -> str:
    return html.escape(text)

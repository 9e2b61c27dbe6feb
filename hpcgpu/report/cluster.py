"""A cluster for people: its jobs, and its page in a notebook."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from hpcgpu.plan.jobs.job import Job
from hpcgpu.report.memory import KEY, tier_bars
from hpcgpu.report.table import Column, Table, Value, page
from hpcgpu.report.workers import TIERS, WorkerFacts, total
from hpcgpu.units import counted

_OPEN_ROWS = 16
# By the first word of a state; all others are red.
_STATES = {
    "running": "#5a9e1f",
    **dict.fromkeys(("starting", "not", "stalled", "closing"), "#c98a1b"),
    **dict.fromkeys(("created", "closed", "closed;", "detached"), "#8a8a8a"),
}
_JOBS = (Column("job", kind="name"), Column("state"), Column("has"), Column("nodes", kind="number"), Column("log"))


def jobs_table(jobs: Iterable[Job]) -> Table:
    """Show described jobs."""
    return Table(_JOBS, [(job.id, job.text, job.has, job.nodes, job.log) for job in jobs])


def cluster_page(
    kind: str, name: str, state: str, link: str, jobs: Table, workers: Sequence[WorkerFacts], target: int
) -> str:
    """Render a cluster: its state, the dashboard's link, jobs, memory by tier, and its workers by GPU.

    ``target``: the wanted number of workers.
    """
    present, nodes, gpus = len(workers), {w.node for w in workers}, {w.gpu or w.pci for w in workers} - {""}
    count = f"{present}" if present >= target else f"{present} of {target}"
    where = f" on {counted(len(gpus), 'GPU')}" if gpus else ""
    where += f", {counted(len(nodes), 'node')}" if present else ""
    colour = _STATES.get(state.split(":", maxsplit=1)[0].split(" ", maxsplit=1)[0], "#d93a2b")
    title = f'{_e(kind)} <span class="dim" style="font-weight: normal">{_e(name)}</span>'
    parts = [
        f"<h3>{title}</h3>",
        f'<p><span class="dot" style="background: {colour}"></span>Status: <strong>{_e(state)}</strong>'
        f" &nbsp; Workers: <strong>{count}</strong>{where}</p>",
    ]
    if link:
        parts.append(f'<p>Dashboard: <a href="{_e(link)}" target="_blank">{_e(link)}</a></p>')
    parts.append(jobs.html())
    if measured := [w for w in workers if w.tiers]:
        most = sum(w.spilled_to_disk_bytes for w in measured)
        columns = [Column(name) for name in ("device memory", "host memory", "spilled to disk")]
        tiers = Table(columns, [tier_bars(total(measured), most)])
        parts += [tiers.html(), KEY]
    if workers:
        opened = " open" if present <= _OPEN_ROWS else ""
        summary = f"<details{opened}><summary>Workers by GPU</summary>"
        parts.append(f"{summary}{workers_table(workers).html()}</details>")
    return page(*parts)


def workers_table(workers: Sequence[WorkerFacts]) -> Table:
    """Show workers with their GPUs, memory by tier and bindings; differences from the plan are below each."""
    most = sum(w.spilled_to_disk_bytes for w in workers)
    columns = ("GPU", *TIERS, "cores", "NUMA memory", "NIC")
    rows: list[Sequence[Value]] = [
        (
            *(w.name, w.gpu_text, *(tier_bars(w, most) if w.tiers else ("", "", ""))),
            *(w.cores, w.numa.removeprefix("none"), w.nic, tuple(w.differences)),
        )
        for w in workers
    ]
    faults = Column("differences", kind="fault", mark="not as planned: ")
    return Table((Column("worker", kind="name"), *map(Column, columns), faults), rows)


def _e(text: str) -> str:
    return html.escape(text)

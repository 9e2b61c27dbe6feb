"""A cluster for people: its jobs, its page in a notebook, and the memory of its workers as a table and as bars."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hpcgpu.plan.jobs import Job
from hpcgpu.report import Bar, Column, Shown, Table, Value, page, preformatted
from hpcgpu.report.workers import DIRECTION_TEXTS, DIRECTIONS, TIERS, Moved, WorkerFacts, total
from hpcgpu.units import counted, format_bytes

# Paul Tol's "bright" scheme, which colour-blind readers can distinguish.
TIER_COLOURS = {"device": "#228833", "host": "#4477AA", "disk": "#CCBB44"}
_SOURCES = {
    "simulated": "arrays on the simulated GPU",
    "pool": "arrays in the worker's CuPy pool",
    "NVML": "the whole device, by NVML",
}
KEY = (
    '<p class="key"><span><em></em>Dask\'s data</span><span><em class="light"></em>other memory in use</span>'
    '<span><em class="mark"></em>spilling begins</span></p>'
)


@dataclass(frozen=True, slots=True, repr=False)
class Memory(Shown):
    """The memory of all workers of a cluster; a table in a terminal and in a notebook."""

    workers: tuple[WorkerFacts, ...]

    @property
    def total(self) -> WorkerFacts:
        """The sum of all workers."""
        return total(self.workers)

    @property
    def moved(self) -> str:
        """The bytes moved by all workers, by direction, in one line."""
        return ", ".join(f"{way} {format_bytes(moved.nbytes)}" for way, moved in self.total.moved.items())

    @property
    def table(self) -> Table:
        """Managed by the store and in use, by worker; the sum is the last row."""
        rows = (*self.workers, self.total)
        return Table(_MEMORY, [(w.name, *(getattr(w, name) for name in _MEMORY_BYTES)) for w in rows])

    @property
    def moves(self) -> Table:
        """Bytes, number and speed of all moves, and what the columns of :attr:`table` mean."""
        rows, summed = [*self.workers, self.total], self.total
        moved = any(m.number for m in summed.moved.values())
        notes = [] if moved else ["nothing has been moved"]
        if summed.rescues:
            notes.append(f"allocations that failed on the device and succeeded after data was moved: {summed.rescues}")
        if summed.immovable_number:
            size = format_bytes(summed.immovable_bytes)
            counts = f"{summed.immovable_number}, {size}"
            notes.append(f"values that cannot be pickled and stay in memory (the log names their types): {counts}")
        sources = [f"in use: {_SOURCES[s]}" for s in sorted({w.device_source for w in self.workers} - {""})]
        notes.append("; ".join(["managed: Dask's data", *sources, f"allocator: {summed.allocator}"]))
        columns = (Column("moved", kind="name"), *(Column(text, kind="number") for text in DIRECTION_TEXTS.values()))
        cells = [(w.name, *(str(w.moved.get(way, Moved())) for way in DIRECTIONS)) for w in rows] if moved else []
        return Table(columns, cells, notes=notes)

    def __str__(self) -> str:
        return f"{self.table.to_text()}\n{self.moves.to_text()}"

    def _repr_html_(self) -> str:
        rows = (*self.workers, self.total)
        most = max((m.spilled_to_disk_bytes for m in rows), default=0)
        columns = (Column("worker", kind="name"), *(Column(tier) for tier in TIERS))
        bars = Table(columns, [(m.name, *tier_bars(m, most)) for m in rows]).html()
        return page(bars, KEY, f"<details><summary>Numbers and moves</summary>{preformatted(str(self))}</details>")


_MEMORY_BYTES = {
    "device_managed_bytes": "device: managed",
    "device_used_bytes": "in use",
    "device_limit_bytes": "limit",
    "device_capacity_bytes": "capacity",
    "host_managed_bytes": "host: managed",
    "host_unmanaged_bytes": "unmanaged",
    "process_bytes": "process",
    "host_limit_bytes": "limit",
    "spilled_to_host_bytes": "spilled: to host",
    "spilled_to_disk_bytes": "to disk",
}
_MEMORY = (Column("worker", kind="name"), *(Column(title, "B", "number") for title in _MEMORY_BYTES.values()))


def tier_bars(m: WorkerFacts, most_disk: int) -> tuple[Bar, Bar, Bar]:
    """Return a bar for each tier: Dask's data, other memory in use, and a mark where spilling begins."""
    used = max(m.device_managed_bytes, m.device_used_bytes or 0)
    host_used, disk = max(m.process_bytes, m.host_managed_bytes), m.spilled_to_disk_bytes
    device_text = _of(used, m.device_capacity_bytes, m.device_limit_bytes)
    host_text, disk_text = _of(host_used, m.host_limit_bytes, None), format_bytes(disk) if disk else "-"
    device_end = m.device_capacity_bytes or m.device_limit_bytes or used
    host_end = m.host_limit_bytes or host_used
    return (
        Bar(device_text, TIER_COLOURS["device"], m.device_managed_bytes, used, device_end, m.device_limit_bytes),
        Bar(host_text, TIER_COLOURS["host"], m.host_managed_bytes, host_used, host_end, m.host_limit_bytes),
        Bar(disk_text, TIER_COLOURS["disk"], disk, disk, most_disk),
    )


def _of(used: int, end: int | None, limit: int | None) -> str:
    text = f"{format_bytes(used)} of {format_bytes(end)}" if end else format_bytes(used)
    return f"{text}, limit {format_bytes(limit)}" if limit and limit != end else text


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

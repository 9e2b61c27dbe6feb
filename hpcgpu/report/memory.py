"""The memory of workers: managed by the store, and in use; as a table and as bars."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgpu.report.table import Bar, Column, Shown, Table, page, preformatted
from hpcgpu.report.workers import DIRECTION_TEXTS, DIRECTIONS, TIERS, Moved, WorkerFacts, total
from hpcgpu.units import format_bytes

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

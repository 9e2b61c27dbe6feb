"""The facts of one worker, the same wherever they are shown; tables of all workers, and a cluster's page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from html import escape
from itertools import groupby
from operator import attrgetter
from typing import Any

from hpcgpu.model import ActualBinding, WorkerSpec
from hpcgpu.plan.doctor.findings import CheckResult, ok, warning
from hpcgpu.plan.jobs.job import Job
from hpcgpu.report.machine import format_gpu, format_memory, format_ports, shared_reasons, worker_reasons
from hpcgpu.report.table import Bar, Column, Shown, Table, Value, page, preformatted
from hpcgpu.units import counted, format_bytes

# The store's names.
TIERS = ("device", "host", "disk")
DIRECTIONS = ("device_to_host", "host_to_disk", "disk_to_host", "host_to_device")
DIRECTION_TEXTS = {way: way.replace("_", " ") for way in DIRECTIONS}
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
_TAKEN = "a program in the worker binds it again, or opens all GPUs that it sees: docs/how-to/libraries.md"
_ALLOCATED = "lower device_memory_limit, or what the library (PyTorch, JAX, RMM) takes by itself"
_WORKER, _FAULTS = Column("worker", kind="name"), Column("differences", kind="fault", mark="not as planned: ")
_MEMORY = (_WORKER, *(Column(title, "B", "number") for title in _MEMORY_BYTES.values()))
_OPEN_ROWS = 16
FOLDED = 512  # with more GPUs, the page and the metrics show nodes: each series costs a scraper
# By the first word of a state; all others are red.
_STATES = {
    "running": "#5a9e1f",
    **dict.fromkeys(("starting", "not", "stalled", "closing"), "#c98a1b"),
    **dict.fromkeys(("created", "closed", "closed;", "detached"), "#8a8a8a"),
}
_JOBS = (
    Column("job", kind="name"),
    Column("state"),
    Column("has"),
    Column("nodes", kind="number"),
    Column("log", kind="path"),
)


@dataclass(frozen=True, slots=True)
class Moved:
    """Moves in one direction since the worker started."""

    nbytes: int = 0
    number: int = 0
    seconds: float = 0.0  # in moves, summed over all threads

    @property
    def gb_per_s(self) -> float:
        """GB (1e9 bytes) per second while moving; 0 if nothing was moved."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def __str__(self) -> str:
        if not self.number:
            return "-"
        return f"{format_bytes(self.nbytes)} in {self.number} ({self.seconds:.2f} s, {self.gb_per_s:.2f} GB/s)"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One worker at one moment. Sizes are bytes; None: unknown, or no limit."""

    name: str
    node: str = ""
    # the plan, for people; empty: hpcgpu has not started the worker
    gpu: str = ""  # UUID; empty: a worker without a GPU
    pci: str = ""  # empty for a simulated GPU
    model: str = ""
    cores: str = ""
    numa: str = ""
    nic: str = ""
    reasons: Sequence[str] = ()
    differences: Sequence[str] = ()  # between process and plan
    node_copies: str = ""  # why values do not reach it from its node by one copy; empty: they do
    # memory
    tiers: Mapping[str, int] = field(default_factory=dict)  # Dask's data in device, host, disk; empty: no spill store
    copy_bytes: int = 0  # in the host: copies of data on the device that are kept for when it goes down again
    device_used_bytes: int | None = None  # in use, by device_source
    device_limit_bytes: int | None = None  # where spilling begins
    device_capacity_bytes: int | None = None  # the worker's part of the device's memory
    # ``simulated``; ``pool``: arrays in this worker's CuPy pool, Dask's and others; ``NVML``: the whole device, other
    # processes and CUDA's own memory included; empty: unknown
    device_source: str = ""
    process_bytes: int = 0  # resident memory of the process, without simulated device memory
    host_limit_bytes: int | None = None  # memory_limit
    spilled_to_host_bytes: int = 0  # data below the tier in which it is used
    moved: Mapping[str, Moved] = field(default_factory=dict)  # by direction, since the worker's start
    rescues: int = 0  # allocations that failed on the device, and succeeded after the store had made room
    immovable_number: int = 0  # values that stay in memory instead of going to disk: they cannot be pickled
    immovable_bytes: int = 0
    allocator: str = "system"  # of host memory: system, or jemalloc with its version
    # use since the worker's start
    peaks: Mapping[str, int] = field(default_factory=dict)  # of each tier, and of the process (``process``)
    busy_s: float = 0.0  # with a task running
    # from the scheduler
    begin_s: float = 0.0  # on one clock for all workers, as end_s
    end_s: float = 0.0
    restarts: int = 0  # processes that replaced this worker's first one
    utilisation_percent: int | None = None  # by NVML; of a simulated GPU the share of time with a running task
    # objects, where the worker was asked directly
    spec: WorkerSpec | None = None
    actual: ActualBinding | None = None

    @property
    def device_managed_bytes(self) -> int:
        """Dask's data on the device."""
        return self.tiers.get("device", 0)

    @property
    def host_managed_bytes(self) -> int:
        """Dask's data in host memory: host data, data spilled from the device, and copies of data on the device."""
        return self.tiers.get("host", 0) + self.copy_bytes

    @property
    def host_unmanaged_bytes(self) -> int:
        """The process's memory other than Dask's data: modules, values of tasks, the allocator's reserve."""
        return max(0, self.process_bytes - self.host_managed_bytes)

    @property
    def spilled_to_disk_bytes(self) -> int:
        """Data on disk."""
        return self.tiers.get("disk", 0)

    @property
    def limits(self) -> dict[str, int]:
        """The limits that are known: device (its size if it has no limit), capacity of the device, process."""
        device = self.device_limit_bytes or self.device_capacity_bytes
        limits = {"device": device, "capacity": self.device_capacity_bytes, "process": self.host_limit_bytes}
        return {name: nbytes for name, nbytes in limits.items() if nbytes}

    def use(self, tier: str) -> str:
        """Format the use of a tier."""
        return format_use(self.tiers.get(tier, 0), self.limits.get(tier))

    @property
    def device_share(self) -> float | None:
        """Dask's data on the device as part of its limit; None without a limit."""
        limit = self.limits.get("device", 0)
        return self.device_managed_bytes / limit if limit else None

    @property
    def gpu_text(self) -> str:
        """The GPU for people; "none" if the worker has none."""
        return f"{self.pci} {self.model}".strip() or ("none" if self.cores else "")


def planned(spec: WorkerSpec) -> dict[str, Any]:
    """Return the facts of a worker's plan, as fields of :class:`WorkerFacts`."""
    gpu = spec.gpu
    return {
        "gpu": gpu.uuid if gpu else "",
        "pci": gpu.pci if gpu and not spec.simulated else "",
        "model": format_gpu(gpu, address=False) if gpu else "",
        "cores": str(spec.binding.cpuset),
        "numa": format_memory(spec.binding),
        "nic": format_ports(spec.binding),
        "device_limit_bytes": spec.device_memory_limit_bytes or None,
        "device_capacity_bytes": spec.device_memory_bytes or None,
        "reasons": list(worker_reasons(spec)),
    }


def read_facts(name: str, *parts: Mapping[str, Any], **more: Any) -> WorkerFacts:
    """Return a worker's facts from plain data of its heartbeats; unknown names are left out."""
    values = {key: value for part in parts for key, value in part.items() if key in _FIELDS}
    values["moved"] = {way: Moved(*counts) for way, counts in values.get("moved", {}).items()}
    return WorkerFacts(name=name, **{**values, **more})


_FIELDS = frozenset(f.name for f in fields(WorkerFacts))


def total(workers: Sequence[WorkerFacts], name: str = "all", **more: Any) -> WorkerFacts:
    """Sum the workers' memory up as one worker; a number that is unknown for one is unknown for all.

    NVML's ``device_used_bytes`` are those of the whole device: if workers share a device, they have no sum.
    """
    shared = any(w.device_source == "NVML" for w in workers) and len({w.gpu for w in workers}) < len(workers)
    sources = {w.device_source for w in workers}
    sizes = ("copy_bytes", "process_bytes", "spilled_to_host_bytes", "rescues", "immovable_number", "immovable_bytes")
    limits = ("device_limit_bytes", "device_capacity_bytes", "host_limit_bytes")
    summed: dict[str, Any] = {name: sum(getattr(w, name) for w in workers) for name in sizes}
    summed |= {name: _known_sum(getattr(w, name) for w in workers) for name in limits}
    return WorkerFacts(
        name=name,
        tiers={tier: sum(w.tiers.get(tier, 0) for w in workers) for tier in TIERS},
        device_used_bytes=None if shared else _known_sum(w.device_used_bytes for w in workers),
        device_source=sources.pop() if len(sources) == 1 else "",
        moved={
            way: Moved(sum(m.nbytes for m in moves), sum(m.number for m in moves), sum(m.seconds for m in moves))
            for way in DIRECTIONS
            for moves in [[w.moved[way] for w in workers if way in w.moved]]
        },
        allocator=", ".join(sorted({w.allocator for w in workers})),
        **summed,
        **more,
    )


def by_node(gpus: Sequence[WorkerFacts]) -> Iterator[WorkerFacts]:
    """Yield one row for each node: the sums of its workers' memory, the mean of their utilisation."""
    nodes: dict[str, list[WorkerFacts]] = {}
    for g in gpus:
        nodes.setdefault(g.node, []).append(g)
    yield from (_node(node, mine) for node, mine in nodes.items())


def _node(node: str, mine: Sequence[WorkerFacts]) -> WorkerFacts:
    percents = [g.utilisation_percent for g in mine if g.utilisation_percent is not None]
    models = (f"{count} of {model}" for model, count in Counter(g.model for g in mine).items())
    differences = tuple(f"{g.name}: {text}" for g in mine for text in g.differences)
    percent = round(sum(percents) / len(percents)) if percents else None
    more: dict[str, Any] = {
        "utilisation_percent": percent,
        "restarts": sum(g.restarts for g in mine),
        "differences": differences,
    }
    return total(mine, name=node, node=node, gpu=mine[0].gpu, model=", ".join(models), **more)


def _known_sum(values: Iterable[int | None]) -> int | None:
    """Return a sum; None if a value is unknown."""
    sizes = list(values)
    return None if None in sizes else sum(filter(None, sizes))


def headline(gpus: Sequence[WorkerFacts]) -> str:
    """Sum up all GPUs in one line."""
    limit = sum(g.limits.get("device", 0) for g in gpus)
    device, host, disk = (sum(g.tiers.get(tier, 0) for g in gpus) for tier in TIERS)
    others = f"{format_bytes(host)} in host memory, {format_bytes(disk)} on disk"
    percents = [g.utilisation_percent for g in gpus if g.utilisation_percent is not None]
    parts = [
        f"{counted(sum(bool(g.gpu) for g in gpus), 'GPU')} on {counted(len({g.node for g in gpus}), 'node')}",
        f"Dask's data: {format_use(device, limit)} on devices, {others}",
    ]
    if percents:
        parts.append(f"utilisation {sum(percents) / len(percents):.0f} %")
    if restarts := sum(g.restarts for g in gpus):
        parts.append(f"{counted(restarts, 'worker')} started anew")
    return "; ".join(parts)


@dataclass(frozen=True, slots=True, repr=False)
class Bindings(Shown):
    """The bindings of all workers of a cluster, planned and actual; a table in a terminal and in a notebook."""

    workers: tuple[WorkerFacts, ...]

    @property
    def differences(self) -> dict[str, tuple[str, ...]]:
        """Differences from the plan, by the worker's name."""
        return {w.name: tuple(w.differences) for w in self.workers if w.differences}

    @property
    def table(self) -> Table:
        """Planned and actual bindings; differences and reasons are below each row, what all workers share below all."""
        names = ("GPU", "cores planned", "cores now", "memory planned", "memory now", "OS threads", "NIC")
        columns = (_WORKER, *map(Column, names), _FAULTS, Column("reasons", kind="note"))
        apart, alike = shared_reasons([w.reasons for w in self.workers])
        rows = [
            (w.name, w.gpu_text, w.cores, *_actual(w), w.nic, tuple(w.differences), mine)
            for w, mine in zip(self.workers, apart, strict=True)
        ]
        verdict = "read back from the kernel: all threads are where they were planned"
        if wrong := self.differences:
            verdict = f"{len(wrong)} of {len(self.workers)} workers not as planned"
        obstacles = sorted({w.node_copies for w in self.workers if w.spec})
        ways = ", ".join(f"by the connection ({why})" if why else "by one copy" for why in obstacles)
        notes = [*alike, verdict, *(f"large values within a node: {way}" for way in [ways] if way)]
        return Table(columns, rows, notes=notes)


def _actual(worker: WorkerFacts) -> tuple[str, str, str, str]:
    now = worker.actual
    cells = (str(now.cpuset), format_memory(now), str(len(now.threads))) if now else ("", "", "")
    return cells[0], worker.numa, *cells[1:]


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
        bars = Table((_WORKER, *map(Column, TIERS)), [(m.name, *tier_bars(m, most)) for m in rows]).html()
        return page(bars, KEY, f"<details><summary>Numbers and moves</summary>{preformatted(str(self))}</details>")


def examine(workers: Sequence[WorkerFacts]) -> tuple[CheckResult, ...]:
    """Judge workers for the doctor: each difference from the plan, and GPUs that other libraries have filled."""
    wrong = [warning(text, _TAKEN, w.name) for w in workers for text in w.differences]
    measured = [w for w in workers if w.gpu and None not in (w.device_used_bytes, w.device_limit_bytes)]
    by_gpu = attrgetter("gpu")
    for mine in map(list, (group for _, group in groupby(sorted(measured, key=by_gpu), by_gpu))):
        # NVML counts a device as a whole
        used = (max if mine[0].device_source == "NVML" else sum)(w.device_used_bytes or 0 for w in mine)
        others = used - sum(w.device_managed_bytes for w in mine)
        limit, capacity = (sum(w.limits.get(name, 0) for w in mine) for name in ("device", "capacity"))
        if others > capacity - limit:
            text = f"{format_use(others, None, capacity)} on its GPU are not Dask's data, which may have"
            wrong.append(warning(f"{text} {format_bytes(limit)}: allocations will fail", _ALLOCATED, mine[0].name))
    fine = len(workers) - len({result.name for result in wrong})
    return (*wrong, ok(f"{counted(fine, 'worker')} as planned", name="workers"))


def tier_bars(m: WorkerFacts, most_disk: int) -> tuple[Bar, Bar, Bar]:
    """Return a bar for each tier: Dask's data, other memory in use, and a mark where spilling begins."""
    used = max(m.device_managed_bytes, m.device_used_bytes or 0)
    host_used, disk = max(m.process_bytes, m.host_managed_bytes), m.spilled_to_disk_bytes
    device_text = format_use(used, m.device_limit_bytes, m.device_capacity_bytes)
    host_text, disk_text = format_use(host_used, m.host_limit_bytes), format_bytes(disk) if disk else "-"
    device_end = m.device_capacity_bytes or m.device_limit_bytes or used
    host_end = m.host_limit_bytes or host_used
    return (
        Bar(device_text, TIER_COLOURS["device"], m.device_managed_bytes, used, device_end, m.device_limit_bytes),
        Bar(host_text, TIER_COLOURS["host"], m.host_managed_bytes, host_used, host_end, m.host_limit_bytes),
        Bar(disk_text, TIER_COLOURS["disk"], disk, disk, most_disk),
    )


def format_use(used: int, limit: int | None, end: int | None = None) -> str:
    """Format a use of memory: ``1.0 GiB of 8.0 GiB (limit 6.4 GiB)``; there are ``end`` bytes, None: unknown."""
    text = f"{format_bytes(used)} of {format_bytes(end)}" if end else format_bytes(used)
    return f"{text} (limit {format_bytes(limit)})" if limit and limit != end else text


_Facts = Sequence[WorkerFacts]


def jobs_table(jobs: Iterable[Job]) -> Table:
    """Show described jobs."""
    return Table(_JOBS, [(job.id, job.text, job.has, job.nodes, job.log) for job in jobs])


def cluster_page(
    kind: str, name: str, state: str, link: str, jobs: Table, workers: _Facts, goal: int, hint: str = "", away: str = ""
) -> str:
    """Render a cluster, to have ``goal`` workers: state, dashboard's link, jobs, memory and workers by GPU.

    ``hint``: how browsers elsewhere reach the link; ``away``: why there are fewer workers than the goal.
    """
    present, nodes, gpus = len(workers), {w.node for w in workers}, {w.gpu or w.pci for w in workers} - {""}
    count = f"{present}" if present >= goal else f"{present} of {goal}"
    where = f" on {counted(len(gpus), 'GPU')}" if gpus else ""
    where += f", {counted(len(nodes), 'node')}" if present else ""
    colour = _STATES.get(state.split(":", maxsplit=1)[0].split(" ", maxsplit=1)[0], "#d93a2b")
    title = f'{escape(kind)} <span class="dim" style="font-weight: normal">{escape(name)}</span>'
    parts = [
        f"<h3>{title}</h3>",
        f'<p><span class="dot" style="background: {colour}"></span>Status: <strong>{escape(state)}</strong>'
        f" &nbsp; Workers: <strong>{count}</strong>{where}</p>",
    ]
    if away and present < goal:
        parts.append(f'<p class="bad">{escape(away)}</p>')
    if link:
        parts.append(f'<p>Dashboard: <a href="{escape(link)}" target="_blank">{escape(link)}</a>{escape(hint)}</p>')
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
    return Table((_WORKER, *map(Column, columns), _FAULTS), rows)

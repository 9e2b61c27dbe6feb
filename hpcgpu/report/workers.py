"""The facts of one worker, the same wherever they are shown, and the tables of all workers: bindings and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hpcgpu.model import ActualBinding, WorkerSpec
from hpcgpu.report import Column, Shown, Table
from hpcgpu.report.plain import format_gpu, format_memory, format_ports, worker_reasons
from hpcgpu.units import counted, format_bytes

# The store's names.
TIERS = ("device", "host", "disk")
DIRECTIONS = ("device_to_host", "host_to_disk", "disk_to_host", "host_to_device")
DIRECTION_TEXTS = {way: way.replace("_", " ") for way in DIRECTIONS}


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


def total(workers: Sequence[WorkerFacts]) -> WorkerFacts:
    """Sum the workers' memory up as a worker named ``all``; a number that is unknown for one is unknown for all.

    NVML's ``device_used_bytes`` are those of the whole device: if workers share a device, they have no sum.
    """
    shared = len(workers) > 1 and any(w.device_source == "NVML" for w in workers)
    sources = {w.device_source for w in workers}
    sizes = ("copy_bytes", "process_bytes", "spilled_to_host_bytes", "rescues", "immovable_number", "immovable_bytes")
    limits = ("device_limit_bytes", "device_capacity_bytes", "host_limit_bytes")
    summed: dict[str, Any] = {name: sum(getattr(w, name) for w in workers) for name in sizes}
    summed |= {name: _known_sum(getattr(w, name) for w in workers) for name in limits}
    return WorkerFacts(
        name="all",
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
    )


def _known_sum(values: Iterable[int | None]) -> int | None:
    """Return a sum; None if a value is unknown."""
    sizes = list(values)
    return None if None in sizes else sum(filter(None, sizes))


def headline(gpus: Sequence[WorkerFacts]) -> str:
    """Sum up all GPUs in one line."""
    limit = sum(g.limits.get("device", 0) for g in gpus)
    device, host, disk = (format_bytes(sum(g.tiers.get(tier, 0) for g in gpus)) for tier in TIERS)
    percents = [g.utilisation_percent for g in gpus if g.utilisation_percent is not None]
    parts = [
        f"{counted(sum(bool(g.gpu) for g in gpus), 'GPU')} on {counted(len({g.node for g in gpus}), 'node')}",
        f"Dask's data: {device} of {format_bytes(limit)} on devices, {host} in host memory, {disk} on disk",
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
        """Planned and actual bindings; differences and reasons are below each row."""
        names = ("worker", "GPU", "cores planned", "cores now", "memory planned", "memory now", "OS threads", "NIC")
        columns = [Column(name, kind="name" if name == "worker" else "text") for name in names]
        rows = [
            (w.name, w.gpu_text, w.cores, *_actual(w), w.nic, tuple(w.differences), tuple(w.reasons))
            for w in self.workers
        ]
        verdict = "read back from the kernel: all threads are where they were planned"
        if wrong := self.differences:
            verdict = f"{len(wrong)} of {len(self.workers)} workers not as planned"
        obstacles = sorted({w.node_copies for w in self.workers if w.spec})
        ways = [f"by the connection ({why})" if why else "by one copy" for why in obstacles]
        columns += [Column("differences", kind="fault", mark="not as planned: "), Column("reasons", kind="note")]
        return Table(columns, rows, notes=[verdict, *(f"large values within a node: {way}" for way in ways)])


def _actual(worker: WorkerFacts) -> tuple[str, str, str, str]:
    now = worker.actual
    cells = (str(now.cpuset), format_memory(now), str(len(now.threads))) if now else ("", "", "")
    return cells[0], worker.numa, *cells[1:]

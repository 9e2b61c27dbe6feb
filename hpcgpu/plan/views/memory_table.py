"""Show the memory of workers as tables: managed by the store, and in use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.plan.jobs.usage import DIRECTION_TEXTS, DIRECTIONS
from hpcgpu.units import format_bytes

# In the notebook and on the page of GPUs: Paul Tol's "bright" scheme, which colour-blind readers can distinguish.
TIER_COLOURS = {"device": "#228833", "host": "#4477AA", "disk": "#CCBB44"}
_NOTHING = "-"
_SOURCES = {
    "simulated": "arrays on the simulated GPU",
    "pool": "arrays in the worker's CuPy pool",
    "NVML": "the whole device, by NVML",
}


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
            return _NOTHING
        return f"{format_bytes(self.nbytes)} in {self.number} ({self.seconds:.2f} s, {self.gb_per_s:.2f} GB/s)"


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """The memory of one worker at one moment, in bytes; None: unknown, or no limit."""

    name: str
    device_managed_bytes: int = 0  # Dask's data
    device_used_bytes: int | None = None  # in use, by device_source
    device_limit_bytes: int | None = None  # where spilling begins
    device_capacity_bytes: int | None = None  # the worker's part of the device's memory
    # ``simulated``; ``pool``: arrays in this worker's CuPy pool, Dask's and others; ``NVML``: the whole device, other
    # processes and CUDA's own memory included; empty: unknown
    device_source: str = ""
    # Dask's data in host memory: host data, data spilled from the device, and copies of it that are kept when it goes
    # up again
    host_managed_bytes: int = 0
    process_bytes: int = 0  # resident memory of the process, without simulated device memory
    host_limit_bytes: int | None = None  # memory_limit
    spilled_to_host_bytes: int = 0  # data below the tier in which it is used, as spilled_to_disk_bytes
    spilled_to_disk_bytes: int = 0
    # by direction: device_to_host, host_to_disk, disk_to_host, host_to_device
    moved: Mapping[str, Moved] = field(default_factory=dict)
    rescues: int = 0  # allocations that failed on the device, and succeeded after the store had made room
    immovable_number: int = 0  # values that stay in memory instead of going to disk: they cannot be pickled
    immovable_bytes: int = 0
    allocator: str = "system"  # of host memory: system, or jemalloc with its version

    @property
    def host_unmanaged_bytes(self) -> int:
        """The process's memory other than Dask's data: modules, values of tasks, the allocator's reserve."""
        return max(0, self.process_bytes - self.host_managed_bytes)


def total(workers: Sequence[WorkerMemory]) -> WorkerMemory:
    """Sum the workers up as a worker named ``all``; a number that is unknown for one is unknown for all.

    NVML's ``device_used_bytes`` are those of the whole device: if workers share a device, they have no sum.
    """
    shared = len(workers) > 1 and any(w.device_source == "NVML" for w in workers)
    sources = {w.device_source for w in workers}
    return WorkerMemory(
        name="all",
        device_managed_bytes=sum(w.device_managed_bytes for w in workers),
        device_used_bytes=None if shared else _known_sum(w.device_used_bytes for w in workers),
        device_limit_bytes=_known_sum(w.device_limit_bytes for w in workers),
        device_capacity_bytes=_known_sum(w.device_capacity_bytes for w in workers),
        device_source=sources.pop() if len(sources) == 1 else "",
        host_managed_bytes=sum(w.host_managed_bytes for w in workers),
        process_bytes=sum(w.process_bytes for w in workers),
        host_limit_bytes=_known_sum(w.host_limit_bytes for w in workers),
        spilled_to_host_bytes=sum(w.spilled_to_host_bytes for w in workers),
        spilled_to_disk_bytes=sum(w.spilled_to_disk_bytes for w in workers),
        moved={
            way: Moved(sum(m.nbytes for m in moves), sum(m.number for m in moves), sum(m.seconds for m in moves))
            for way in DIRECTIONS
            for moves in [[w.moved[way] for w in workers if way in w.moved]]
        },
        rescues=sum(w.rescues for w in workers),
        immovable_number=sum(w.immovable_number for w in workers),
        immovable_bytes=sum(w.immovable_bytes for w in workers),
        allocator=", ".join(sorted({w.allocator for w in workers})),
    )


def render(workers: Sequence[WorkerMemory]) -> str:
    """Format tables of the memory and of the moves, each with a sum line, and an explanation of the columns."""
    rows = [*workers, total(workers)]
    device = {
        "worker": [w.name for w in rows],
        "device: managed": [format_bytes(w.device_managed_bytes) for w in rows],
        "in use": [_size(w.device_used_bytes) for w in rows],
        "limit": [_size(w.device_limit_bytes) for w in rows],
        "capacity": [_size(w.device_capacity_bytes) for w in rows],
    }
    host = {
        "host: managed": [format_bytes(w.host_managed_bytes) for w in rows],
        "unmanaged": [format_bytes(w.host_unmanaged_bytes) for w in rows],
        "process": [format_bytes(w.process_bytes) for w in rows],
        "limit": [_size(w.host_limit_bytes) for w in rows],
        "spilled: to host": [format_bytes(w.spilled_to_host_bytes) for w in rows],
        "to disk": [format_bytes(w.spilled_to_disk_bytes) for w in rows],
    }
    text = _aligned([*device.items(), *host.items()])
    if any(m.number for w in workers for m in w.moved.values()):
        moves = {title: [str(w.moved.get(way, Moved())) for w in rows] for way, title in DIRECTION_TEXTS.items()}
        text += "\n" + _aligned([("moved", device["worker"]), *moves.items()])
    else:
        text += "nothing has been moved\n"
    if rows[-1].rescues:
        text += f"allocations that failed on the device and succeeded after data was moved: {rows[-1].rescues}\n"
    if number := rows[-1].immovable_number:
        size = format_bytes(rows[-1].immovable_bytes)
        text += f"values that cannot be pickled and stay in memory (the log names their types): {number}, {size}\n"
    sources = {w.device_source for w in workers} - {""}
    notes = ["managed: Dask's data", *(f"in use: {_SOURCES[s]}" for s in sorted(sources))]
    return f"{text}{'; '.join(notes)}; allocator: {rows[-1].allocator}\n"


def _known_sum(values: Iterable[int | None]) -> int | None:
    """Return a sum; None if a value is unknown."""
    sizes = list(values)
    return None if None in sizes else sum(filter(None, sizes))


def _size(size: int | None) -> str:
    return _NOTHING if size is None else format_bytes(size)


def _aligned(columns: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Align columns below their headers: names left, numbers right."""
    padded = []
    for number, (head, cells) in enumerate(columns):
        width = max(len(head), *(len(c) for c in cells))
        padded.append([c.rjust(width) if number else c.ljust(width) for c in (head, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True)) + "\n"

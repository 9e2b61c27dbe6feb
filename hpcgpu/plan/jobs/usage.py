"""The use that a run made of its GPUs and of its memory: the workers' lives, summed up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

# As the store calls them.
TIERS = ("device", "host", "disk")
DIRECTIONS = ("device_to_host", "host_to_disk", "disk_to_host", "host_to_device")
DIRECTION_WORDS = {way: way.replace("_", " ") for way in DIRECTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUsage:
    """The life of one worker process, so far or to its end.

    Attributes
    ----------
    gpu : str
        Node and UUID of its GPU; empty for one of ``cpu_workers``.
    begin_s, end_s : float
        On one clock for all workers.
    busy_s : float
        Time with a task running.
    moved_bytes : mapping of str to int
        By direction.
    peak_bytes : mapping of str to int
        The most of Dask's data in each tier, and ``process``: the most resident memory of the process.
    limit_bytes : mapping of str to int
        ``device`` and ``process``; a tier without a limit is not in it.

    """

    name: str
    gpu: str = ""
    begin_s: float = 0.0
    end_s: float = 0.0
    busy_s: float = 0.0
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUsage:
    """All workers of a run together.

    Attributes
    ----------
    wall_s : float
        Since the scheduler's start.
    walltime_s : int or None
        The time that was asked for.
    gpus, workers : int
        How many there were, over the whole run.
    gpu_s, idle_gpu_s : float
        Time in which a GPU had a worker, summed over GPUs; and the part of it without a running task.
    busy_share : float or None
        Part of the time of all workers with a GPU, or of all where none has one, in which a task ran. None: no time.
    moved_bytes : mapping of str to int
        By direction, summed over workers.
    peak_bytes, limit_bytes : mapping of str to int
        Of the worker that had the most in a tier.
    restarts : int
        Worker processes that took the place of one before.

    """

    wall_s: float
    walltime_s: int | None = None
    gpus: int = 0
    workers: int = 0
    gpu_s: float = 0.0
    idle_gpu_s: float = 0.0
    busy_share: float | None = None
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: Mapping[str, int] = field(default_factory=dict)
    restarts: int = 0


def sum_up(lives: Sequence[WorkerUsage], wall_s: float, walltime_s: int | None = None) -> RunUsage:
    """Return the use of a whole run.

    Workers that share a GPU may be busy at the same time: then their busy times, summed, are taken for the GPU's, up
    to the time that it had a worker.
    """
    on_gpus = sorted((life for life in lives if life.gpu), key=lambda life: life.gpu)
    by_gpu = [list(group) for _, group in groupby(on_gpus, key=lambda life: life.gpu)]
    held = [covered_s((life.begin_s, life.end_s) for life in group) for group in by_gpu]
    busy = [min(sum(life.busy_s for life in group), s) for group, s in zip(by_gpu, held, strict=True)]
    counted = on_gpus or lives
    lived_s = sum(life.end_s - life.begin_s for life in counted)
    names = {life.name for life in lives}
    peaks = {what: max(lives, key=lambda life: life.peak_bytes.get(what, 0)) for what in (*TIERS, "process") if lives}
    return RunUsage(
        wall_s=wall_s,
        walltime_s=walltime_s,
        gpus=len(by_gpu),
        workers=len(names),
        gpu_s=sum(held),
        idle_gpu_s=sum(held) - sum(busy),
        busy_share=min(1.0, sum(life.busy_s for life in counted) / lived_s) if lived_s > 0 else None,
        moved_bytes={way: sum(life.moved_bytes.get(way, 0) for life in lives) for way in DIRECTIONS},
        peak_bytes={what: life.peak_bytes.get(what, 0) for what, life in peaks.items()},
        limit_bytes={what: life.limit_bytes[what] for what, life in peaks.items() if life.limit_bytes.get(what)},
        restarts=len(lives) - len(names),
    )


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total

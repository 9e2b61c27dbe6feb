"""Sum up the lives of workers: the use that a run made of its GPUs and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

# The store's names.
TIERS = ("device", "host", "disk")
DIRECTIONS = ("device_to_host", "host_to_disk", "disk_to_host", "host_to_device")
DIRECTION_TEXTS = {way: way.replace("_", " ") for way in DIRECTIONS}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUsage:
    """The life of one worker process, so far or to its end."""

    name: str
    gpu: str = ""  # node and UUID; empty: one of cpu_workers
    begin_s: float = 0.0  # on one clock for all workers, as end_s
    end_s: float = 0.0
    busy_s: float = 0.0  # with a task running
    moved_bytes: Mapping[str, int] = field(default_factory=dict)  # by direction
    # of Dask's data in each tier, and of the process's resident memory (``process``)
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    limit_bytes: Mapping[str, int] = field(default_factory=dict)  # device, process; a tier without a limit is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class RunUsage:
    """The use of a run by all its workers."""

    wall_s: float  # since the scheduler's start
    walltime_s: int | None = None  # requested
    gpus: int = 0  # over the whole run, as workers
    workers: int = 0
    gpu_s: float = 0.0  # in which a GPU had a worker, summed over GPUs
    idle_gpu_s: float = 0.0  # part of gpu_s without a running task
    # of the time of workers with a GPU, or of all if none has one, with a task running; None: no time
    busy_share: float | None = None
    moved_bytes: Mapping[str, int] = field(default_factory=dict)  # by direction, summed over workers
    peak_bytes: Mapping[str, int] = field(default_factory=dict)  # of the worker with the most in a tier, as limit_bytes
    limit_bytes: Mapping[str, int] = field(default_factory=dict)
    restarts: int = 0  # worker processes that replaced an earlier one


def sum_up(lives: Sequence[WorkerUsage], wall_s: float, walltime_s: int | None = None) -> RunUsage:
    """Sum up the use of a whole run.

    Workers that share a GPU may be busy at the same time: then their busy times, summed, are taken for the GPU's, up to
    the time that it had a worker.
    """
    on_gpus = sorted((life for life in lives if life.gpu), key=lambda life: life.gpu)
    by_gpu = [list(group) for _, group in groupby(on_gpus, key=lambda life: life.gpu)]
    held = [covered_s((life.begin_s, life.end_s) for life in group) for group in by_gpu]
    busy = [min(sum(life.busy_s for life in group), s) for group, s in zip(by_gpu, held, strict=True)]
    counted = on_gpus or lives
    lived_s = sum(life.end_s - life.begin_s for life in counted)
    names = {life.name for life in lives}
    peaks = {tier: max(lives, key=lambda life: life.peak_bytes.get(tier, 0)) for tier in (*TIERS, "process") if lives}
    return RunUsage(
        wall_s=wall_s,
        walltime_s=walltime_s,
        gpus=len(by_gpu),
        workers=len(names),
        gpu_s=sum(held),
        idle_gpu_s=sum(held) - sum(busy),
        busy_share=min(1.0, sum(life.busy_s for life in counted) / lived_s) if lived_s > 0 else None,
        moved_bytes={way: sum(life.moved_bytes.get(way, 0) for life in lives) for way in DIRECTIONS},
        peak_bytes={tier: life.peak_bytes.get(tier, 0) for tier, life in peaks.items()},
        limit_bytes={tier: life.limit_bytes[tier] for tier, life in peaks.items() if life.limit_bytes.get(tier)},
        restarts=len(lives) - len(names),
    )


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total

"""Advise the next request from a run's use of its GPUs and memory. All thresholds stand here."""

from __future__ import annotations

import math

from hpcgpu.plan.jobs.usage import RunUsage
from hpcgpu.units import format_bytes, format_duration

# A shorter run predicts little: it is mostly the start of workers and the import of modules.
ENOUGH_S = 60.0
# Below LOW_BUSY fewer GPUs are advised: as many as the same work would keep busy for GOOD_BUSY of the time.
LOW_BUSY, GOOD_BUSY = 0.5, 0.8
# The peak of a worker's process as part of its limit.
LITTLE_MEMORY, MUCH_MEMORY = 0.25, 0.9
# Advised size or time, divided by the used one.
MARGIN = 1.5
# Part of the time limit that was used.
LITTLE_TIME, MUCH_TIME = 0.25, 0.9
_ROUND_S, _ROUND_BYTES = 300, 1 << 30


def advise(usage: RunUsage) -> tuple[str, ...]:
    """Return advice for the next job of the same work; () if the request fits, or little is known."""
    if usage.wall_s < ENOUGH_S or usage.busy_share is None:
        return ()
    return tuple(filter(None, (_gpus(usage), _memory(usage), _walltime(usage))))


def _gpus(usage: RunUsage) -> str:
    """Advise fewer GPUs, only where their memory was not needed."""
    busy, spilled = usage.busy_share or 0.0, usage.moved_bytes.get("device_to_host", 0)
    if busy >= LOW_BUSY or usage.gpus < 2:
        return ""
    fewer = max(1, math.ceil(usage.gpus * busy / GOOD_BUSY))
    if spilled or fewer >= usage.gpus:
        return ""
    return (
        f"{fewer} GPU{'s' if fewer > 1 else ''} in place of {usage.gpus}: a task ran in {busy:.0%} of the workers' "
        "time, and nothing was spilled"
    )


def _memory(usage: RunUsage) -> str:
    peak, limit = usage.peak_bytes.get("process", 0), usage.limit_bytes.get("process", 0)
    disk = usage.peak_bytes.get("disk", 0)
    if disk:
        return (
            f"more host memory, or more GPUs: up to {format_bytes(disk)} of a worker's data were on disk "
            f"(its host memory: {format_bytes(limit) if limit else 'no limit'})"
        )
    if not limit or not peak:
        return ""
    if peak > MUCH_MEMORY * limit:
        return f"more host memory: a worker's process took {format_bytes(peak)} of {format_bytes(limit)}"
    enough = math.ceil(peak * MARGIN / _ROUND_BYTES) * _ROUND_BYTES
    if peak < LITTLE_MEMORY * limit and enough < limit:
        return (
            f"less host memory: {format_bytes(enough)} for each worker in place of {format_bytes(limit)}; no process "
            f"took more than {format_bytes(peak)}"
        )
    return ""


def _walltime(usage: RunUsage) -> str:
    limit_s = usage.walltime_s
    if not limit_s:
        return ""
    if usage.wall_s > MUCH_TIME * limit_s:
        return f"a longer time limit: {format_duration(int(usage.wall_s))} of {format_duration(limit_s)} were used"
    enough = math.ceil(usage.wall_s * MARGIN / _ROUND_S) * _ROUND_S
    if usage.wall_s < LITTLE_TIME * limit_s and enough < limit_s:
        return (
            f"a time limit of {format_duration(enough)} in place of {format_duration(limit_s)}: "
            f"{format_duration(int(usage.wall_s))} were used, and shorter jobs start earlier"
        )
    return ""

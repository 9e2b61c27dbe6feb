"""The summary of a run, from its workers' usage, with advice for the next one. All thresholds stand here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from hpcgpu.report.energy import EnergyUse
from hpcgpu.report.table import Shown, Table
from hpcgpu.report.workers import DIRECTION_TEXTS, DIRECTIONS, TIERS, WorkerFacts, format_use
from hpcgpu.units import JOULES_PER_KWH, counted, format_bytes, format_duration, format_energy

# A shorter run predicts little: it is mostly the start of workers and the import of modules.
ENOUGH_S = 60.0
# Below LOW_BUSY fewer GPUs are advised: as many as the same work would keep busy for GOOD_BUSY of the time.
LOW_BUSY, GOOD_BUSY = 0.5, 0.8
# The peak of a worker's process as part of its limit.
LITTLE_MEMORY, MUCH_MEMORY = 0.25, 0.9
# Data on disk as part of that limit: of less, more memory would change little.
MUCH_DISK = 0.01
# Advised size or time, divided by the used one.
MARGIN = 1.5
# Part of the time limit that was used.
LITTLE_TIME, MUCH_TIME = 0.25, 0.9
_ROUND_S, _ROUND_BYTES = 300, 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Summary(Shown):
    """The use of a run by all its workers, and advice; shown as lines in a terminal and in a notebook."""

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
    # None: no worker could read it
    gpu_energy_j: float | None = None  # of the GPUs, while they had a worker
    idle_gpu_energy_j: float | None = None  # part of it without a running task
    cpu_energy_j: float | None = None  # of the nodes' CPUs, also by other processes
    carbon_g_per_kwh: float | None = None  # from the settings

    @property
    def energy_j(self) -> float | None:
        """The energy that is known; None if none is."""
        known = [joules for joules in (self.gpu_energy_j, self.cpu_energy_j) if joules is not None]
        return sum(known) if known else None

    @property
    def carbon_g(self) -> float | None:
        """The CO2 of that energy; None if it, or the factor, is unknown."""
        if self.energy_j is None or self.carbon_g_per_kwh is None:
            return None
        return self.energy_j / JOULES_PER_KWH * self.carbon_g_per_kwh

    @property
    def advice(self) -> tuple[str, ...]:
        """The advice for the next run; () if the request fits, or the run was short."""
        if self.wall_s < ENOUGH_S or self.busy_share is None:  # little is known
            return ()
        return tuple(filter(None, (_gpus(self), _memory(self), _walltime(self))))

    def as_dict(self) -> dict[str, Any]:
        """Return all as plain data: the figures with their units in their names, and the advice."""
        return {
            **asdict(self),
            "gpu_hours": self.gpu_s / 3600,
            "idle_gpu_minutes": self.idle_gpu_s / 60,
            "energy_kwh": None if self.energy_j is None else self.energy_j / JOULES_PER_KWH,
            "carbon_g": self.carbon_g,
            "advice": list(self.advice),
        }

    def as_json(self) -> str:
        """Return :meth:`as_dict` as one line of JSON; numbers have at most six decimals."""
        return json.dumps({name: round(v, 6) if isinstance(v, float) else v for name, v in self.as_dict().items()})

    @property
    def lines(self) -> tuple[str, ...]:
        """The summary for people, a few lines."""
        peaks = [f"{tier} {format_use(size, self.limit_bytes.get(tier))}" for tier, size in self.peak_bytes.items()]
        moves = [
            f"{text} {format_bytes(n)}" for way, text in DIRECTION_TEXTS.items() if (n := self.moved_bytes.get(way, 0))
        ]
        lines = (
            _time(self),
            _energy(self),
            f"peak of one worker: {', '.join(peaks)}" if peaks else "",
            f"moved: {', '.join(moves)}" if moves else "nothing was spilled",
            *(f"next time: {line}" for line in self.advice),
        )
        return tuple(filter(None, lines))

    @property
    def table(self) -> Table:
        """The lines as a table without rows."""
        return Table((), (), self.lines[0], self.lines[1:])


def sum_up(
    usages: Sequence[WorkerFacts],
    wall_s: float,
    walltime_s: int | None = None,
    energy: EnergyUse | None = None,
    carbon_g_per_kwh: float | None = None,
) -> Summary:
    """Sum up the use of a whole run, from the facts of each worker process at its end, and their energy.

    Workers that share a GPU may be busy together: their summed times count as the GPU's, up to the time it had a
    worker.
    """
    by_gpu: dict[tuple[str, str], list[WorkerFacts]] = {}
    for usage in usages:
        if usage.gpu:
            by_gpu.setdefault((usage.node, usage.gpu), []).append(usage)
    held = [covered_s((usage.begin_s, usage.end_s) for usage in group) for group in by_gpu.values()]
    busy = [min(sum(usage.busy_s for usage in group), s) for group, s in zip(by_gpu.values(), held, strict=True)]
    measured = [usage for usage in usages if usage.gpu] or usages
    lived_s = sum(usage.end_s - usage.begin_s for usage in measured)
    names = {usage.name for usage in usages}
    gpus, nodes = (energy.gpus.values(), energy.nodes.values()) if energy else ((), ())
    peaks = {tier: max(usages, key=lambda usage: usage.peaks.get(tier, 0)) for tier in (*TIERS, "process") if usages}
    return Summary(
        wall_s=wall_s,
        walltime_s=walltime_s,
        gpus=len(by_gpu),
        workers=len(names),
        gpu_s=sum(held),
        idle_gpu_s=sum(held) - sum(busy),
        busy_share=min(1.0, sum(usage.busy_s for usage in measured) / lived_s) if lived_s > 0 else None,
        moved_bytes={way: sum(usage.moved[way].nbytes for usage in usages if way in usage.moved) for way in DIRECTIONS},
        peak_bytes={tier: usage.peaks.get(tier, 0) for tier, usage in peaks.items()},
        limit_bytes={tier: usage.limits[tier] for tier, usage in peaks.items() if usage.limits.get(tier)},
        restarts=len(usages) - len(names),
        gpu_energy_j=sum(gpu.joules for gpu in gpus) if gpus else None,
        idle_gpu_energy_j=sum(gpu.joules - gpu.busy_joules for gpu in gpus) if gpus else None,
        cpu_energy_j=sum(node.joules for node in nodes) if nodes else None,
        carbon_g_per_kwh=carbon_g_per_kwh,
    )


def covered_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def _gpus(used: Summary) -> str:
    """Advise fewer GPUs, only where their memory was not needed."""
    busy, spilled = used.busy_share or 0.0, used.moved_bytes.get("device_to_host", 0)
    if busy >= LOW_BUSY or used.gpus < 2:
        return ""
    fewer = max(1, math.ceil(used.gpus * busy / GOOD_BUSY))
    if spilled or fewer >= used.gpus:
        return ""
    share = f"a task ran in {busy:.0%} of the workers' time"
    return f"{counted(fewer, 'GPU')} in place of {used.gpus}: {share}, and nothing was spilled"


def _memory(used: Summary) -> str:
    peak, limit = used.peak_bytes.get("process", 0), used.limit_bytes.get("process", 0)
    disk = used.peak_bytes.get("disk", 0)
    if disk > MUCH_DISK * (limit or _ROUND_BYTES):
        return (
            f"more host memory, or more GPUs: up to {format_bytes(disk)} of a worker's data were on disk "
            f"(its host memory: {format_bytes(limit) if limit else 'no limit'})"
        )
    if not limit or not peak:
        return ""
    if peak > MUCH_MEMORY * limit:
        return f"more host memory: a worker's process took {format_bytes(peak)} of {format_bytes(limit)}"
    enough = math.ceil(peak * MARGIN / _ROUND_BYTES) * _ROUND_BYTES
    if peak < LITTLE_MEMORY * limit and enough < limit and not disk:
        return (
            f"less host memory: {format_bytes(enough)} for each worker in place of {format_bytes(limit)}; no process "
            f"took more than {format_bytes(peak)}"
        )
    return ""


def _walltime(used: Summary) -> str:
    limit_s = used.walltime_s
    if not limit_s:
        return ""
    if used.wall_s > MUCH_TIME * limit_s:
        return f"a longer time limit: {format_duration(int(used.wall_s))} of {format_duration(limit_s)} were used"
    enough = math.ceil(used.wall_s * MARGIN / _ROUND_S) * _ROUND_S
    if used.wall_s < LITTLE_TIME * limit_s and enough < limit_s:
        return (
            f"a time limit of {format_duration(enough)} in place of {format_duration(limit_s)}: "
            f"{format_duration(int(used.wall_s))} were used, and shorter jobs start earlier"
        )
    return ""


def _time(used: Summary) -> str:
    workers = counted(used.gpus, "GPU") if used.gpus else counted(used.workers, "worker") + " without a GPU"
    parts = [f"{format_duration(int(used.wall_s))} with {workers}"]
    if used.gpus:
        parts.append(f"{used.gpu_s / 3600:.2f} GPU hours")
    if used.busy_share is not None:
        parts.append(f"a task ran in {used.busy_share:.0%} of the workers' time")
    if used.gpus:
        parts.append(f"{used.idle_gpu_s / 60:.1f} GPU minutes idle")
    if used.restarts:
        parts.append(f"{counted(used.restarts, 'worker')} started anew")
    return ", ".join(parts)


def _energy(used: Summary) -> str:
    parts = []
    if (joules := used.gpu_energy_j) is not None:
        idle = f", {(used.idle_gpu_energy_j or 0.0) / joules:.0%} of it while no task ran" if joules else ""
        parts.append(f"{format_energy(joules)} by the {counted(used.gpus, 'GPU')}{idle}")
    if used.cpu_energy_j is not None:
        parts.append(f"{format_energy(used.cpu_energy_j)} by the nodes' CPUs")
    if used.carbon_g is not None:
        parts.append(f"{used.carbon_g:,.3g} g of CO2 at {used.carbon_g_per_kwh:g} g/kWh")
    return f"energy: {'; '.join(parts)}" if parts else ""

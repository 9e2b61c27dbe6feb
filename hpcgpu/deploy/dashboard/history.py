"""The history of all GPUs since a page was opened: samples as arrays, by time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcgpu.plan.jobs.usage import DIRECTIONS, TIERS
from hpcgpu.plan.views.gpus import GpuFacts

# Rows of a sample: bytes by tier, bytes moved by direction, part of the device's limit, utilisation in percent.
SHARE, UTILISATION = len(TIERS) + len(DIRECTIONS), len(TIERS) + len(DIRECTIONS) + 1


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """All GPUs at one moment."""

    time_s: float  # since the epoch
    names: tuple[str, ...]  # of the workers
    values: np.ndarray  # float64, shape (rows, GPUs); NaN: unknown

    @classmethod
    def of(cls, time_s: float, gpus: Sequence[GpuFacts]) -> Sample:
        """Return a sample of these facts."""
        values = np.array([_row(g) for g in gpus], np.float64).reshape(len(gpus), UTILISATION + 1).T
        return cls(time_s, tuple(g.name for g in gpus), values)


def _row(g: GpuFacts) -> tuple[float | None, ...]:
    tiers, moved = g.tier_bytes, g.moved_bytes
    share = g.device_share
    return (
        *(tiers.get(tier, 0) for tier in TIERS),
        *(moved.get(way, 0) for way in DIRECTIONS),
        None if share is None else 100 * share,
        g.utilisation_percent,
    )


class History:
    """The last ``length`` samples."""

    def __init__(self, length: int) -> None:
        self.samples: deque[Sample] = deque(maxlen=length)

    def add(self, sample: Sample) -> bool:
        """Add a sample; return whether its workers are those of the one before."""
        same = bool(self.samples) and self.samples[-1].names == sample.names
        self.samples.append(sample)
        return same

    def series(self, worker: str) -> dict[str, list[float]]:
        """Return times in ms, bytes by tier, and bytes per second by direction, of one worker or, for "", of all."""
        # A worker that is restarted begins to count anew: negative rates are 0.
        out: dict[str, list[float]] = {name: [] for name in ("time", *TIERS, *DIRECTIONS)}
        before: tuple[float, np.ndarray] | None = None
        for sample in self.samples:
            chosen = [i for i, name in enumerate(sample.names) if name == worker] if worker else slice(None)
            sums = sample.values[: len(TIERS) + len(DIRECTIONS), chosen].sum(axis=1)
            moved = sums[len(TIERS) :]
            past_s, past = before or (sample.time_s, moved)
            rates = np.maximum(moved - past, 0) / max(sample.time_s - past_s, 1e-3)
            before = sample.time_s, moved
            for name, value in zip(out, (1e3 * sample.time_s, *sums[: len(TIERS)], *rates), strict=True):
                out[name].append(float(value))
        return out

    def strip(self, row: int) -> list[np.ndarray]:
        """Return each sample's row as an image, one pixel wide, float32 of shape (GPUs of now, 1)."""
        names = self.samples[-1].names
        return [column(sample, row, names) for sample in self.samples]


def column(sample: Sample, row: int, names: tuple[str, ...]) -> np.ndarray:
    """Return one row of a sample as an image, its GPUs in the order of ``names``, the first on top."""
    values = sample.values[row]
    if sample.names != names:
        known = dict(zip(sample.names, values, strict=True))
        values = np.array([known.get(name, np.nan) for name in names])
    return values[::-1, None].astype(np.float32)

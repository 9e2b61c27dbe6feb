"""The energy that a GPU, or this node's CPUs, have used since an object was made, in joules."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from hpcgpu.host import nvml

_ZONES = Path("/sys/class/powercap")
# Linux's names of zones that contain no other one of these. A package has its cores; "psys" has the packages.
_COUNTED = ("package", "dram")


def growth(before: int, now: int, wraps_at: int = 0) -> int:
    """Return the growth of a counter that wraps; one that began anew (0: it does not wrap) has not grown."""
    return max(0, now - before + (wraps_at if now < before else 0))


class GpuEnergy:
    """A GPU's energy by NVML: the growth of its counter, or the integral of its power where it has none.

    A MIG slice has neither: it counts the whole GPU's.
    """

    def __init__(self, pci: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pci, self._clock = pci, clock
        self._joules = 0.0
        self._last = (clock(), *nvml.energy(pci))

    def read(self) -> float | None:
        """Return the joules until now; until the last answer if NVML gives none now; None if it never gave one."""
        then_s, counter_mj, power_mw = self._last
        if counter_mj is None and power_mw is None:
            return None
        now_s, now_mj, now_mw = last = (self._clock(), *nvml.energy(self._pci))
        if counter_mj is not None and now_mj is not None:
            self._joules += growth(counter_mj, now_mj) / 1e3
            self._last = last
        elif power_mw is not None and now_mw is not None:
            self._joules += (power_mw + now_mw) / 2e3 * (now_s - then_s)
            self._last = last
        return self._joules


class CpuEnergy:
    """The energy of this node's CPUs and their memory by RAPL, which most nodes let root alone read (Linux 5.10)."""

    def __init__(self, folder: Path = _ZONES) -> None:
        self._joules = 0.0
        self._zones: dict[Path, tuple[int, int]] = {}  # the last value, and where it wraps; µJ
        for zone in folder.glob("intel-rapl:*"):  # AMD's CPUs, too; intel-rapl-mmio has the packages again
            with contextlib.suppress(OSError, ValueError):
                if (zone / "name").read_text().startswith(_COUNTED):
                    self._zones[zone] = _read(zone, "energy_uj"), _read(zone, "max_energy_range_uj")

    def read(self) -> float | None:
        """Return the joules until now; None: this process may read no counter."""
        for zone, (before, wraps_at) in self._zones.items():
            with contextlib.suppress(OSError, ValueError):
                now = _read(zone, "energy_uj")
                self._joules += growth(before, now, wraps_at) / 1e6
                self._zones[zone] = now, wraps_at
        return self._joules if self._zones else None


def _read(zone: Path, name: str) -> int:
    return int((zone / name).read_text())

"""Facts about each GPU of a run, from the workers' heartbeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One worker and its GPU."""

    name: str
    node: str = ""
    gpu: str = ""  # UUID; empty: a worker without a GPU
    pci: str = ""
    model: str = ""
    cores: str = ""
    memory: str = ""
    nic: str = ""
    tier_bytes: Mapping[str, int] = field(default_factory=dict)  # Dask's data in device, host, disk
    used_bytes: int | None = None  # on the device by all processes (NVML); None: unknown
    # device: where spilling begins; capacity: of the device; process: host memory
    limit_bytes: Mapping[str, int] = field(default_factory=dict)
    # by NVML; of a simulated GPU the share of time with a running task; None: unknown
    utilisation_percent: int | None = None
    moved_bytes: Mapping[str, int] = field(default_factory=dict)  # by direction, since the worker's start
    restarts: int = 0  # processes that replaced this worker's first one
    differences: Sequence[str] = ()  # between process and plan, in words
    reasons: Sequence[str] = ()

    @property
    def device_share(self) -> float | None:
        """Dask's data on the device as part of its limit; None without a limit."""
        limit = self.limit_bytes.get("device", 0)
        return self.tier_bytes.get("device", 0) / limit if limit else None


def headline(gpus: Sequence[GpuFacts]) -> str:
    """Sum up all GPUs in one line."""
    sums = {tier: sum(g.tier_bytes.get(tier, 0) for g in gpus) for tier in ("device", "host", "disk")}
    limit = sum(g.limit_bytes.get("device", 0) for g in gpus)
    percents = [g.utilisation_percent for g in gpus if g.utilisation_percent is not None]
    parts = [
        f"{counted(sum(bool(g.gpu) for g in gpus), 'GPU')} on {counted(len({g.node for g in gpus}), 'node')}",
        f"Dask's data: {format_bytes(sums['device'])} of {format_bytes(limit)} on devices, "
        f"{format_bytes(sums['host'])} in host memory, {format_bytes(sums['disk'])} on disk",
    ]
    if percents:
        parts.append(f"utilisation {sum(percents) / len(percents):.0f} %")
    if restarts := sum(g.restarts for g in gpus):
        parts.append(f"{counted(restarts, 'worker')} started anew")
    return "; ".join(parts)

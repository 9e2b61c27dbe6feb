"""The facts known of each GPU of a run now, as the workers' heartbeats have brought it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One worker and its GPU.

    Attributes
    ----------
    gpu : str
        UUID; empty for a worker without a GPU.
    tier_bytes : mapping of str to int
        Dask's data in each tier: ``device``, ``host``, ``disk``.
    used_bytes : int or None
        Memory in use on the device, by NVML: other processes, too. None: unknown.
    limit_bytes : mapping of str to int
        ``device``: where spilling begins; ``capacity`` of the device; ``process``: host memory.
    utilisation_percent : int or None
        By NVML; of a simulated GPU the part of the time in which a task ran. None: unknown.
    moved_bytes : mapping of str to int
        By direction, since the worker's start.
    restarts : int
        Processes that took the place of this worker's first one.
    differences : sequence of str
        Where the process is not as planned, in words.

    """

    name: str
    node: str = ""
    gpu: str = ""
    pci: str = ""
    model: str = ""
    cores: str = ""
    memory: str = ""
    nic: str = ""
    tier_bytes: Mapping[str, int] = field(default_factory=dict)
    used_bytes: int | None = None
    limit_bytes: Mapping[str, int] = field(default_factory=dict)
    utilisation_percent: int | None = None
    moved_bytes: Mapping[str, int] = field(default_factory=dict)
    restarts: int = 0
    differences: Sequence[str] = ()
    reasons: Sequence[str] = ()

    @property
    def device_share(self) -> float | None:
        """Dask's data on the device as part of its limit; None without a limit."""
        limit = self.limit_bytes.get("device", 0)
        return self.tier_bytes.get("device", 0) / limit if limit else None


def headline(gpus: Sequence[GpuFacts]) -> str:
    """Return all GPUs in one line."""
    sums = {tier: sum(g.tier_bytes.get(tier, 0) for g in gpus) for tier in ("device", "host", "disk")}
    limit = sum(g.limit_bytes.get("device", 0) for g in gpus)
    known = [g.utilisation_percent for g in gpus if g.utilisation_percent is not None]
    said = [
        f"{counted(sum(bool(g.gpu) for g in gpus), 'GPU')} on {counted(len({g.node for g in gpus}), 'node')}",
        f"Dask's data: {format_bytes(sums['device'])} of {format_bytes(limit)} on devices, "
        f"{format_bytes(sums['host'])} in host memory, {format_bytes(sums['disk'])} on disk",
    ]
    if known:
        said.append(f"utilisation {sum(known) / len(known):.0f} %")
    if restarts := sum(g.restarts for g in gpus):
        said.append(f"{counted(restarts, 'worker')} started anew")
    return "; ".join(said)

"""The batch systems by name, each in a site's dialect."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hpcgpu.batch.batch_system import BatchSystem
from hpcgpu.batch.pbs import Pbs
from hpcgpu.batch.slurm import Slurm
from hpcgpu.errors import ConfigError

SYSTEMS: Mapping[str, type[Slurm] | type[Pbs]] = MappingProxyType({"slurm": Slurm, "pbs": Pbs})


def get(name: str, **dialect: Any) -> BatchSystem:  # fields of the system's own class
    """Return the batch system ``name`` in a site's dialect, which its file's schema has checked; or ConfigError."""
    if name not in SYSTEMS:
        raise ConfigError(f"there is no batch system {name!r}; allowed: {', '.join(SYSTEMS)}")
    return SYSTEMS[name](**dialect)

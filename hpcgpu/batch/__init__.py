"""Batch systems: one module per system, each a pure value: floor 2. Commands go out, results come in.

To add one: a frozen class, derived from :class:`BatchSystem`, in its own module, and recordings of its programs'
output under ``tests/data/batch``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from hpcgpu.batch.common import BatchSystem as BatchSystem
from hpcgpu.batch.pbs import Pbs as Pbs
from hpcgpu.batch.slurm import Slurm as Slurm
from hpcgpu.errors import ConfigError

SYSTEMS: Mapping[str, type[Slurm] | type[Pbs]] = MappingProxyType({"slurm": Slurm, "pbs": Pbs})


def get(name: str, **dialect: Any) -> BatchSystem:  # fields of the system's own class
    """Return the batch system ``name`` in a site's dialect, which its file's schema has checked; or ConfigError."""
    if name not in SYSTEMS:
        raise ConfigError(f"there is no batch system {name!r}; allowed: {', '.join(SYSTEMS)}")
    return SYSTEMS[name](**dialect)

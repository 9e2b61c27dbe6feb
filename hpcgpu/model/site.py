"""What a site needs: defaults, and the dialect of its batch system."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One site file.

    Attributes
    ----------
    batch : str
        ``slurm`` or ``pbs``.
    dialect : Mapping of str to object
        Fields of the batch system's class (how this site spells GPUs and memory).
    defaults : Mapping of str to object
        Settings, under users' names; a user's own value wins.
    required : tuple of str
        Settings that the site refuses a job without.
    ucx : bool
        Whether UCX has a transport for the site's network.

    """

    name: str
    batch: str
    dialect: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    defaults: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    required: tuple[str, ...] = ()
    gpus_per_node: int | None = None
    ucx: bool = True
    notes: tuple[str, ...] = ()

"""A command to run, and its result. Built by pure code, executed only by :mod:`hpcgpu.host`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class Command:
    """An argv (never a shell line), its standard input, extra environment, variables to leave out, and time limit."""

    argv: tuple[str, ...]
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    timeout_s: float = 60.0
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one :class:`Command`; 127 when the program does not exist, 124 on time-out."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was left running; its start time (clock ticks since boot) tells it from a later one of its pid."""

    pid: int
    start_time: int

"""A command to run, and its result. Pure code builds it, only :mod:`hpcgpu.host` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

TIMED_OUT = 124  # a command's exit code, as timeout(1) has it


@dataclass(frozen=True, slots=True)
class Command:
    """An argv (never a shell line) with its standard input, environment and time limit."""

    argv: tuple[str, ...]
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # added to the environment
    timeout_s: float = 60.0
    without: frozenset[str] = frozenset()  # variables to remove from the environment


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one :class:`Command`."""

    argv: tuple[str, ...]
    returncode: int  # 127: the program does not exist; TIMED_OUT: killed after timeout_s
    stdout: str = ""
    stderr: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was left running; pid and start time identify it, as pids are reused."""

    pid: int
    start_time: int  # in clock ticks since boot

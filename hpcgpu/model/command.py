"""Commands, which only :mod:`hpcgpu.host` runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    without: frozenset[str] = frozenset()  # variables to remove from the environment; SQUEUE_*: all that begin so

    def removed(self, environ: Iterable[str]) -> list[str]:
        """Return the names in the environment that the program does not get."""
        prefixes = tuple(name[:-1] for name in self.without if name.endswith("*"))
        return [name for name in environ if name in self.without or name.startswith(prefixes)]


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one :class:`Command`."""

    argv: tuple[str, ...]
    returncode: int  # 127: the program does not exist; TIMED_OUT: killed after timeout_s
    stdout: str = ""
    stderr: str = ""

    @property
    def message(self) -> str:
        """Return the program's errors, else its output, for a message; never empty."""
        return self.stderr.strip() or self.stdout.strip() or f"exit code {self.returncode}, no output"

    @property
    def output(self) -> str:
        """Return the errors and the output, as a site's wrapper may give its reason in either; never empty."""
        return "\n".join(filter(None, (self.stderr.strip(), self.stdout.strip()))) or self.message


@dataclass(frozen=True, slots=True)
class Started:
    """A process that was left running; pid and start time identify it, as pids are reused."""

    pid: int
    start_time: int  # in clock ticks since boot

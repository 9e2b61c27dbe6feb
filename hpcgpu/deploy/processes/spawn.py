"""What deploy needs from the rank program: processes forked from its image."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Child:
    """A forked process.

    Attributes
    ----------
    control : socket
        A stream socket to it; its end of file means that the other side is gone.
    exited : Future of int
        Exit code, negative for a signal.

    """

    pid: int
    control: socket.socket
    exited: asyncio.Future[int]


class Spawner(Protocol):
    """Forks a child that calls ``entry`` ("module:function") with ``(spec, control socket)``."""

    def spawn(self, entry: str, spec: object, rank: int) -> Child:
        """Return at once; ``rank`` says whose stdout and stderr the child gets."""

    def kill(self) -> None:
        """End what forks, and with it all children; each is then reported as ended."""

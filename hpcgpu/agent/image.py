"""What a leader holds: the zygote, a private folder, the followers' door, and on rank 0 the scheduler."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from hpcgpu.agent.follower import Door
from hpcgpu.agent.zygote import Zygote
from hpcgpu.errors import LaunchError

if TYPE_CHECKING:
    from hpcgpu.deploy.scheduler import SchedulerSpec
    from hpcgpu.spill.scratch import Scratch

_SCHEDULER_START_S = 60.0
# distributed reads it at import: 40 lines for the start of two workers otherwise
_QUIET = ("DASK_LOGGING__DISTRIBUTED", "warning")


@dataclass(frozen=True, slots=True)
class SchedulerChild:
    """The scheduler process, forked before the meeting."""

    pid: int
    control: socket.socket

    def wait_started(self) -> dict[str, Any]:
        """Return its first message: port and dashboard port.

        Raises
        ------
        LaunchError
            It ended, or said nothing.

        """
        self.control.settimeout(_SCHEDULER_START_S)
        try:
            line = self.control.recv(4096)
        except TimeoutError:
            line = b""
        if not line:
            raise LaunchError("the scheduler process did not start; what it said stands above")
        self.control.settimeout(None)
        message: dict[str, Any] = json.loads(line)
        return message


class Image:
    """Used as a context manager: at its end everything that it forked is gone, and its folder is removed."""

    def __init__(self, zygote: Zygote, scratch: Scratch) -> None:
        self.zygote, self.scratch = zygote, scratch
        self.door = Door(scratch.path)

    @classmethod
    def make(cls, local_directory: str | None, *, simulated: bool, after_mpi: bool = False) -> Self:
        """Import what all processes of the node need and fork the zygote, or execute it where MPI has run already."""
        if not os.environ.get("HPCGPU_DEBUG"):
            os.environ.setdefault(*_QUIET)
        import hpcgpu.deploy.nanny
        import hpcgpu.deploy.scheduler
        import hpcgpu.deploy.worker  # noqa: F401
        from hpcgpu.deploy.devices import preload
        from hpcgpu.spill.scratch import Scratch

        preload(simulated)
        zygote = Zygote.execute() if after_mpi else Zygote.fork()
        try:
            return cls(zygote, Scratch.make(local_directory, "run"))
        except BaseException:
            zygote.close()
            raise

    def start_scheduler(self, spec: SchedulerSpec) -> SchedulerChild:
        """Fork the scheduler on this rank's own output; it starts while MPI does."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self.zygote.spawn("hpcgpu.deploy.scheduler:main", spec, (theirs.fileno(), 1, 2))
        return SchedulerChild(pid, ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.door.close()
        self.zygote.close()
        self.scratch.remove()

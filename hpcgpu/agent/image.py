"""What a leader holds: the zygote, a private folder, the followers' door, and on rank 0 the scheduler."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from hpcgpu.agent.follower import Door, Estate
from hpcgpu.agent.zygote import Zygote
from hpcgpu.errors import LaunchError
from hpcgpu.host import process

if TYPE_CHECKING:
    from hpcgpu.deploy.processes.scheduler import SchedulerSpec
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

    def __init__(self, zygote: Zygote, scratch: Scratch, door: Door) -> None:
        self.zygote, self.scratch, self.door = zygote, scratch, door

    @classmethod
    def make(cls, local_directory: str | None, *, simulated: bool, after_mpi: bool = False) -> Self:
        """Import what all processes of the node need and fork the zygote, or execute it where MPI has run already."""
        _quieten()
        with process.importing():
            import hpcgpu.deploy.processes.nanny
            import hpcgpu.deploy.processes.scheduler
            import hpcgpu.deploy.processes.worker  # noqa: F401
            from hpcgpu.deploy.processes.devices import preload
            from hpcgpu.spill.scratch import Scratch

            preload(simulated)
        zygote = Zygote.execute() if after_mpi else Zygote.fork()
        try:
            scratch = Scratch.make(local_directory, "run")
            return cls(zygote, scratch, Door(str(scratch.path / "door")))
        except BaseException:
            zygote.close()
            raise

    @classmethod
    def inherit(cls, estate: Estate) -> Self:
        """Make an image in the folder of a dead leader, whose workers are dead, too."""
        _quieten()
        zygote = Zygote.execute()  # it imports while this process does
        with process.importing():
            import hpcgpu.deploy.processes.nanny  # noqa: F401
            from hpcgpu.spill.scratch import Scratch

        folder = Path(estate.folder)
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)  # a worker's; doors and lock stay
        return cls(zygote, Scratch(folder, estate.lock), estate.door)

    def start_scheduler(self, spec: SchedulerSpec) -> SchedulerChild:
        """Fork the scheduler on this rank's own output; it starts while MPI does."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self.zygote.spawn("hpcgpu.deploy.processes.scheduler:main", spec, (theirs.fileno(), 1, 2))
        return SchedulerChild(pid, ours)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.door.close()
        self.zygote.close()
        self.scratch.remove()


def _quieten() -> None:
    if not os.environ.get("HPCGPU_DEBUG"):
        os.environ.setdefault(*_QUIET)

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
from hpcgpu.host import log, process, remover

if TYPE_CHECKING:
    from hpcgpu.deploy.processes.scheduler import SchedulerSpec
    from hpcgpu.model import Settings
    from hpcgpu.spill.storage.scratch import Scratch

_SCHEDULER_START_S = 60.0
# The zygote reports a child's end a moment after its connections have ended.
_REPORT_S = 5.0
# distributed reads it at import: 40 lines for the start of two workers otherwise
_QUIET = ("DASK_LOGGING__DISTRIBUTED", "warning")


@dataclass(frozen=True, slots=True)
class SchedulerChild:
    """The scheduler process, forked before the meeting."""

    pid: int
    control: socket.socket
    zygote: Zygote

    def wait_started(self, deadline_s: float = _SCHEDULER_START_S) -> dict[str, Any]:
        """Return its first message: port and dashboard port.

        Raises
        ------
        LaunchError
            It failed, ended, or said nothing within ``deadline_s`` seconds.

        """
        self.control.settimeout(deadline_s)
        try:
            with self.control.makefile("rb") as lines:
                line = lines.readline()
        except TimeoutError:
            raise LaunchError(
                f"the scheduler process has not said within {deadline_s:g} s that it listens; where it hangs stands "
                "above, in its traceback"
            ) from None
        if not line:
            raise LaunchError(f"the scheduler process {self._end()} before it listened")
        self.control.settimeout(None)
        message: dict[str, Any] = json.loads(line)
        if message["op"] == "error":
            log.write(message["text"])
            raise LaunchError(f"the scheduler could not be started: {message['reason']}")
        return message

    def _end(self) -> str:
        code = self.zygote.wait_exit(self.pid, _REPORT_S)
        if code is None:
            return "closed its connection"
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


class Image:
    """Used as a context manager: at its end everything that it forked is gone, and its folder is removed."""

    def __init__(self, zygote: Zygote, scratch: Scratch, door: Door) -> None:
        self.zygote, self.scratch, self.door = zygote, scratch, door

    @classmethod
    def make(cls, settings: Settings, *, after_mpi: bool = False) -> Self:
        """Import what all processes of the node need and fork the zygote, or execute it where MPI has run already.

        Raises
        ------
        ConfigError
            The folder cannot be used, which is seen first: the imports take a second. Or Dask's configuration has a
            limit of memory that is none.

        """
        from hpcgpu.spill.storage.scratch import Scratch

        _quieten()
        with contextlib.ExitStack() as undo:
            scratch = Scratch.make(settings.local_directory, "run", trusted=settings.trust_local_directory)
            undo.callback(scratch.remove)
            remover.start(str(scratch.lock_path))
            with process.importing():
                import hpcgpu.deploy.processes.nanny
                import hpcgpu.deploy.processes.scheduler
                import hpcgpu.deploy.processes.worker  # noqa: F401
                from hpcgpu.deploy.processes import handshakes
                from hpcgpu.deploy.processes.devices import preload
                from hpcgpu.deploy.settings import check_dask_memory

                handshakes.limit()
                preload(settings.gpus is not None)
            check_dask_memory()
            # what is forked has the lock, too: the folder is there as long as one process that writes to it
            zygote = Zygote.execute(scratch.lock) if after_mpi else Zygote.fork()
            undo.callback(zygote.close)
            image = cls(zygote, scratch, Door(str(scratch.path / "door")))
            undo.pop_all()
        return image

    @classmethod
    def inherit(cls, estate: Estate) -> Self:
        """Make an image in the folder of a dead leader, whose workers are dead, too."""
        _quieten()
        zygote = Zygote.execute(estate.lock)  # it imports while this process does
        with process.importing():
            import hpcgpu.deploy.processes.nanny  # noqa: F401
            from hpcgpu.deploy.processes import handshakes
            from hpcgpu.spill.storage.scratch import Scratch

        handshakes.limit()
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
        return SchedulerChild(pid, ours, self.zygote)

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

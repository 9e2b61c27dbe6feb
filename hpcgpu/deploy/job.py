"""The one job of a cluster object: submitted or started, asked for, ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from hpcgpu.batch import BatchSystem
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.host import process
from hpcgpu.host.run import run
from hpcgpu.model import JobSpec, JobState, JobStatus

_TAIL_LINES = 30
# A job whose lease has ended is gone within 5 s.
_END_S = 10.0
_CANCEL_S = 20.0
_POLL_S = 0.5
_RETRIES_S = (1.0, 2.0, 4.0)
TIMED_OUT = 124
_OF_A_JOB = ("SLURM_", "PBS_", "OMPI_COMM_", "PMI", "PALS_")


class Job(Protocol):
    """What a cluster needs of its job; one class for each way of having one."""

    id: str
    script: str

    async def submit(self) -> None:
        """Ask for it; raises SubmitError in the batch system's words."""

    async def check(self) -> None:
        """Raise JobError, with its reason and the tail of its log, when it has ended."""

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs another one on a node of the job."""

    async def end(self) -> None:
        """Wait a little for it to end by itself, then cancel it; return when it has ended."""


class LocalJob:
    """The ranks as processes of this machine, which die with this one.

    Parameters
    ----------
    argv : tuple of str
        The command that starts the ranks.
    environ : mapping of str to str
        Variables that the ranks get besides those of this process.
    folder : Path
        For the log.
    preload : str
        A library that the ranks preload.

    """

    def __init__(self, argv: tuple[str, ...], environ: Mapping[str, str], folder: Path, preload: str = "") -> None:
        self.id = ""
        self.script = f"{shlex.join(argv)}\n"
        self._preload = preload
        self._argv, self._environ, self._log = argv, environ, folder / "hpcgpu.log"
        self._process: asyncio.subprocess.Process | None = None

    async def submit(self) -> None:
        """Start the ranks."""
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env(),
                preexec_fn=functools.partial(process.die_with_parent, os.getpid(), signal.SIGTERM),
            )
        self.id = str(self._process.pid)

    def _env(self) -> dict[str, str]:
        """Return the ranks' environment: they are to know nothing of a batch job that this process may be in."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}
        return {**own, **process.image_env(own, self._preload), **self._environ}

    async def check(self) -> None:
        """Raise JobError when the ranks have ended."""
        if self._process and self._process.returncode is not None:
            raise JobError(f"the ranks ended with exit code {self._process.returncode}: {tail(self._log)}")

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command itself: the job is here."""
        return argv

    async def end(self) -> None:
        """End the ranks: they know that the client is gone, and get a SIGTERM when they take long."""
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _END_S)
            return
        self._process.terminate()
        await self._process.wait()


class BatchJob:
    """One job of a batch system.

    Parameters
    ----------
    spec, script, system
        From :func:`hpcgpu.deploy.submit.plan_job`.
    say : callable
        Takes a line for the user: what the job is doing.

    """

    def __init__(self, spec: JobSpec, script: str, system: BatchSystem, say: Callable[[str], None]) -> None:
        self.id, self.script = "", script
        self._spec, self._system, self._say = spec, system, say
        self._said = ""

    async def submit(self) -> None:
        """Submit it; a refusal that may pass is tried again, any other raises SubmitError in the system's words."""
        command = self._system.submit(self.script, self._spec)
        for pause_s in (*_RETRIES_S, None):
            result = await run(command)
            try:
                self.id = self._system.read_submit(result)
            except SubmitError as e:
                # after a time-out the job may be there all the same: a second one would be a ghost
                if pause_s is None or not e.transient or result.returncode == TIMED_OUT:
                    raise
                self._tell(f"{e}; trying again in {pause_s} s")
                await asyncio.sleep(pause_s)
            else:
                self._tell("submitted")
                return

    async def check(self) -> None:
        """Say what it is doing when that has changed; raise JobError when it has ended."""
        try:
            status = await self._ask()
        except SubmitError as e:
            self._tell(str(e))
            return
        if status is None:
            return
        reason = f" ({status.reason})" if status.reason else ""
        if status.state is JobState.ENDED:
            exit_code = self._exit_code() if status.exit_code is None else status.exit_code
            code = "" if exit_code is None else f", exit code {exit_code}"
            log = Path(self._system.log(self._spec, self.id))
            raise JobError(f"job {self.id} has ended: {status.native or 'gone'}{reason}{code}; {tail(log)}")
        self._tell(f"{status.native}{reason}")

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs another one on a node of the job."""
        return self._system.onto(self.id, node, argv)

    async def end(self) -> None:
        """Wait for it to end by itself, then cancel it."""
        if not self.id or await self._ends_within(_END_S):
            return
        self._system.read_cancel(await run(self._system.cancel(self.id)))
        if not await self._ends_within(_CANCEL_S):
            self._tell(f"has been cancelled, but is still there after {_CANCEL_S:g} s")

    def _exit_code(self) -> int | None:
        """Return what the job script has left."""
        with contextlib.suppress(OSError, ValueError):
            return int(Path(self._spec.exit_file).read_text())
        return None

    async def _ask(self) -> JobStatus | None:
        """Return its status; None when nobody knows it."""
        for question in (self._system.status, self._system.history):
            found = self._system.read_status(await run(question([self.id])))
            if self.id in found:
                return found[self.id]
        return None

    async def _ends_within(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            try:
                status = await self._ask()
            except SubmitError as e:
                self._tell(str(e))
            else:
                if status is None or status.state is JobState.ENDED:
                    return True
                if status.state is JobState.PENDING:
                    return False  # it will not end by itself
            if loop.time() > deadline:
                return False
            await asyncio.sleep(_POLL_S)

    def _tell(self, what: str) -> None:
        if what != self._said:
            self._said = what
            self._say(f"job {self.id or '-'}: {what}")


def tail(log: Path) -> str:
    """Return the end of a log with its path, for an error."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as e:
        return f"its log {log} cannot be read ({e.strerror})"
    if not lines:
        return f"its log {log} is empty"
    shown = "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])
    return f"the end of its log {log}:\n{shown}"

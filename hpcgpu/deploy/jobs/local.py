"""The one job of a cluster object as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path

from hpcgpu.deploy.jobs.tail import tail
from hpcgpu.errors import JobError, LaunchError
from hpcgpu.host import private, process
from hpcgpu.model import JobState, JobStatus
from hpcgpu.plan.jobs.launcher import Launch
from hpcgpu.spill.storage import parents

# A job whose lease has ended is gone within 5 s.
_END_S = 10.0
_OF_A_JOB = ("SLURM_", "PBS_", "OMPI_COMM_", "PMI", "PALS_")


class LocalJob:
    """The ranks as processes of this machine, which die with this one.

    Parameters
    ----------
    launch : Launch
        What starts the ranks.
    environ : mapping of str to str
        Variables that the ranks get besides those of this process.
    folder : Path
        The run's, which goes with it.
    log_directory : str, optional
        For the log, which stays there; otherwise it lies in the run's folder.
    preload : str
        A library that the ranks preload.

    """

    def __init__(
        self,
        launch: Launch,
        environ: Mapping[str, str],
        folder: Path,
        log_directory: str | None = None,
        preload: str = "",
    ) -> None:
        self.id = ""
        self.script = f"{shlex.join(launch.argv)}\n"
        self._preload = preload
        self._launch, self._environ, self._keeps = launch, environ, log_directory is not None
        self._folder, self._log = folder, Path(log_directory or folder) / "hpcgpu.log"
        self.log = str(self._log)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def status(self) -> JobStatus:
        """How the ranks are."""
        if self._process and self._process.returncode is not None:
            return JobStatus(JobState.ENDED, "", "", self._process.returncode)
        return JobStatus(JobState.RUNNING, "running")

    async def seems_over(self) -> bool:
        """Tell whether the ranks have ended."""
        return self._process is not None and self._process.returncode is not None

    async def submit(self) -> None:
        """Start the ranks.

        Raises
        ------
        LaunchError
            There is no such program, or its log cannot be written.

        """
        try:
            self._process = await self._start()
        except OSError as e:
            raise LaunchError(
                f"the ranks could not be started ({e}): python and launcher say what starts them, log_directory where "
                "their log lies"
            ) from e
        self.id = str(self._process.pid)

    async def _start(self) -> asyncio.subprocess.Process:
        environ, parent = self._env(), os.getpid()

        parents.make(self._log.parent)
        with private.open_new(self._log) as log:
            return await asyncio.create_subprocess_exec(
                *self._launch.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
                preexec_fn=functools.partial(process.die_with_parent, parent, signal.SIGTERM),
            )

    def _env(self) -> dict[str, str]:
        """Return the ranks' environment: they are to know nothing of a batch job that this process may be in."""
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OF_A_JOB)}
        environ = {**own, **process.image_env(own, self._preload), **self._environ}
        return {**environ, **self._launch.within(str(self._folder), environ)}

    async def check(self) -> JobStatus:
        """Raise JobError when the ranks have ended."""
        if self._process and self._process.returncode is not None:
            said = await asyncio.to_thread(tail, self._log, kept=self._keeps)
            raise JobError(f"the ranks ended with exit code {self._process.returncode}: {said}")
        return self.status

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command itself: the job is here."""
        return argv

    async def end(self) -> None:
        """End the ranks: they know that the client is gone, and get a SIGTERM when they take long, then a SIGKILL."""
        if self._process is None or self._process.returncode is not None:
            return
        for force in (self._process.terminate, self._process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _END_S)
                return
            force()
        await self._process.wait()

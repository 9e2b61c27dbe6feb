"""The ranks of a run as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from hpcgpu import supervise
from hpcgpu.deploy.jobs.runs import log_tail
from hpcgpu.errors import JobError, LaunchError
from hpcgpu.host import private, process
from hpcgpu.host.scratch import make_private
from hpcgpu.launch import HOST_FILES, SEEN_OF_A_JOB, RankCommand
from hpcgpu.model import JobState, JobStatus
from hpcgpu.plan.jobs import HEAD, Job

# A job whose lease has ended is gone within 5 s.
_LOCAL_END_S = 10.0


class LocalRanks:
    """The ranks as processes of this machine, which die with this process."""

    def __init__(
        self,
        launch: RankCommand,
        environ: Mapping[str, str],  # added for the ranks
        folder: Path,  # the run's
        log_directory: str | None = None,  # keeps the log; None: it lies in the run's folder, and goes with it
        preload: str = "",  # library that the ranks preload
    ) -> None:
        self.id = ""
        variables = (f"{name}={shlex.quote(value)} " for name, value in launch.env)
        self.script = f"{''.join(variables)}{shlex.join(launch.argv)}\n"
        self._preload = preload
        self._launch, self._environ, self._keeps = launch, environ, log_directory is not None
        self._folder, self._log = folder, Path(log_directory or folder) / "hpcgpu.log"
        self.log = str(self._log)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def job(self) -> Job:
        """The ranks as a job; their number of workers is unknown."""
        status = JobStatus(JobState.RUNNING, "running")
        if self._process and self._process.returncode is not None:
            status = JobStatus(JobState.ENDED, "", "", self._process.returncode)
        return Job(id=self.id, role=HEAD, log=self.log, nodes=0, status=status)

    async def start(self) -> None:
        """Start the ranks; raise LaunchError if the program does not exist or its log cannot be written."""
        environ, parent = self._env(), os.getpid()
        try:
            with await supervise.to_thread(self._open_log) as log:
                self._process = await asyncio.create_subprocess_exec(
                    *self._launch.argv,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environ,
                    # Out of the process group of a notebook's kernel: an interrupted cell leaves the cluster.
                    start_new_session=True,
                    preexec_fn=functools.partial(process.die_with_parent, parent, signal.SIGTERM),
                )
        except OSError as e:
            raise LaunchError(
                f"the ranks could not be started ({e}): check python= and launcher=, which start them, and "
                "log_directory=, which has their log"
            ) from e
        self.id = str(self._process.pid)

    def _open_log(self) -> BinaryIO:
        make_private(self._log.parent)
        return private.open_new(self._log)

    def _env(self) -> dict[str, str]:
        """Return the ranks' environment, without the batch job that this process may be in."""
        outside = {
            name: value for name, value in os.environ.items() if not name.startswith((*SEEN_OF_A_JOB, *HOST_FILES))
        }
        environ = {**outside, **process.rank_env(outside, self._preload), **dict(self._launch.env), **self._environ}
        return {**environ, **self._launch.within(str(self._folder), environ)}

    async def check(self) -> Job:
        """Return the ranks as a job; raise JobError when they have ended."""
        if self._process and self._process.returncode is not None:
            end = await asyncio.to_thread(log_tail, self._log, kept=self._keeps)
            raise JobError(f"the ranks ended with exit code {self._process.returncode}; make a new cluster\n{end}")
        return self.job

    async def end(self, *, at_once: bool) -> None:
        """End the ranks: they see that the client is gone, and get a SIGTERM if they take long, then a SIGKILL."""
        if self._process is None or self._process.returncode is not None:
            return
        if at_once:  # no client has been there
            self._process.terminate()
        for force in (self._process.terminate, self._process.kill):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _LOCAL_END_S)
                return
            force()
        await self._process.wait()

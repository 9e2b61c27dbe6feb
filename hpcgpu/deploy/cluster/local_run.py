"""The run of a cluster on this machine: its ranks are processes that this process starts and ends.

Together: another process finds a run by the folder that the run has made.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from hpcgpu import supervise
from hpcgpu.deploy.dask_config import dask_environ
from hpcgpu.deploy.jobs import Run
from hpcgpu.deploy.jobs.fleet import SchedulerView
from hpcgpu.deploy.jobs.logs import log_tail
from hpcgpu.deploy.jobs.runs import Jobs
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.start import ld_preload, local_launch
from hpcgpu.errors import ConfigError, HpcGpuError, JobError, LaunchError
from hpcgpu.host import limits, private, process, remover
from hpcgpu.host.addresses import local_address
from hpcgpu.host.run import ended
from hpcgpu.host.scratch import Scratch, home_of, make_private, sweep
from hpcgpu.launch.environment import JOB_PREFIXES, WITHHELD
from hpcgpu.model import JobState, JobStatus, RunDocument, Settings
from hpcgpu.plan.jobs.job import HEAD, Job
from hpcgpu.plan.jobs.needs import Size

# A job whose lease has ended is gone within 5 s.
_LOCAL_END_S = 10.0
_RUNNING = JobStatus(JobState.RUNNING, "running")


def folders(node: str = "*", home: str | None = None) -> Iterator[Path]:
    """Yield the folders of this user's local clusters on a node, or on all that have the same ``home``, or TMPDIR."""
    for folder in home_of(home).glob(f"hpcgpu-client-{os.getuid()}-{node}-{'?' * 8}/*/"):
        with contextlib.suppress(FileNotFoundError):  # it is removed just now
            if folder.parent.lstat().st_uid == os.getuid():
                yield folder


def find(name: str) -> Run:
    """Return the run of a process on this machine, by name, job id or folder; ConfigError for none or several.

    Folders of dead processes are removed. A cluster with its own ``local_directory`` is found by that: a name with "/".
    """
    home = name if os.sep in name else None
    sweep(home_of(home))
    runs: list[Run] = []
    for folder in folders(os.uname().nodename, home):
        with contextlib.suppress(OSError, HpcGpuError):  # not ready yet, being removed, or of another version
            runs.append(Run.open(folder))
    matches = [run for run in runs if home or name in run.names]
    if len(matches) != 1:
        listed = ", ".join(f"{run.name} (job_id {run.head.id})" for run in runs if run.head) or "none"
        raise ConfigError(
            f"{len(matches)} local clusters have the {'folder' if home else 'name'} {name!r}; give the name or job_id "
            f"of one below {home_of(None)} (TMPDIR), or its local_directory, with '/'; in {home_of(home)}: {listed}"
        )
    return matches[0]


class LocalRun:
    """The ranks of one cluster object as processes of this machine, which die with this process.

    The object calls it on its event loop; any thread may read properties. The interface is that of
    :class:`hpcgpu.deploy.cluster.batch_run.BatchRun`, which has a scheduler alone here for ``scheduler="here"``.
    """

    label, limit, scales, given_up, jobs = "this machine", "", False, None, Jobs(())

    def __init__(
        self,
        settings: Settings,
        environ: Mapping[str, str],  # added for the ranks
        shape: str = "gang",
        attached: Run | None = None,  # of another process, to take up in place of a start
    ) -> None:
        self.settings, self._environ, self._shape, self._attached = settings, environ, shape, attached
        self.script = ""  # the command; "": not made here
        self.wanted_workers = self.requested_workers = 0  # counted when it was ready
        self._scratch: Scratch | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def job(self) -> Job | None:
        """The ranks as a job, whose number of workers is unknown; None before their start."""
        if self._attached and (head := self._attached.head):
            return replace(head, status=_RUNNING)
        if not self._process:
            return None
        code = self._process.poll()
        status = _RUNNING if code is None else JobStatus(JobState.ENDED, "", "", code)
        return Job(id=str(self._process.pid), role=HEAD, log=str(self._log), nodes=0, status=status)

    def explain(self) -> str:
        """Return the settings, what the workers need, and the command."""
        from hpcgpu.report.job import needs_table, settings_table  # brings what no other call needs

        size = Size(self.wanted_workers, per_node=self.wanted_workers)
        tables = settings_table(self.settings), needs_table(size, limits.read())
        return "\n".join((*(table.to_text() for table in tables), self.script))

    def make_folder(self) -> Path:
        """Make the run's folder, or return that of an existing run; called in a thread."""
        if self._attached:
            return self._attached.folder
        settings = self.settings
        self._scratch = Scratch.make(settings.local_directory, "client", trusted=settings.trust_local_directory)
        remover.start(str(self._scratch.lock_path))  # the kernel frees the lock when this process ends
        return scheduler_file.make_folder(self._scratch.path)

    async def start(self, folder: Path, view: SchedulerView) -> None:
        """Start the ranks; raise LaunchError if the program does not exist or its log cannot be written."""
        self._view = view
        if self._attached:
            await self.check()
            return
        self._document = RunDocument(settings=self.settings, shape=self._shape, folder=str(folder))
        parent = os.getpid()
        try:
            argv, environ, log = await supervise.to_thread(self._plan, self._document)
            with log:
                self._process = subprocess.Popen(
                    argv,
                    stdin=subprocess.DEVNULL,
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

    def _plan(self, document: RunDocument) -> tuple[tuple[str, ...], dict[str, str], BinaryIO]:
        """Return the command, its environment without the batch job that this process may be in, and its log."""
        launch = local_launch(document)
        variables = (f"{name}={shlex.quote(value)} " for name, value in launch.env)
        self.script = f"{''.join(variables)}{shlex.join(launch.argv)}\n"
        outside = {n: value for n, value in os.environ.items() if not n.startswith((*JOB_PREFIXES, *WITHHELD))}
        directory, preload, added = None, "", {}
        if document.shape != "head":  # a scheduler alone
            local_address(self.settings.interface)  # one that is not there is an error here, not in a rank's log
            directory, preload = self.settings.log_directory, ld_preload(self.settings)
            added = {**dask_environ(), **self._environ}
        self._log, self._keeps = Path(directory or document.folder, "hpcgpu.log"), directory is not None
        environ = {**outside, **process.rank_env(outside, preload), **dict(launch.env), **added}
        make_private(self._log.parent)
        return launch.argv, {**environ, **launch.within(document.folder, environ)}, private.open_new(self._log)

    async def ready(self, workers: int) -> None:
        """Record the number of workers at the end of the start, and from then on the run for :func:`find`."""
        self.wanted_workers = self.requested_workers = workers
        if self._scratch and self.job:
            run = Run.begin(self._document, "", None)
            run.add([self.job])
            await supervise.to_thread(run.save)

    async def check(self, *, poll: bool = False) -> Job:
        """Return the ranks as a job; JobError, with their log's tail, if they have ended."""
        job = self.job
        assert job
        if self._attached and process.start_time(int(job.id)) is None:
            raise JobError(f"the ranks have ended, with the cluster object that started them: {self._attached.owner}")
        if job.status and job.state is JobState.ENDED:
            end = await supervise.in_thread(log_tail, self._log, kept=self._keeps)
            raise JobError(f"the ranks ended with exit code {job.status.exit_code}; make a new cluster\n{end}")
        return job

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` beside the scheduler: itself."""
        return argv

    def workers_changed(self) -> None:
        """Do nothing: there are no jobs to check."""

    async def is_mine(self) -> bool:
        """Return whether the run ends with this object."""
        return self._attached is None

    async def claim(self, action: str) -> None:
        """Raise ConfigError if the ranks cannot go on after this ``action``, JobError if they are another object's."""
        if self._attached:
            raise JobError(f"this object cannot {action} the cluster: it ends with its owner, {self._attached.owner}")
        if action == "detach":
            raise ConfigError("the processes of a local cluster die with this one: it cannot be detached")

    def stop(self) -> None:
        """Do nothing: there are no jobs to look after."""

    async def leave(self, kind: str) -> str:
        """Return a line about ranks that go on without this object: ""."""
        return ""

    async def end(self) -> bool:
        """End the ranks: they see that the client is gone, get SIGTERM if they take long, then SIGKILL. Return True."""
        if self._process and self._process.poll() is None:
            if self._view.scheduler() is None:  # no client has been there
                self._process.terminate()
            for force in (self._process.terminate, self._process.kill):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended(self._process), _LOCAL_END_S)
                    break
                force()
            await ended(self._process)
        if self._scratch:
            await supervise.to_thread(self._scratch.remove)
        return True

"""The run of a cluster, as its object uses it: jobs of a batch system, or processes of this machine."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgpu.deploy.jobs.job_table import NO_WORKERS, JobWorkers
from hpcgpu.deploy.jobs.local import LocalRanks
from hpcgpu.deploy.jobs.rows import Jobs
from hpcgpu.deploy.settings import Wanted
from hpcgpu.errors import HpcGpuError
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.phase import End
from hpcgpu.plan.jobs.worker_names import read_member_name


@dataclass(slots=True, kw_only=True)
class SchedulerView:
    """The scheduler and workers of a cluster object, for its run. Any thread may call :meth:`present`."""

    scheduler: Callable[[], Any]  # return the connection pool to the present scheduler
    workers: Callable[[], Mapping[str, Any]]  # return the registered workers by address, with the scheduler's facts
    searching: Callable[[], bool]  # whether the scheduler does not answer, and is searched
    changed: Callable[[], None]  # called when there are new facts
    say: Callable[[str], None]  # takes a line for the user
    end: Callable[[], End | None]  # return how the cluster object has ended, if it has
    silent: Callable[[], Collection[str]] = frozenset  # return the addresses of workers without a recent heartbeat

    def present(self, head: str, *, elastic: bool) -> dict[str, JobWorkers]:
        """Return the registered workers by their job's id.

        ``head``: the job with the scheduler, whose workers are gone with it; "": it has none. ``elastic``: other jobs
        come and go, whose workers' names contain their job's id.
        """
        jobs: dict[str, JobWorkers] = {}
        of_head: list[str] = []
        silent = self.silent()
        for address, facts in list(self.workers().items()):
            name = read_member_name(str(facts["name"])) if elastic else None
            if name is None:
                of_head.append(address)
                continue
            before = jobs.get(name.job_id, NO_WORKERS)
            restarts = max(before.restarts, name.restart_count)
            is_silent = address in silent and (before.silent or not before.addresses)
            jobs[name.job_id] = JobWorkers((*before.addresses, address), restarts, is_silent)
        if head and of_head and not self.searching():
            jobs[head] = JobWorkers(tuple(of_head))
        return jobs

    async def retire(self, addresses: Sequence[str]) -> None:
        """Make workers hand their data to others and leave."""
        await self.scheduler().hpcgpu_retire(workers=list(addresses))

    async def remove(self, addresses: Sequence[str]) -> None:
        """Make the scheduler forget workers that are gone."""
        for address in addresses:
            await self.scheduler().unregister(address=address, expected=True, stimulus_id="hpcgpu-job-is-gone")


class Run:
    """The run of one cluster object, which calls it on its event loop; properties may be read by any thread.

    The methods here are those of a run whose scheduler is a process of this machine.
    """

    scales: bool = False  # whether jobs come and go
    takes_over: bool = False  # whether the run ends with this object, though another one has begun it
    folder: Path | None = None  # of a run that another object has begun
    script: str = ""  # of the job with the scheduler, or its command; "": not made here

    def __init__(self, wanted: Wanted) -> None:
        self.settings, self.site = wanted.settings, wanted.site
        self._ranks: LocalRanks | None = None
        self._first_workers = 0

    @property
    def job(self) -> Job | None:
        """The job with the scheduler; None before its submission."""
        return self._ranks.job if self._ranks and self._ranks.id else None

    @property
    def label(self) -> str:
        """The job with the scheduler, for people: ``job 123``, ``pid 4711``."""
        return f"pid {self._ranks.id}" if self._ranks else f"job {self.job.id if self.job else '-'}"

    @property
    def trouble(self) -> str:
        """Why the jobs are not looked after at present; "" if they are."""
        return ""

    @property
    def wanted_workers(self) -> int:
        """The number of workers that the cluster is to have."""
        return self._first_workers

    @property
    def requested_workers(self) -> int:
        """The workers, of these, whose jobs have been submitted."""
        return self.wanted_workers

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None if they may."""
        return None

    @property
    def jobs(self) -> Jobs:
        """The jobs of a batch system, and the last few that are gone."""
        return Jobs(())

    @property
    def ready_line(self) -> str:
        """A line in place of the usual one when the scheduler is ready; "" if the usual one is right."""
        return ""

    @abstractmethod
    def explain(self) -> str:
        """Return the plan, with where each part was set."""

    @abstractmethod
    def make_folder(self) -> Path:
        """Make the run's folder; called in a thread."""

    @abstractmethod
    async def start(self, folder: Path, view: SchedulerView) -> None:
        """Submit the job with the scheduler, or take up the job of another object's run.

        Raises SubmitError in the batch system's words, LaunchError, or JobError if the job has ended.
        """

    async def connected(self) -> None:
        """Go on after the connection to the scheduler."""

    async def check(self) -> Job:
        """Return the job with the scheduler; raise JobError, with the tail of its log, when it has ended."""
        assert self._ranks
        return await self._ranks.check()

    async def news(self) -> Job:
        """Return the job with the scheduler after a new poll of the batch system; raise as :meth:`check`."""
        return await self.check()

    def onto(self, node: str, argv: tuple[str, ...]) -> tuple[str, ...]:
        """Return the command that runs ``argv`` on a node of the job with the scheduler."""
        del node
        return argv

    def ready(self, workers: int) -> None:
        """Record the number of workers at the end of the start."""
        self._first_workers = workers

    def workers_changed(self) -> None:
        """Check the jobs soon: workers have come or gone."""

    @abstractmethod
    def check_detachable(self) -> None:
        """Raise ConfigError if the job cannot go on without this process."""

    def goes_on(self, kind: str) -> str:
        """Return a line about a job that its object leaves running; "" if it ends. ``kind``: the object's class."""
        del kind
        return ""

    def stop(self) -> None:
        """Stop looking after the jobs, which stay. It may be called again."""

    async def end(self) -> None:
        """End all jobs; raise SubmitError if some could not be cancelled."""
        if self._ranks:
            await self._ranks.end()

    async def ended(self) -> None:
        """Remove the leftovers of a run whose job has ended."""

    async def close(self) -> None:
        """End the processes that belong to this object; called last."""

"""How the processes of a cluster come to be, as its object asks for them: by a batch system, or on this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod

from hpcgpu.deploy.cluster.seen import Seen
from hpcgpu.deploy.cluster.session import Session
from hpcgpu.deploy.jobs.job import Head, Job
from hpcgpu.deploy.jobs.rows import Jobs
from hpcgpu.deploy.settings import Wanted
from hpcgpu.errors import HpcGpuError


class Run(ABC):
    """The run of one cluster object, which calls it on its event loop; properties may be read by any thread.

    Parameters
    ----------
    wanted : Wanted
        Settings and site.

    Attributes
    ----------
    job : Job or None
        The one with the scheduler; None before its submission.
    scales : bool
        Whether jobs come and go.

    """

    job: Job | None = None
    scales: bool = False

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self._first_workers = 0

    @property
    @abstractmethod
    def head(self) -> Head:
        """How the job with the scheduler is; it has been submitted."""

    @property
    def wanted_workers(self) -> int:
        """How many workers there are to be."""
        return self._first_workers

    @property
    def requested_workers(self) -> int:
        """Of those, the workers whose jobs have been submitted."""
        return self.wanted_workers

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None when they may."""
        return None

    @property
    def jobs(self) -> Jobs:
        """The jobs of a batch system, and the last few that are gone."""
        return Jobs(())

    @property
    def ready_words(self) -> str:
        """A line in place of the usual one when the scheduler is there; empty where the usual one is right."""
        return ""

    @abstractmethod
    def explain(self) -> str:
        """Return what was planned, with where each part was set."""

    @abstractmethod
    async def start(self, session: Session, seen: Seen) -> Job:
        """Have the job; the session has the run's folder as soon as there is one."""

    @abstractmethod
    async def connected(self, session: Session) -> None:
        """Go on: the session has a connection."""

    def ready(self, workers: int) -> None:
        """Note that so many workers are there at the end of the start."""
        self._first_workers = workers

    @abstractmethod
    def workers_changed(self) -> None:
        """Look at the workers soon: some have come or gone."""

    @abstractmethod
    def check_detachable(self) -> None:
        """Raise ConfigError where the job cannot go on without this process."""

    def goes_on(self, kind: str) -> str:
        """Return what a job that its object leaves goes on as, for people; empty if it does not.

        Parameters
        ----------
        kind : str
            The class of the object, which may take the job up again.

        """
        del kind
        return ""

    @abstractmethod
    def stop(self) -> None:
        """Look after the jobs no longer; they stay. It may be called again."""

    async def end(self) -> None:
        """Have all jobs end."""
        if self.job:
            await self.job.end()

    @abstractmethod
    async def ended(self) -> None:
        """Remove the leftovers; the job has ended."""

    @abstractmethod
    async def close(self) -> None:
        """End the processes that are this object's; called last."""

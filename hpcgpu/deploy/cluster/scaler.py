"""The jobs of a cluster that come and go, as one cluster object sees them: scaled, adapted, counted, shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcgpu.deploy.cluster.batch_run import BatchRun
from hpcgpu.deploy.cluster.controller import Controller
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.deploy.jobs.hooks import ClusterHooks
from hpcgpu.deploy.jobs.job_table import Member, Present
from hpcgpu.deploy.jobs.record import Gone
from hpcgpu.deploy.processes.heartbeats import HeartbeatMonitor
from hpcgpu.errors import HpcGpuError
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.worker_names import read_member_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a scaler has of its cluster.

    Attributes
    ----------
    scheduler : callable
        Returns the connection pool to the scheduler of now.
    workers : callable
        Returns the registered workers by address, with what the scheduler says of each.
    changed : callable
        Called when more is known than before.
    say : callable
        Takes a line for the user.

    """

    scheduler: Callable[[], Any]
    workers: Callable[[], Mapping[str, Any]]
    changed: Callable[[], None]
    say: Callable[[str], None]


class Scaler:
    """The jobs that come and go, and this object's part in controlling them.

    On the event loop's thread only; properties and :meth:`facts` may be read by any thread.

    Parameters
    ----------
    run : BatchRun
        Where the jobs are written down.
    seen : Seen
        The cluster.

    """

    def __init__(self, run: BatchRun, seen: Seen) -> None:
        self._seen = seen
        hooks = ClusterHooks(
            present=self._present,
            retire=self._retire,
            remove=self._remove,
            write_down=self._write_down,
            written_down=run.written_down,
            changed=seen.changed,
            say=seen.say,
        )
        self._run = run
        self._fleet = Fleet(*run.member_request(), hooks)
        self._listener = HeartbeatMonitor(seen.scheduler, self._fleet.workers_changed)
        self._controller = Controller(seen.scheduler, self._fleet, seen.changed)

    @property
    def expected(self) -> int:
        """Workers of each job."""
        return self._fleet.expected

    @property
    def wanted_workers(self) -> int:
        """Workers of the jobs that there are to be."""
        return self._fleet.wanted * self._fleet.expected

    @property
    def requested_workers(self) -> int:
        """Workers of the jobs that have been submitted."""
        return len(self._fleet.members) * self._fleet.expected

    @property
    def registered(self) -> int:
        """Workers of these jobs that are there."""
        return sum(len(present.addresses) for present in self._present().values())

    @property
    def members(self) -> tuple[Member, ...]:
        """The jobs that are there."""
        return self._fleet.members

    @property
    def gone(self) -> tuple[Gone, ...]:
        """The last few that ended though they were not asked to leave, the newest first."""
        return self._fleet.gone

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None when they may."""
        return self._controller.given_up

    def facts(self, job: JobFacts) -> JobFacts:
        """Return a job with the workers of this moment: the fleet looks a little later, for many of them at once."""
        here = self._present().get(job.id, Present())
        return job.registered(len(here.addresses), job.submitted_s, here.restarts, silent=here.silent)

    def jobs_for(self, workers: int) -> int:
        """Return how many jobs have so many workers together."""
        return max(0, math.ceil(workers / self._fleet.expected))

    async def started(self) -> None:
        """Wait until it is known which object controls the jobs.

        Raises
        ------
        JobError
            It cannot be known.

        """
        await self._controller.started()

    async def scale(self, jobs: int, *, adapting: bool = False) -> None:
        """Want so many jobs; what must be submitted has been submitted on return.

        Raises
        ------
        SubmitError
            The batch system refused, in its own words.

        """
        await self._controller.scale(jobs, adapting=adapting)

    def workers_changed(self) -> None:
        """Look again: a worker has come or gone."""
        self._fleet.workers_changed()

    def stop(self) -> None:
        """Leave the jobs to others."""
        for part in (self._controller, self._listener, self._fleet):
            part.stop()

    async def close(self) -> None:
        """Cancel every job that is left; see :meth:`Fleet.close`."""
        await self._fleet.close()

    def _write_down(self) -> None:
        self._run.write_down(self._fleet.recorded, self._fleet.gone, submitting=self._fleet.submitting)

    def _present(self) -> Mapping[str, Present]:
        """Return the registered workers of the jobs that come and go."""
        found: dict[str, Present] = {}
        for address, facts in list(self._seen.workers().items()):
            if name := read_member_name(str(facts["name"])):
                before = found.get(name.job_id, Present())
                restarts = max(before.restarts, name.restart_count)
                silent = address in self._listener.silent and (before.silent or not before.addresses)
                found[name.job_id] = Present((*before.addresses, address), restarts, silent)
        return found

    async def _retire(self, addresses: Sequence[str]) -> None:
        await self._seen.scheduler().hpcgpu_retire(workers=list(addresses))

    async def _remove(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            await self._seen.scheduler().unregister(address=address, expected=True, stimulus_id="hpcgpu-job-is-gone")

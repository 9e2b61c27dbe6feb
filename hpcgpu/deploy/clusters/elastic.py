"""Clusters that grow and shrink: scale, adapt, the table of jobs, and waiting with an eye on them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from distributed.core import Status

from hpcgpu.deploy.clusters.adaptive import JobAdaptive
from hpcgpu.deploy.clusters.batched import BatchGPUCluster
from hpcgpu.deploy.clusters.steering import Steering
from hpcgpu.deploy.jobs import record
from hpcgpu.deploy.jobs.crew import Crew
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.deploy.jobs.job import Job
from hpcgpu.deploy.jobs.local import LocalJob
from hpcgpu.deploy.jobs.record import Gone, Record, RecordedJob
from hpcgpu.deploy.jobs.roster import Present
from hpcgpu.deploy.jobs.submit import plan_job
from hpcgpu.deploy.jobs.table import JobRow, Jobs, today
from hpcgpu.deploy.processes.silence import Listener
from hpcgpu.deploy.start import local_launch
from hpcgpu.errors import ConfigError
from hpcgpu.model import RunDocument
from hpcgpu.plan.job_facts import JobFacts
from hpcgpu.plan.member_name import read_member_name
from hpcgpu.plan.phase import JobView, Phase, describe, describe_gone, summary_line
from hpcgpu.plan.reconcile import Policy
from hpcgpu.plan.request import workers_per_node


class ElasticCluster(BatchGPUCluster):
    """A cluster of one job, to which one-node jobs come and go where ``shape="elastic"``."""

    _fleet: Fleet | None = None
    _listener: Listener | None = None
    _steering: Steering | None = None
    _changed: asyncio.Event

    @property
    def _supports_scaling(self) -> bool:  # type: ignore[override]
        return self.settings.shape == "elastic"

    @property
    def wanted_workers(self) -> int:
        """How many workers the cluster is to have."""
        return self._expected + (self._fleet.wanted * self._fleet.expected if self._fleet else 0)

    @property
    def _expected(self) -> int:
        here = self.settings.shape == "elastic" and self.settings.scheduler == "here"
        return 0 if here else self.settings.nodes * workers_per_node(self.settings)

    @property
    def jobs(self) -> Jobs:
        """The cluster's jobs and what each is doing, and the last few that are gone; it prints as a table."""
        rows = [] if self._job is None else [self._head(self._job)]
        if fleet := self._fleet:
            rows += [
                JobRow(describe(self._counted(member.facts), today()), "workers", 1, member.recorded.log)
                for member in fleet.members
            ]
        gone = [
            JobRow(describe_gone(job.recorded.id, job.why, job.at, today()), "workers", 1, job.recorded.log)
            for job in self._gone()
        ]
        return Jobs(tuple(rows), tuple(gone))

    def scale(self, n: int | None = None, jobs: int | None = None) -> Any:  # noqa: ANN401 - a coroutine of an asynchronous cluster
        """Have ``n`` workers, or so many jobs beside the first one; what is missing has been submitted on return.

        Parameters
        ----------
        n : int, optional
            Workers, those of the first job included; rounded up to whole jobs.
        jobs : int, optional
            One-node jobs that come and go, in place of ``n``.

        Raises
        ------
        ConfigError
            The cluster is one job of fixed size, or it is a number that cannot be.
        SubmitError
            The batch system refused, in its own words.

        """
        self._elastic()
        given = jobs if n is None else n
        if (n is not None and jobs is not None) or not isinstance(given, Integral) or given < 0:
            raise ConfigError(f"scale(n={n!r}, jobs={jobs!r}); give one of them, 0 or more: workers, or jobs")
        assert self._steering
        return self.sync(self._steering.scale, given if n is None else self._jobs_for(n))

    def adapt(self, *_: Any, minimum_jobs: int | None = None, maximum_jobs: int | None = None, **options: Any) -> Any:  # noqa: ANN401
        """Have as many workers as there is work for.

        Parameters
        ----------
        *_ : object
            Ignored; distributed's clusters take a class here.
        minimum_jobs, maximum_jobs : int, optional
            Jobs that come and go, in place of ``minimum`` and ``maximum``, which are workers.
        **options
            ``minimum``, ``maximum``, ``interval``, ``wait_count``, ``target_duration`` as of distributed's Adaptive,
            but slower by default: a job that goes waits in the queue again.

        Raises
        ------
        ConfigError
            The cluster is one job of fixed size, or more are asked for at least than at most.

        """
        fleet = self._elastic()
        for name, jobs in (("minimum", minimum_jobs), ("maximum", maximum_jobs)):
            if jobs is not None:
                options[name] = self._expected + jobs * fleet.expected
        low, high = options.get("minimum") or 0, options.get("maximum")
        high = math.inf if high is None else high
        if not 0 <= low <= high:
            raise ConfigError(
                f"adapt: minimum {low}, maximum {high}; give 0 or more, and a maximum that is not below it"
            )
        return super().adapt(Adaptive=JobAdaptive, **options)

    async def adapt_to(self, workers: int) -> None:
        """Want so many workers for now; called by :class:`JobAdaptive`."""
        assert self._steering
        await self._steering.scale(self._jobs_for(workers), adapting=True)

    def wait_for_workers(self, n: int, timeout: float | None = None) -> Any:  # noqa: ANN401
        """Wait until ``n`` workers are there, and show what their jobs do meanwhile.

        Raises
        ------
        JobError, SubmitError
            They will not come: the reason, and the end of the last job's log.
        TimeoutError
            They have not come within ``timeout`` seconds; the message says what their jobs do.

        """
        return self.sync(self._wait_for_workers, n, timeout)

    async def _wait_for_workers(self, n: int, timeout: float | None) -> None:
        progress = self._progress
        try:
            async with asyncio.timeout(timeout):
                while len(self.scheduler_info["workers"]) < n:
                    if self._fleet and self._fleet.error:
                        raise self._fleet.error
                    progress.show(self._line(n))
                    self._changed.clear()
                    await self._changed.wait()
            await self._show_notes()
            progress.show(self._line(n))
        except TimeoutError:
            raise TimeoutError(f"not {n} workers within {timeout:g} s: {self._line(n)}") from None
        finally:
            progress.end()

    def _line(self, wanted: int) -> str:
        hosts = {facts["host"] for facts in self.scheduler_info["workers"].values()}
        views = [row.view for row in self.jobs.rows if row.has != "scheduler"]
        return summary_line(views, len(self.scheduler_info["workers"]), wanted, len(hosts))

    def _ready_line(self) -> str:
        if self._expected:
            return super()._ready_line()
        return "READY scheduler here; no workers yet: cluster.scale(n) or cluster.adapt() asks for them"

    def _elastic(self) -> Fleet:
        if self._fleet is None:
            raise ConfigError(
                f"this cluster is one job of fixed size (nodes={self.settings.nodes}): start it with shape='elastic' "
                "to scale it, or start another one with nodes=…"
            )
        return self._fleet

    def _jobs_for(self, workers: int) -> int:
        return max(0, math.ceil((workers - self._expected) / self._elastic().expected))

    def _make_job(self, run: RunDocument, folder: Path) -> Job:
        if self._expected:
            return super()._make_job(run, folder)
        return LocalJob(local_launch(replace(run, shape="head")), {}, folder)

    def _head(self, job: Job) -> JobRow:
        """Return what is known of the first job."""
        if not self._expected:
            return JobRow(JobView(job.id, Phase.UP, "UP"), "scheduler", 0, job.log)
        there = len(self.scheduler_info["workers"]) - sum(len(p.addresses) for p in self._present().values())
        if self._returning and not self._returning.done():
            there = 0  # they are those of a scheduler that does not answer
        was_full = self.status == Status.running
        facts = JobFacts(
            id=job.id,
            submitted_s=0.0,
            expected=self._expected,
            status=job.status,
            workers=there,
            started_s=0.0 if was_full else None,
            was_full=was_full,
        )
        return JobRow(describe(facts, today()), "scheduler, workers", self.settings.nodes, job.log)

    def _counted(self, job: JobFacts) -> JobFacts:
        """Return a job with the workers of this moment: the fleet looks a little later, for many of them at once."""
        here = self._present().get(job.id, Present())
        return job.registered(len(here.addresses), job.submitted_s, here.restarts, silent=here.silent)

    @property
    def _submitting(self) -> bool:
        return super()._submitting or (self._fleet is not None and self._fleet.submitting)

    def _members(self) -> tuple[RecordedJob, ...]:
        return self._fleet.recorded if self._fleet else ()

    def _gone(self) -> tuple[Gone, ...]:
        return self._fleet.gone if self._fleet else ()

    def _written_down(self) -> tuple[tuple[RecordedJob, ...], tuple[Gone, ...]]:
        assert self._folder
        try:
            written = record.read(self._folder)
        except FileNotFoundError:  # somebody has stopped the run
            return (), ()
        return tuple(job for job in written.jobs if job.kind == "member"), written.gone

    async def _start_job(self) -> None:
        self._changed = asyncio.Event()
        await super()._start_job()
        if self.settings.shape == "elastic":
            assert self._written
            fleet = self._fleet = self._make_fleet(self._written)
            self._listener = Listener(lambda: self.scheduler_comm, fleet.workers_changed)
            self._steering = Steering(lambda: self.scheduler_comm, fleet)
            await self._steering.started()

    def _make_fleet(self, written: Record) -> Fleet:
        assert self._folder
        settings = self.settings
        run = RunDocument(settings=settings, shape="member", meeting=str(self._folder))
        spec, _, _ = plan_job(run, self._wanted.site, self.batch)
        policy = Policy(walltime_s=settings.walltime_s, drain_s=settings.drain_s)
        crew = Crew(
            present=self._present,
            retire=self._retire,
            remove=self._remove,
            write_down=self._write_down,
            written_down=self._written_down,
            changed=self._changed.set,
            say=self._log,
        )
        return Fleet(written.system, spec, policy, workers_per_node(settings), crew)

    def _present(self) -> Mapping[str, Present]:
        """Return the registered workers of the jobs that come and go."""
        found: dict[str, Present] = {}
        unheard = self._listener.silent if self._listener else ()
        for address, facts in list(self.scheduler_info["workers"].items()):
            if name := read_member_name(str(facts["name"])):
                before = found.get(name.job_id, Present())
                restarts = max(before.restarts, name.restart_count)
                silent = address in unheard and (before.silent or not before.addresses)
                found[name.job_id] = Present((*before.addresses, address), restarts, silent)
        return found

    async def _retire(self, addresses: Sequence[str]) -> None:
        await self.scheduler_comm.hpcgpu_retire(workers=list(addresses))

    async def _remove(self, addresses: Sequence[str]) -> None:
        for address in addresses:
            await self.scheduler_comm.unregister(address=address, expected=True, stimulus_id="hpcgpu-job-is-gone")

    def _update_worker_status(self, op: str, msg: Any) -> None:  # noqa: ANN401
        super()._update_worker_status(op, msg)
        if self._fleet:
            self._fleet.workers_changed()
            self._changed.set()

    async def _close(self) -> None:
        for part in (self._steering, self._listener, self._fleet):
            if part:
                part.stop()
        await super()._close()

    async def _end_job(self) -> None:
        if self._fleet:
            await self._fleet.close()
        await super()._end_job()

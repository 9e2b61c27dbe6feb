"""Clusters that grow and shrink: scale, adapt, the table of jobs, and waiting with an eye on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from distributed.core import Status

from hpcgpu.deploy.clusters.adaptive import JobAdaptive
from hpcgpu.deploy.clusters.batched import BatchGPUCluster
from hpcgpu.deploy.clusters.scaling import bounds, check_scale, workers_with
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
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.model import RunDocument
from hpcgpu.plan.jobs.job_facts import JobFacts
from hpcgpu.plan.jobs.phase import JobView, Phase, describe, describe_after, describe_gone
from hpcgpu.plan.jobs.reconcile import Policy
from hpcgpu.plan.jobs.request import workers_per_node
from hpcgpu.plan.jobs.worker_names import read_member_name


class ElasticCluster(BatchGPUCluster):
    """A cluster of one job, to which one-node jobs come and go where ``shape="elastic"``."""

    _fleet: Fleet | None = None
    _listener: Listener | None = None
    _steering: Steering | None = None

    @property
    def _supports_scaling(self) -> bool:  # type: ignore[override]
        return self.settings.shape == "elastic"

    @property
    def wanted_workers(self) -> int:
        """How many workers the cluster is to have."""
        return self._expected + (self._fleet.wanted * self._fleet.expected if self._fleet else 0)

    @property
    def _requested_workers(self) -> int:
        return self._expected + (len(self._fleet.members) * self._fleet.expected if self._fleet else 0)

    @property
    def _expected(self) -> int:
        here = self.settings.shape == "elastic" and self.settings.scheduler == "here"
        return 0 if here else self.settings.nodes * workers_per_node(self.settings)

    @property
    def jobs(self) -> Jobs:
        """The cluster's jobs and what each is doing, and the last few that are gone; it prints as a table."""
        rows = [] if self._job is None else [self._head(self._job)]
        rows += [
            JobRow(self._view(member.facts), "workers", 1, member.recorded.log)
            for member in (self._fleet.members if self._fleet else ())
        ]
        gone = [row for row in rows if self._end and row.view.phase is Phase.GONE]
        gone += [
            JobRow(describe_gone(job.recorded.id, job.why, job.at, today()), "workers", 1, job.recorded.log)
            for job in self._gone()
        ]
        return Jobs(tuple(row for row in rows if row not in gone), tuple(gone))

    def scale(
        self,
        n: int | None = None,
        jobs: int | None = None,
        memory: int | str | None = None,
        cores: float | None = None,
    ) -> Any:  # noqa: ANN401 - a coroutine of an asynchronous cluster
        """Have ``n`` workers, or so many jobs beside the first one; what is missing has been submitted on return.

        Parameters
        ----------
        n : int, optional
            Workers, those of the first job included; rounded up to whole jobs.
        jobs : int, optional
            One-node jobs that come and go, in place of ``n``.
        memory, cores : number or str, optional
            As of dask-jobqueue: what all workers have together, in place of ``n``. A worker has ``cores_per_gpu``
            (or ``nthreads``) and ``memory_limit`` (or its part of ``memory``).

        Raises
        ------
        ConfigError
            The cluster is one job of fixed size, or it is a number that cannot be.
        SubmitError
            The batch system refused, in its own words.

        """
        self._must_run()
        self._elastic()
        check_scale(n, jobs, cores, memory)
        assert self._steering
        if jobs is None:
            jobs = self._jobs_for(workers_with(self.settings, cores, memory) if n is None else n)
        return self.sync(self._steering.scale, int(jobs))

    def adapt(self, *_: Any, **options: Any) -> Any:  # noqa: ANN401
        """Have as many workers as there is work for.

        Parameters
        ----------
        *_ : object
            Ignored; distributed's clusters take a class here.
        **options
            ``minimum``, ``maximum``: workers; or ``minimum_jobs``, ``maximum_jobs``: jobs that come and go; or
            ``minimum_cores``, ``minimum_memory`` and so on: see :meth:`scale`.
            ``interval``, ``wait_count``, ``target_duration`` as of distributed's Adaptive, but slower by default:
            a job that goes waits in the queue again.

        Raises
        ------
        ConfigError
            The cluster is one job of fixed size, or more are asked for at least than at most.

        """
        self._must_run()
        fleet = self._elastic()
        options = bounds(self.settings, self._expected, fleet.expected, options)
        return super().adapt(Adaptive=JobAdaptive, **options)

    async def adapt_to(self, workers: int) -> None:
        """Want so many workers for now; called by :class:`JobAdaptive`."""
        assert self._steering
        await self._steering.scale(self._jobs_for(workers), adapting=True)

    @property
    def _given_up(self) -> HpcGpuError | None:
        return super()._given_up or (self._steering.given_up if self._steering else None)

    def _views(self) -> list[JobView]:
        return [row.view for row in self.jobs.rows if row.has != "scheduler"]

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
        has, nodes = ("scheduler, workers", self.settings.nodes) if self._expected else ("scheduler", 0)
        if self._end:
            return JobRow(describe_after(job.id, job.status, self._end), has, nodes, job.log)
        if not self._expected:
            return JobRow(JobView(job.id, Phase.UP, "UP"), has, nodes, job.log)
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
        return JobRow(describe(facts, today()), has, nodes, job.log)

    def _view(self, job: JobFacts) -> JobView:
        """Return a job with the workers of this moment: the fleet looks a little later, for many of them at once."""
        if self._end:
            return describe_after(job.id, job.status, self._end)
        here = self._present().get(job.id, Present())
        return describe(
            job.registered(len(here.addresses), job.submitted_s, here.restarts, silent=here.silent), today()
        )

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
        await super()._start_job()
        if self.settings.shape == "elastic":
            assert self._written
            fleet = self._fleet = self._make_fleet(self._written)
            self._listener = Listener(lambda: self.scheduler_comm, fleet.workers_changed)
            self._steering = Steering(lambda: self.scheduler_comm, fleet, self._changed.set)
            await self._steering.started()

    def _make_fleet(self, written: Record) -> Fleet:
        assert self._folder
        settings = self.settings
        run = RunDocument(settings=settings, shape="member", meeting=str(self._folder))
        spec, _, _ = plan_job(run, self._wanted.site, self.batch)
        policy = Policy(walltime_s=settings.walltime_s, drain_s=settings.drain_s, patience=self.patience)
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

    def _lost(self, why: str) -> None:
        self._stop()
        super()._lost(why)

    async def _close(self) -> None:
        self._stop()
        await super()._close()

    def _stop(self) -> None:
        for part in (self._steering, self._listener, self._fleet):
            if part:
                part.stop()

    async def _end_jobs(self) -> None:
        try:
            if self._fleet:
                await self._fleet.close()
        finally:
            await super()._end_jobs()

"""The jobs of an elastic cluster that come and go: carry out the decisions of the job loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hpcgpu.deploy.jobs import ending
from hpcgpu.deploy.jobs.batch_client import cancel
from hpcgpu.deploy.jobs.job_loop import JobLoop
from hpcgpu.deploy.jobs.job_table import JobWorkers
from hpcgpu.deploy.jobs.logs import tail
from hpcgpu.deploy.jobs.submitter import Submitter
from hpcgpu.errors import HpcGpuError, JobError, SubmitError
from hpcgpu.model import JobSpec
from hpcgpu.plan.jobs.ends import Failures
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.reconcile import NEVER_S, Actions, Demand
from hpcgpu.supervise import tasks

# A cancelled job is gone within the batch system's KillWait.
_END_S = 40.0


class Fleet:
    """One-node jobs that come and go; ``expected`` is the number of workers of each."""

    def __init__(self, jobs: JobLoop, spec: JobSpec, expected: int) -> None:
        self._loop, self._system, self._hooks, self._alarm = jobs, jobs.system, jobs.hooks, jobs.alarm
        patience, hooks = jobs.policy.patience, jobs.hooks
        self._submitter = Submitter(jobs.system, spec, hooks.say, patience, write=hooks.write)
        self._table, self.spec = jobs.table, spec
        self._table.expected = expected
        # target: jobs; controls: False follows another object of the same cluster
        self.expected, self.target, self.controls = expected, 0, False
        self.error: HpcGpuError | None = None  # why no job is submitted any more, until the next scale
        self._adapting = self._unwritten = False
        self._failures = Failures()
        self._held_back_until_s = NEVER_S
        self._acting = asyncio.Lock()
        self._requests = tasks.Group()

    @property
    def members(self) -> tuple[Job, ...]:
        """The jobs of this moment, in the order of submission."""
        return self._table.members

    @property
    def trouble(self) -> str:
        """Why the job loop does not work at present; "" if it does."""
        return self._loop.trouble

    @property
    def submitting(self) -> bool:
        """True if there may be jobs whose ids are unknown yet."""
        return self._submitter.unanswered

    async def take(self, target: int | None, *, controls: bool) -> None:
        """Start from the record, as the controlling object or not; ``target=None``: no number of jobs yet."""
        await self._follow()
        self.target = max(self.target, len(self.members)) if target is None else target
        self.controls = controls
        self._loop.actor = self
        self._loop.start()

    async def scale(self, jobs: int, *, adapting: bool = False) -> None:
        """Set the target number of jobs; return after the necessary submissions.

        ``adapting``: the number may change soon, so young surplus jobs that wait are kept. Raises SubmitError in the
        batch system's words, or only reports it when adapting. Accepted jobs stay; a ``transient`` refusal is tried
        again.
        """
        self.target, self._adapting = jobs, adapting
        if not adapting:
            self.error, self._failures, self._held_back_until_s = None, Failures(), NEVER_S
        try:
            await self.act()
        except SubmitError as e:
            self._loop.pause()
            self.refused(e, say=adapting)
            if not adapting:
                raise
        finally:
            self._loop.start()

    def workers_changed(self) -> None:
        """Wake the loop: a worker has come or gone."""
        self._alarm.ring()

    def stop(self) -> None:
        """Stop the loop; the jobs stay."""
        self._requests.cancel()
        self._loop.stop()

    async def close(self) -> None:
        """Stop, cancel all jobs, and return when the batch system says that they have ended.

        Raises SubmitError if jobs could not be cancelled and may still exist; all others have been cancelled.
        """
        self.stop()
        async with self._acting:
            if not self.controls:
                await self._follow()
            try:
                await self._add(await self._submitter.lost(self._table.past_ids))
            finally:
                await ending.close(self._system, self.members, _END_S, self._hooks.say)

    def refused(self, e: SubmitError, *, say: bool) -> None:
        """Try again later, or not at all; a limit of the user's jobs passes when existing ones have ended."""
        if say:
            self._hooks.say(str(e))
        self._held_back_until_s = self._alarm.now_s() + self._loop.policy.patience.refused_s
        if not (e.transient or (e.over_limit and self.members)):
            self.error = e
        self._hooks.changed()

    async def find_lost(self) -> None:
        """Add jobs whose submission was not answered."""
        if self.controls:
            await self._add(await self._submitter.lost(self._table.past_ids))

    async def act(self) -> None:
        """Decide on the present facts, and carry out the actions."""
        async with self._acting:
            present, now_s = self._hooks.present(), self._alarm.now_s()
            if self.controls:
                await self._add([self._submitter.lost_job(job_id) for job_id in self._table.unknown(present)])
            else:
                await self._follow()
            held_back_until_s = float("inf") if self.error else self._held_back_until_s
            demand = Demand(self.target, self._adapting, held_back_until_s, self._failures)
            actions = self._loop.decide(present, now_s, demand)
            if not self.controls:
                self._hooks.changed()
                return
            self._failures = actions.failures
            await self._cancel(actions.cancel)
            await self._forget(actions, present)
            for job_id in actions.retire:
                self._table.retired(job_id, now_s)
                if job_id in present:
                    self._send(self._hooks.retire, present[job_id].addresses)
            for job_id in actions.lost:
                self._send(self._hooks.remove, present[job_id].addresses)
            if actions.submit and (lost := await self._submitter.lost(self._table.past_ids)):
                await self._add(lost)  # so fewer are missing
            elif actions.submit:
                async for accepted in self._submitter.submit(actions.submit, self._table.past_ids):
                    await self._add(accepted)
            if actions.cancel or actions.forget or actions.retire or actions.submit:
                self._alarm.ring()  # these actions may require more
            self._hooks.changed()

    async def _cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs. A final refusal does not stop the other actions; an overdue job is cancelled again."""
        try:
            await cancel(self._system, job_ids)
        except SubmitError as e:
            if e.transient:
                raise
            self._hooks.say(str(e))
        self._table.cancelled(job_ids, self._alarm.now_s())

    async def _forget(self, actions: Actions, present: Mapping[str, JobWorkers]) -> None:
        logs = {job.id: job.log for job in self.members}
        for job_id, why in actions.forget:
            self._table.ended(job_id, why, datetime.now(UTC).astimezone())
            self._hooks.say(f"job {job_id}: {why}")
            if job_id in present:
                self._send(self._hooks.remove, present[job_id].addresses)
        if actions.forget:
            await self._write_down()
        if actions.give_up and self.error is None:
            log = logs.get(actions.failures.last_id)
            self.error = JobError(
                "; ".join(filter(None, (actions.give_up, log and await asyncio.to_thread(tail, Path(log)))))
            )
            self._hooks.say(str(self.error))
        elif not actions.give_up and isinstance(self.error, JobError):
            self.error = None  # a job has its workers after all

    async def _add(self, jobs: Sequence[Job]) -> None:
        if jobs:
            self._table.add(jobs, self._alarm.now_s())
        if jobs or self._unwritten:
            await self._write_down()

    async def _follow(self) -> None:
        """Take over exactly the jobs that another object has recorded."""
        self._table.follow(*await asyncio.to_thread(self._hooks.written_down), self._alarm.now_s())

    async def _write_down(self) -> None:
        """Write the record. If that fails (a full disk), nothing else is done until it succeeds."""
        self._unwritten = True
        await self._hooks.write()
        self._unwritten = False

    def _send(self, request: Callable[[Sequence[str]], Awaitable[object]], addresses: Sequence[str]) -> None:
        """Send a request about workers to the scheduler without awaiting it: the registered workers show its effect."""
        workers, say = f"workers {', '.join(addresses)}", self._hooks.say

        async def run() -> None:
            try:
                await request(addresses)
            except OSError as e:  # the scheduler is gone for the moment, which is reported elsewhere
                say(f"{workers}: {e}")

        # the scheduler's errors arrive unchanged
        self._requests.start(run, f"the request to the scheduler about {workers}", lambda e: say(f"{workers}: {e!r}"))

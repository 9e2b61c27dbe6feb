"""The jobs of an elastic cluster that come and go: plan.reconcile decides, and here it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import batch_client
from hpcgpu.deploy.jobs.batch_client import ask, cancel, on_lost_nodes, proven
from hpcgpu.deploy.jobs.hooks import ClusterHooks, SchedulerRequests
from hpcgpu.deploy.jobs.job_table import JobTable, Member, Present
from hpcgpu.deploy.jobs.record import Gone, RecordedJob
from hpcgpu.deploy.jobs.submitter import Submitter
from hpcgpu.deploy.jobs.tail import tail
from hpcgpu.errors import HpcGpuError, JobError, SubmitError
from hpcgpu.model import JobSpec
from hpcgpu.plan.jobs.reconcile import Actions, Facts, Failures, Policy, reconcile
from hpcgpu.supervise import tasks
from hpcgpu.supervise.alarm import Alarm

# A cancelled job is gone within the batch system's KillWait.
_END_S = 40.0
_NEVER_S = float("-inf")


class Fleet:
    """One-node jobs that come and go.

    Parameters
    ----------
    system : BatchSystem
        Runs the jobs.
    spec : JobSpec
        The request for one of them.
    policy : Policy
        Limits of what is decided.
    expected : int
        Workers of each job.
    hooks : ClusterHooks
        The cluster.

    Attributes
    ----------
    wanted : int
        Jobs.
    controls : bool
        Whether it acts; else it follows what another object of the same cluster does.
    error : HpcGpuError or None
        Why no job is submitted any more, until the next scale.

    """

    def __init__(self, system: BatchSystem, spec: JobSpec, policy: Policy, expected: int, hooks: ClusterHooks) -> None:
        self._system, self._spec, self._policy, self._hooks = system, spec, policy, hooks
        self._submitter = Submitter(system, spec, hooks, policy.patience)
        self._table = JobTable(expected)
        self.expected, self.wanted, self.controls = expected, 0, False
        self.error: HpcGpuError | None = None
        self._adapting = self._unwritten = False
        self._failures = Failures()
        self._asked_s: float | None = None
        self._answered_s: float | None = None
        self._held_back_until_s = _NEVER_S
        self._alarm = Alarm()
        self._acting = asyncio.Lock()
        self._requests = SchedulerRequests(hooks.say)
        self._watching: tasks.Loop | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """The jobs of this moment, in the order of submission."""
        return self._table.members

    @property
    def gone(self) -> tuple[Gone, ...]:
        """The last few jobs that ended unasked, the newest first."""
        return tuple(self._table.gone)

    @property
    def recorded(self) -> tuple[RecordedJob, ...]:
        """What is to be written down of the jobs."""
        return self._table.recorded

    @property
    def trouble(self) -> str:
        """Why the jobs are not looked after at present; empty when they are."""
        return self._watching.trouble if self._watching else ""

    @property
    def submitting(self) -> bool:
        """Whether there may be jobs whose ids are not known yet."""
        return self._submitter.unanswered

    async def take(self, wanted: int | None, *, controls: bool) -> None:
        """Go on from what is written down, as the one that acts or not.

        Parameters
        ----------
        wanted : int or None
            Jobs; None: not said yet.
        controls : bool
            Whether to act.

        """
        await self._follow()
        self.wanted = max(self.wanted, len(self._table)) if wanted is None else wanted
        self.controls = controls
        self._watch()

    async def scale(self, jobs: int, *, adapting: bool = False) -> None:
        """Want so many jobs; what must be submitted has been submitted when this returns.

        Parameters
        ----------
        jobs : int
            How many.
        adapting : bool
            The number may change soon: young pending jobs are kept although they are too many.

        Raises
        ------
        SubmitError
            The batch system refused, in its own words. What was accepted stays; a refusal that may pass
            (``transient``) is tried again. Not raised when adapting, only said.

        """
        self.wanted, self._adapting = jobs, adapting
        if not adapting:
            self.error, self._failures, self._held_back_until_s = None, Failures(), _NEVER_S
        try:
            await self._act()
        except SubmitError as e:
            self._refused(e, say=adapting)
            if not adapting:
                raise
        finally:
            self._watch()

    def workers_changed(self) -> None:
        """Look again: a worker has come or gone."""
        self._alarm.ring()

    def stop(self) -> None:
        """Watch no longer; the jobs stay."""
        self._requests.cancel()
        if self._watching:
            self._watching.cancel()

    async def close(self) -> None:
        """Stop, cancel every job that is left, and return when the batch system says that they have ended.

        Raises
        ------
        SubmitError
            Jobs may still be there, which could not be cancelled; all others have been.

        """
        self.stop()
        async with self._acting:
            if not self.controls:
                await self._follow()
            try:
                await self._add(await self._submitter.lost(self._table.known))
            finally:
                await batch_client.close(self._system, self._table.ids, _END_S, self._hooks.say)

    def _watch(self) -> None:
        if self._watching is None:
            what = "the loop that looks after this cluster's jobs"
            self._watching = tasks.keep(self._look, what, changed=self._hooks.changed)
        self._alarm.ring()

    async def _look(self) -> None:
        """Ask when it is time, and act on what has changed."""
        await self._alarm.wait()
        try:
            if self._alarm.is_time_to_ask:
                await self._ask()
            await self._act()
        except SubmitError as e:
            self._refused(e, say=True)
        except Exception:
            self._alarm.ring()  # the next look does at once what this one has not done
            raise

    def _refused(self, e: SubmitError, *, say: bool) -> None:
        """Try again later, or not at all; a limit of one's own passes when jobs that are there have ended."""
        if say:
            self._hooks.say(str(e))
        wait_s = self._policy.patience.refused_s
        self._held_back_until_s = self._alarm.now_s() + wait_s
        self._alarm.set_in(wait_s, wait_s)
        if not (e.transient or (e.over_limit and self._table.ids)):
            self.error = e
        self._hooks.changed()

    async def _ask(self) -> None:
        if self.controls:
            await self._add(await self._submitter.lost(self._table.known))
        asked, self._asked_s = self._table.ids, self._alarm.now_s()
        listed = await proven(self._system, self._spec, await ask(self._system, asked))
        heard = [job.id for job in self._table.jobs if job.heard]
        listed = await on_lost_nodes(self._system, listed, heard, {job.id: job.hosts for job in self._table.jobs})
        listed = await asyncio.to_thread(self._table.with_exit_codes, listed)
        self._answered_s = self._alarm.now_s()
        self._table.listed(asked, listed, self._answered_s)

    async def _act(self) -> None:
        """Have the facts of now decided upon, and do it."""
        async with self._acting:
            present, now_s = self._hooks.present(), self._alarm.now_s()
            if self.controls:
                await self._add([self._submitter.record(job_id) for job_id in self._table.unknown(present)])
            else:
                await self._follow()
            self._table.registered(present, now_s)
            actions = reconcile(self._facts(now_s), self._policy)
            self._alarm.set_in(actions.next_s, actions.wake_s)
            if not self.controls:
                self._hooks.changed()
                return
            self._failures = actions.failures
            await self._cancel(actions.cancel)
            await self._forget(actions, present)
            for job_id in actions.retire:
                self._retire(job_id, present)
            for job_id in actions.lost:
                self._requests.send(self._hooks.remove, present[job_id].addresses)
            if actions.submit and (lost := await self._submitter.lost(self._table.known)):
                await self._add(lost)  # fewer are missing than it seemed
            elif actions.submit:
                async for accepted in self._submitter.submit(actions.submit, self._table.known):
                    await self._add(accepted)
            if actions.cancel or actions.forget or actions.retire or actions.submit:
                self._alarm.ring()  # what was done may ask for more
            self._hooks.changed()

    async def _cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; what is refused for good stops nothing else, and is tried again when the job is overdue."""
        try:
            await cancel(self._system, job_ids)
        except SubmitError as e:
            if e.transient:
                raise
            self._hooks.say(str(e))
        self._table.cancelled(job_ids, self._alarm.now_s())

    def _facts(self, now_s: float) -> Facts:
        return Facts(
            now_s=now_s,
            wanted=self.wanted,
            jobs=self._table.jobs,
            adapting=self._adapting,
            asked_s=self._asked_s,
            answered_s=self._answered_s,
            held_back_until_s=float("inf") if self.error else self._held_back_until_s,
            failures=self._failures,
        )

    def _retire(self, job_id: str, present: Mapping[str, Present]) -> None:
        self._table.retired(job_id, self._alarm.now_s())
        if job_id in present:
            self._requests.send(self._hooks.retire, present[job_id].addresses)

    async def _forget(self, actions: Actions, present: Mapping[str, Present]) -> None:
        logs = {member.recorded.id: member.recorded.log for member in self._table.members}
        for job_id, why in actions.forget:
            self._table.ended(job_id, why, datetime.now(UTC).astimezone())
            self._hooks.say(f"job {job_id}: {why}")
            if job_id in present:
                self._requests.send(self._hooks.remove, present[job_id].addresses)
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

    async def _add(self, recorded: Sequence[RecordedJob]) -> None:
        if recorded:
            self._table.add(recorded, self._alarm.now_s())
        if recorded or self._unwritten:
            await self._write_down()

    async def _follow(self) -> None:
        """Have exactly the jobs that another object has written down."""
        self._table.follow(*await asyncio.to_thread(self._hooks.written_down), self._alarm.now_s())

    async def _write_down(self) -> None:
        """Have the jobs written down; where that fails (a full disk), nothing else is done before it is."""
        self._unwritten = True
        await self._hooks.write()
        self._unwritten = False

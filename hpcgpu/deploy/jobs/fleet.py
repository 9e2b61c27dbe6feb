"""The jobs of an elastic cluster that come and go: plan.reconcile decides, and here it is done."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import ending
from hpcgpu.deploy.jobs.ask import ask, cancel, on_lost_nodes, proven
from hpcgpu.deploy.jobs.crew import Crew
from hpcgpu.deploy.jobs.errands import Errands
from hpcgpu.deploy.jobs.record import Gone, RecordedJob
from hpcgpu.deploy.jobs.roster import Member, Present, Roster
from hpcgpu.deploy.jobs.submissions import Submissions
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
    crew : Crew
        The cluster.

    Attributes
    ----------
    wanted : int
        Jobs.
    steers : bool
        Whether it acts; else it follows what another object of the same cluster does.
    error : HpcGpuError or None
        Why no job is submitted any more, until somebody scales again.

    """

    def __init__(self, system: BatchSystem, spec: JobSpec, policy: Policy, expected: int, crew: Crew) -> None:
        self._system, self._spec, self._policy, self._crew = system, spec, policy, crew
        self._submissions = Submissions(system, spec, crew, policy.patience)
        self._roster = Roster(expected)
        self.expected, self.wanted, self.steers = expected, 0, False
        self.error: HpcGpuError | None = None
        self._adapting = False
        self._failures = Failures()
        self._asked_s: float | None = None
        self._answered_s: float | None = None
        self._held_back_until_s = _NEVER_S
        self._alarm = Alarm()
        self._acting = asyncio.Lock()
        self._unwritten = False
        self._errands = Errands(crew.say)
        self._watching: tasks.Loop | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """The jobs of this moment, in the order of submission."""
        return self._roster.members

    @property
    def gone(self) -> tuple[Gone, ...]:
        """The last few jobs that ended unasked, the newest first."""
        return tuple(self._roster.gone)

    @property
    def recorded(self) -> tuple[RecordedJob, ...]:
        """What is to be written down of the jobs."""
        return self._roster.recorded

    @property
    def trouble(self) -> str:
        """Why nobody looks after the jobs at present; empty when somebody does."""
        return self._watching.trouble if self._watching else ""

    @property
    def submitting(self) -> bool:
        """Whether there may be jobs that nobody was told of yet."""
        return self._submissions.unanswered

    def take(self, wanted: int | None, *, steers: bool) -> None:
        """Go on from what is written down, as the one that acts or not.

        Parameters
        ----------
        wanted : int or None
            Jobs; None: nobody has said so yet.
        steers : bool
            Whether to act.

        """
        self._roster.follow(*self._crew.written_down(), self._alarm.now_s())
        self.wanted = max(self.wanted, len(self._roster)) if wanted is None else wanted
        self.steers = steers
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
        self._errands.cancel()
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
            if not self.steers:
                self._roster.follow(*self._crew.written_down(), self._alarm.now_s())
            try:
                self._add(await self._submissions.lost(self._roster.known))
            finally:
                await ending.close(self._system, self._roster.ids, _END_S, self._crew.say)

    def _watch(self) -> None:
        if self._watching is None:
            what = "the loop that looks after this cluster's jobs"
            self._watching = tasks.keep(self._look, what, changed=self._crew.changed)
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
            self._crew.say(str(e))
        wait_s = self._policy.patience.refused_s
        self._held_back_until_s = self._alarm.now_s() + wait_s
        self._alarm.set_in(wait_s, wait_s)
        if not (e.transient or (e.over_limit and self._roster.ids)):
            self.error = e
        self._crew.changed()

    async def _ask(self) -> None:
        if self.steers:
            self._add(await self._submissions.lost(self._roster.known))
        asked, self._asked_s = self._roster.ids, self._alarm.now_s()
        listed = await proven(self._system, self._spec, await ask(self._system, asked))
        heard = [job.id for job in self._roster.jobs if job.heard]
        listed = await on_lost_nodes(self._system, listed, heard, {job.id: job.hosts for job in self._roster.jobs})
        self._answered_s = self._alarm.now_s()
        self._roster.listed(asked, listed, self._answered_s)

    async def _act(self) -> None:
        """Have the facts of now decided upon, and do it."""
        async with self._acting:
            present, now_s = self._crew.present(), self._alarm.now_s()
            if self.steers:
                self._add([self._submissions.record(job_id) for job_id in self._roster.unknown(present)])
            else:
                self._roster.follow(*self._crew.written_down(), now_s)
            self._roster.registered(present, now_s)
            actions = reconcile(self._facts(now_s), self._policy)
            self._alarm.set_in(actions.next_s, actions.wake_s)
            if not self.steers:
                self._crew.changed()
                return
            self._failures = actions.failures
            await self._cancel(actions.cancel)
            self._forget(actions, present)
            for job_id in actions.retire:
                self._retire(job_id, present)
            for job_id in actions.lost:
                self._errands.send(self._crew.remove, present[job_id].addresses)
            if actions.submit and (lost := await self._submissions.lost(self._roster.known)):
                self._add(lost)  # fewer are missing than it seemed
            elif actions.submit:
                async for accepted in self._submissions.submit(actions.submit, self._roster.known):
                    self._add(accepted)
            if actions.cancel or actions.forget or actions.retire or actions.submit:
                self._alarm.ring()  # what was done may ask for more
            self._crew.changed()

    async def _cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs; what is refused for good stops nothing else, and is tried again when the job is overdue."""
        try:
            await cancel(self._system, job_ids)
        except SubmitError as e:
            if e.transient:
                raise
            self._crew.say(str(e))
        self._roster.cancelled(job_ids, self._alarm.now_s())

    def _facts(self, now_s: float) -> Facts:
        return Facts(
            now_s=now_s,
            wanted=self.wanted,
            jobs=self._roster.jobs,
            adapting=self._adapting,
            asked_s=self._asked_s,
            answered_s=self._answered_s,
            held_back_until_s=float("inf") if self.error else self._held_back_until_s,
            failures=self._failures,
        )

    def _retire(self, job_id: str, present: Mapping[str, Present]) -> None:
        self._roster.retired(job_id, self._alarm.now_s())
        if job_id in present:
            self._errands.send(self._crew.retire, present[job_id].addresses)

    def _forget(self, actions: Actions, present: Mapping[str, Present]) -> None:
        logs = {member.recorded.id: member.recorded.log for member in self._roster.members}
        for job_id, why in actions.forget:
            self._roster.ended(job_id, why, datetime.now(UTC).astimezone())
            self._crew.say(f"job {job_id}: {why}")
            if job_id in present:
                self._errands.send(self._crew.remove, present[job_id].addresses)
        if actions.forget:
            self._write_down()
        if actions.give_up and self.error is None:
            log = logs.get(actions.failures.last_id)
            self.error = JobError("; ".join(filter(None, (actions.give_up, log and tail(Path(log))))))
            self._crew.say(str(self.error))
        elif not actions.give_up and isinstance(self.error, JobError):
            self.error = None  # a job has its workers after all

    def _add(self, recorded: Sequence[RecordedJob]) -> None:
        if recorded:
            self._roster.add(recorded, self._alarm.now_s())
        if recorded or self._unwritten:
            self._write_down()

    def _write_down(self) -> None:
        """Have the jobs written down; where that fails (a full disk), nothing else is done before it is."""
        self._unwritten = True
        self._crew.write_down()
        self._unwritten = False

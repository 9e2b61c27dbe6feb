"""The jobs of an elastic cluster that come and go: plan.reconcile decides, and here it is done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.ask import ask, cancel
from hpcgpu.deploy.jobs.crew import Crew
from hpcgpu.deploy.jobs.job import tail
from hpcgpu.deploy.jobs.record import Gone, RecordedJob
from hpcgpu.deploy.jobs.roster import Member, Present, Roster
from hpcgpu.deploy.jobs.submissions import Submissions
from hpcgpu.errors import HpcGpuError, JobError, SubmitError
from hpcgpu.model import JobSpec, JobState
from hpcgpu.plan.reconcile import Actions, Facts, Failures, Policy, reconcile

# The next submission after a refusal that may pass, and the next question after no answer.
_AGAIN_S = 30.0
# A cancelled job is gone within the batch system's KillWait.
_END_S = 40.0
_POLL_S = 0.25
# A thousand workers come within seconds: each look at all jobs is for as many of them as came meanwhile.
_GATHER_S = 0.1
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
        self._system, self._policy, self._crew = system, policy, crew
        self._submissions = Submissions(system, spec, crew)
        self._roster = Roster(expected)
        self.expected, self.wanted, self.steers = expected, 0, False
        self.error: HpcGpuError | None = None
        self._adapting = False
        self._failures = Failures()
        self._asked_s: float | None = None
        self._answered_s: float | None = None
        self._held_back_until_s = _NEVER_S
        self._ask_at_s: float | None = None
        self._wake_at_s: float | None = None
        self._woken = asyncio.Event()
        self._acting = asyncio.Lock()
        self._errands: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

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
        self._roster.follow(*self._crew.written_down(), self._now())
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
        self._woken.set()

    def stop(self) -> None:
        """Watch no longer; the jobs stay."""
        for task in (*self._errands, *filter(None, (self._watching,))):
            task.cancel()

    async def close(self) -> None:
        """Stop, cancel every job that is left, and return when the batch system says that they have ended."""
        self.stop()
        async with self._acting:
            if not self.steers:
                self._roster.follow(*self._crew.written_down(), self._now())
            self._add(await self._submissions.lost(self._roster.known))
            left, end_s = self._roster.ids, self._now() + _END_S
            if left:
                await cancel(self._system, left)
            while left and self._now() < end_s:
                listed = await ask(self._system, left)
                left = [i for i in left if i in listed and listed[i].state is not JobState.ENDED]
                if left:
                    await asyncio.sleep(_POLL_S)
        if left:
            self._crew.say(f"jobs {', '.join(left)} have been cancelled, but are still there after {_END_S:g} s")

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._keep())
        self._woken.set()

    async def _keep(self) -> None:
        """Ask when it is time, and act on what has changed."""
        while True:
            await self._wait()
            try:
                if self._ask_at_s is not None and self._now() >= self._ask_at_s:
                    await self._ask()
                await self._act()
            except SubmitError as e:
                self._refused(e, say=True)

    def _refused(self, e: SubmitError, *, say: bool) -> None:
        """Try again later, or not at all; a limit of one's own passes when jobs that are there have ended."""
        if say:
            self._crew.say(str(e))
        self._held_back_until_s = self._ask_at_s = self._wake_at_s = self._now() + _AGAIN_S
        if not (e.transient or (e.over_limit and self._roster.ids)):
            self.error = e
        self._crew.changed()

    async def _wait(self) -> None:
        times = [at_s for at_s in (self._ask_at_s, self._wake_at_s) if at_s is not None]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, min(times) - self._now()) if times else None):
                await self._woken.wait()
                await asyncio.sleep(_GATHER_S)
        self._woken.clear()

    async def _ask(self) -> None:
        if self.steers:
            self._add(await self._submissions.lost(self._roster.known))
        asked, self._asked_s = self._roster.ids, self._now()
        listed = await ask(self._system, asked)
        self._answered_s = self._now()
        self._roster.listed(asked, listed, self._answered_s)

    async def _act(self) -> None:
        """Have the facts of now decided upon, and do it."""
        async with self._acting:
            present, now_s = self._crew.present(), self._now()
            if self.steers:
                self._add([self._submissions.record(job_id) for job_id in self._roster.unknown(present)])
            else:
                self._roster.follow(*self._crew.written_down(), now_s)
            self._roster.registered(present, now_s)
            actions = reconcile(self._facts(now_s), self._policy)
            self._ask_at_s, self._wake_at_s = self._at(actions.next_s), self._at(actions.wake_s)
            if not self.steers:
                self._crew.changed()
                return
            self._failures = actions.failures
            if actions.cancel:
                await cancel(self._system, actions.cancel)
                self._roster.cancelled(actions.cancel, self._now())
            self._forget(actions, present)
            for job_id in actions.retire:
                self._retire(job_id, present)
            for job_id in actions.lost:
                self._send(self._crew.remove, present[job_id].addresses)
            if actions.submit and (lost := await self._submissions.lost(self._roster.known)):
                self._add(lost)  # fewer are missing than it seemed
            elif actions.submit:
                async for accepted in self._submissions.submit(actions.submit, self._roster.known):
                    self._add(accepted)
            if actions.cancel or actions.forget or actions.retire or actions.submit:
                self._woken.set()  # what was done may ask for more
            self._crew.changed()

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
        self._roster.retired(job_id, self._now())
        if job_id in present:
            self._send(self._crew.retire, present[job_id].addresses)

    def _forget(self, actions: Actions, present: Mapping[str, Present]) -> None:
        log = ""
        for job_id, why in actions.forget:
            log = self._roster.ended(job_id, why, datetime.now(UTC).astimezone()).log
            self._crew.say(f"job {job_id}: {why}")
            if job_id in present:
                self._send(self._crew.remove, present[job_id].addresses)
        if actions.forget:
            self._crew.write_down()
        if actions.give_up and self.error is None:
            self.error = JobError("; ".join(filter(None, (actions.give_up, log and tail(Path(log))))))
            self._crew.say(str(self.error))
        elif not actions.give_up and isinstance(self.error, JobError):
            self.error = None  # a job has its workers after all

    def _send(self, errand: Callable[[Sequence[str]], Awaitable[object]], addresses: Sequence[str]) -> None:
        """Have the scheduler do something about workers, which may take as long as their data."""

        async def run() -> None:
            try:
                await errand(addresses)
            except Exception as e:  # the scheduler's own errors come as they are
                self._crew.say(f"workers {', '.join(addresses)}: {e!r}")

        task = asyncio.create_task(run())
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    def _add(self, recorded: Sequence[RecordedJob]) -> None:
        if recorded:
            self._roster.add(recorded, self._now())
            self._crew.write_down()

    def _at(self, in_s: float | None) -> float | None:
        return None if in_s is None else self._now() + in_s

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

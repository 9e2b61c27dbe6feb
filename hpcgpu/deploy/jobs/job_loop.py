"""The loop of all jobs of a cluster: one poll for all of them, one decision. A fleet carries it out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.batch_client import ask, on_lost_nodes, proven
from hpcgpu.deploy.jobs.job_table import JobTable, JobWorkers
from hpcgpu.deploy.jobs.logs import tail
from hpcgpu.deploy.jobs.record import script_end
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.model import JobSpec, JobState, JobStatus
from hpcgpu.plan.jobs.ends import why_over
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.polling import poll_in_s
from hpcgpu.plan.jobs.reconcile import NO_DEMAND, Actions, Demand, Facts, Policy, reconcile
from hpcgpu.supervise import tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHooks:
    """Callbacks from the job loop and the fleet into the cluster."""

    present: Callable[[], Mapping[str, JobWorkers]]  # return the registered workers by their job's id
    retire: Callable[[Sequence[str]], Awaitable[object]]  # make workers hand over their data and leave
    remove: Callable[[Sequence[str]], Awaitable[object]]  # make the scheduler forget workers that are gone
    write_down: Callable[[], None]  # in a thread, when jobs have come or gone
    # in a thread: return the jobs recorded last by any object, and the gone ones
    written_down: Callable[[], tuple[Sequence[Job], Sequence[Job]]]
    changed: Callable[[], None]  # when there are new facts
    say: Callable[[str], None]  # takes a line for the user
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def write(self) -> None:
        """Write the record, one write after the other, each with the facts of its time."""
        async with self._writing:
            await tasks.to_thread(self.write_down)


class Actor(Protocol):
    """Acts on jobs that come and go. Without an actor the job with the scheduler is the only one."""

    spec: JobSpec  # the request for one of them

    async def find_lost(self) -> None:
        """Add jobs whose submission was not answered; called before each poll."""

    async def act(self) -> None:
        """Decide by :meth:`JobLoop.decide` on the present facts, and carry out the actions."""

    def refused(self, e: SubmitError, *, say: bool) -> None:
        """Handle a refusal of the batch system, or a missing answer."""


class JobLoop:
    """Polls all jobs of a cluster when due, and has the decisions carried out.

    On the event loop's thread only; the table may be read by any thread.
    """

    def __init__(self, system: BatchSystem, policy: Policy, hooks: ClusterHooks) -> None:
        self.system, self.policy, self.hooks = system, policy, hooks
        self.table, self.alarm = JobTable(0), tasks.PollTimer()
        self.actor: Actor | None = None  # for jobs that come and go, if any
        self.asked_s: float | None = None  # of the last poll
        self.answered_s: float | None = None  # of the last answer
        self._head_spec: JobSpec | None = None
        self._last = ""
        self._hurried = self._stopped = False
        self._answer = asyncio.Event()
        self._looking: tasks.Loop | None = None

    @property
    def trouble(self) -> str:
        """Why the loop does not work at present; "" if it does."""
        return self._looking.trouble if self._looking else ""

    @property
    def head(self) -> Job | None:
        """The job with the scheduler; None if the scheduler is on this machine."""
        return self.table.head

    def add_head(self, job: Job, expected: int, spec: JobSpec | None) -> None:
        """Add the job with the scheduler, its number of workers, and its request (None: another process made it)."""
        self._head_spec = spec
        self.table.add_head(job, expected, self.alarm.now_s())
        self.start()

    def start(self) -> None:
        """Poll now, and from now on whenever due."""
        if self._looking is None:
            self._looking = tasks.run_forever(
                self._look, "the loop that looks after this cluster's jobs", changed=self.hooks.changed
            )
        self.alarm.ring()

    def stop(self) -> None:
        """Stop polling; the jobs stay."""
        self._stopped = True
        if self._looking:
            self._looking.cancel()
        self._answer.set()

    async def check(self) -> Job:
        """Return the job with the scheduler, without polling the batch system.

        Raises JobError if it has ended, with the tail of its log, or will never start.
        """
        job = self.head
        assert job
        has_left, code = await asyncio.to_thread(script_end, job)
        if self.table.left(has_left, code, self.alarm.now_s()):
            self.alarm.ring()
        job = self.head
        assert job
        if why := why_over(job, self.alarm.now_s(), self.policy.late_limit_s):
            never = job.state is JobState.STUCK
            raise JobError(why if never else f"{why}; {await asyncio.to_thread(tail, Path(job.log))}")
        if self._stopped:
            raise JobError(f"this cluster object has closed, and no longer polls job {job.id}")
        return job

    async def news(self) -> Job:
        """Poll the batch system; return the job after its answer, or without one; raise as :meth:`check`."""
        answer = self._answer
        if not self._stopped:
            self._hurry()
            await answer.wait()
        return await self.check()

    def ready(self) -> None:
        """Register the present workers: the head has been full once, whatever happens to them later."""
        self.table.registered(self.hooks.present(), self.alarm.now_s())
        if self.head and self.head.state is not JobState.RUNNING:
            self._hurry()  # to learn its nodes: a later answer may not name a lost one

    def decide(self, present: Mapping[str, JobWorkers], now_s: float, demand: Demand = NO_DEMAND) -> Actions:
        """Register the present workers, return the next actions, and set the time of the next check."""
        self.table.registered(present, now_s)
        facts = Facts(
            now_s=now_s,
            jobs=self.table.jobs,
            asked_s=self.asked_s,
            answered_s=self.answered_s,
            target=demand.target,
            adapting=demand.adapting,
            held_back_until_s=demand.held_back_until_s,
            failures=demand.failures,
        )
        actions = reconcile(facts, self.policy)
        self.alarm.set_in(actions.next_s, actions.wake_s)
        return actions

    def pause(self) -> None:
        """Wait after a batch system that has not answered, shortly while the scheduler is awaited."""
        now_s, patience = self.alarm.now_s(), self.policy.patience
        waits_s = [patience.refused_s] if self.actor else []
        if self.head and not self.head.heard:
            waits_s.append(poll_in_s(now_s, self.asked_s, [self.head], (), patience) or 0.0)
        wait_s = min(waits_s, default=patience.refused_s)
        self.alarm.set_in(wait_s, wait_s)

    def _hurry(self) -> None:
        self._hurried = True
        self.alarm.ring()

    async def _look(self) -> None:
        """Poll when due, and act on changes."""
        await self.alarm.wait()
        try:
            if self._hurried or self.alarm.is_time_to_ask:
                self._hurried = False
                await self._ask()
            await self._act()
        except SubmitError as e:
            self.pause()
            if self.actor:
                self.actor.refused(e, say=True)
            elif str(e) != self._last:
                self._last = str(e)
                self.hooks.say(self._last)
        except Exception:
            self.alarm.ring()  # the next check comes at once, and does the rest
            raise

    async def _ask(self) -> None:
        answer, self._answer = self._answer, asyncio.Event()  # callers that begin to wait now need a later answer
        self.asked_s = self.alarm.now_s()
        try:
            self.table.registered(self.hooks.present(), self.asked_s)
            if self.actor:
                await self.actor.find_lost()
            ids = self.table.ids
            listed = await self._listed(ids)
            self.answered_s = self.alarm.now_s()
            self.table.listed(ids, listed, self.answered_s)
        except SubmitError:
            self.table.unanswered(self.alarm.now_s())
            raise
        finally:
            answer.set()

    async def _listed(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        listed = await ask(self.system, ids)
        of_head = {i: status for i, status in listed.items() if self.head and i == self.head.id}
        of_members = {i: status for i, status in listed.items() if i not in of_head}
        for spec, of_spec in ((self._head_spec, of_head), (self.actor.spec if self.actor else None, of_members)):
            if spec:
                listed |= await proven(self.system, spec, of_spec)
        heard = [job.id for job in self.table.jobs if job.heard and not job.is_head]
        listed = await on_lost_nodes(self.system, listed, heard, {job.id: job.hosts for job in self.table.jobs})
        return await asyncio.to_thread(self.table.with_exit_codes, listed)

    async def _act(self) -> None:
        if self.actor:
            await self.actor.act()
        else:
            self.decide(self.hooks.present(), self.alarm.now_s())
            self.hooks.changed()

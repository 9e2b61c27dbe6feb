"""The jobs of a run, looked after for one cluster object."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hpcgpu import supervise
from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import ending
from hpcgpu.deploy.jobs.batch_client import Submitter, ask, cancel, on_lost_nodes, proven
from hpcgpu.deploy.jobs.ending import script_end, with_exit_code
from hpcgpu.deploy.jobs.logs import log_tail
from hpcgpu.deploy.jobs.run import Run
from hpcgpu.errors import ClosedError, HpcGpuError, JobError, SubmitError, message_of
from hpcgpu.model import JobSpec, JobState, JobStatus
from hpcgpu.model.worker_names import read_member_name
from hpcgpu.plan.jobs.job import HEAD, MEMBER, NO_WORKERS, Job, JobWorkers
from hpcgpu.plan.jobs.job_end import Failures, why_over
from hpcgpu.plan.jobs.job_text import End
from hpcgpu.plan.jobs.reconcile import NEVER_S, Actions, Facts, Policy, poll_in_s, reconcile
from hpcgpu.units import format_duration

# A cancelled job is gone within the batch system's KillWait.
_END_S = 40.0


@dataclass(slots=True, kw_only=True)
class SchedulerView:
    """The scheduler and workers of a cluster object, for its jobs. Any thread may call :meth:`present`."""

    scheduler: Callable[[], Any]  # return the connection pool to the present scheduler
    workers: Callable[[], Mapping[str, Any]]  # return the registered workers by address, with the scheduler's facts
    searching: Callable[[], bool]  # whether the scheduler does not answer, and is searched
    changed: Callable[[], object]  # called when there are new facts
    say: Callable[[str], None]  # takes a line for the user
    end: Callable[[], End | None]  # return how the cluster object has ended, if it has
    silent: frozenset[str] = frozenset()  # addresses of workers without a recent heartbeat
    look_s: float = 5.0  # between two questions to the scheduler which workers are silent

    def present(self, head: str, pools: Collection[str], *, elastic: bool) -> Mapping[str, JobWorkers]:
        """Return the registered workers by their job's id.

        ``head``: the job with the scheduler, whose workers are gone with it; "": it has none. ``elastic``: other jobs
        come and go, whose workers' names contain their job's id. Workers of ``pools`` have a resource of that name.
        """
        jobs: dict[str, JobWorkers] = {}
        of_head: list[str] = []
        silent = self.silent
        for address, facts in list(self.workers().items()):
            name = read_member_name(str(facts["name"])) if elastic else None
            if name is None:
                of_head.append(address)
                continue
            job_id, restarts, _ = name
            before = jobs.get(job_id, NO_WORKERS)
            is_silent = address in silent and (before.silent or not before.addresses)
            pool = next((pool for pool in pools if pool in facts.get("resources", ())), "") if pools else ""
            jobs[job_id] = JobWorkers((*before.addresses, address), max(before.restarts, restarts), is_silent, pool)
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


class Fleet:
    """Polls a run's jobs when due, and keeps its target numbers of members if this object owns the run.

    On the event loop's thread only; the run's jobs may be read by any thread.
    """

    def __init__(self, run: Run, policy: Policy, view: SchedulerView) -> None:
        self.run, self.policy, self.view = run, policy, view
        self.alarm = supervise.PollTimer()
        self._head_submitter: Submitter | None = None  # None: another process has submitted it
        # of members, by pool; "": the cluster's own, and the job with the scheduler
        self._submitters: dict[str, Submitter] = {}  # {}: the run has a fixed size
        self._policies, self._facts = {"": policy}, {"": Facts(now_s=0.0)}
        self._errors: dict[str, HpcGpuError] = {}  # why no job is submitted any more, until the next scale
        self._asked_s: float | None = None  # the last poll, and its answer
        self._answered_s: float | None = None
        self._last = ""  # the failure of the last poll
        self._hurried = self._stopped = self._unwritten = self._has_left = False
        self._limits_s: set[int] = set()  # walltimes that have been told
        self._answer = asyncio.Event()
        self._acting, self._writing = asyncio.Lock(), asyncio.Lock()
        self._requests: set[asyncio.Task[None]] = set()
        self._leaving: set[str] = set()  # addresses of present workers that were asked to leave
        self._looking: supervise.Loop | None = None
        self._listening: supervise.Loop | None = None  # to the workers' heartbeats

    # --- the jobs

    @property
    def trouble(self) -> str:
        """Why the jobs are not looked after at present; "" if they are."""
        return self._looking.trouble if self._looking else ""

    @property
    def error(self) -> HpcGpuError | None:
        """Why no job of some pool is submitted any more; None if all may come."""
        return next(iter(self._errors.values()), None)

    def present(self) -> Mapping[str, JobWorkers]:
        """Return the registered workers by their job's id."""
        head = self.run.head
        return self.view.present(head.id if head else "", self.run.pools, elastic=bool(self._submitters))

    async def submit_head(self, system: BatchSystem, spec: JobSpec) -> None:
        """Submit the job with the scheduler; raise SubmitError in the batch system's words."""
        patience, expected = self.policy.patience, self.run.expected.get(HEAD, 0)
        self._head_submitter = Submitter(
            system, spec, lambda text: self.view.say(f"job -: {text}"), patience, role=HEAD, expected=expected
        )
        job = await self._head_submitter.submit_head()
        self.run.add([job])
        self.start()

    def manage_members(self, spec: JobSpec, policy: Policy, pool: str = "") -> None:
        """Look after member jobs of this request, from the recorded ones on."""
        ours = f"{self.run.owner.token}-{pool}" if pool else self.run.owner.token
        spec = replace(spec, exit_file=f"{spec.exit_file}-{ours}")  # other owners' jobs have others
        expected = self.run.expected_of(MEMBER, pool)
        submitter = Submitter(
            self.run.system, spec, self.view.say, policy.patience, write=self.write, expected=expected, pool=pool
        )
        self._submitters[pool], self._policies[pool], self._facts[pool] = submitter, policy, Facts(now_s=0.0)
        if not pool and self.run.submitting and self.run.is_mine:  # the owner before has ended meanwhile
            submitter.lose(SubmitError("the owner before this one has submitted a job, and ended", unsure=True))
        if self._listening is None:
            self._listening = supervise.Loop(self._listen, "the search for workers that have fallen silent")
        self.start()

    def start(self) -> None:
        """Poll now, and from now on whenever due."""
        if self._looking is None:
            name = "the loop that looks after this cluster's jobs"
            self._looking = supervise.Loop(self._look, name, changed=self.view.changed)
        self.alarm.ring()

    def stop(self) -> None:
        """Stop polling; the jobs stay."""
        self._stopped = True
        for request in self._requests:
            request.cancel()
        for loop in filter(None, (self._looking, self._listening)):
            loop.cancel()
        self._answer.set()

    async def check(self) -> Job:
        """Return the head without a poll; raise JobError if it has ended, with its log's tail, or will never start."""
        head = self.run.head
        assert head
        has_left, code = await supervise.to_thread(script_end, head)
        if self.run.script_ended(head.id, has_left, code, self.alarm.now_s()):
            self.alarm.ring()
        job = self.run.jobs[head.id]
        if why := why_over(job, self.alarm.now_s(), self.policy.late_limit_s):
            if code == os.EX_TEMPFAIL and self._head_submitter and self.run.is_mine and not self._stopped:
                return await self._follow_head(job, self._head_submitter)
            never = job.state is JobState.STUCK
            raise JobError(why if never else f"{why}; {await supervise.to_thread(log_tail, Path(job.log))}")
        if self._stopped:
            raise ClosedError(f"this cluster object has closed, and no longer polls job {job.id}")
        return job

    async def _follow_head(self, before: Job, submitter: Submitter) -> Job:
        """Submit the job with the scheduler again; the one before has asked for that by its exit code."""
        self.run.ended(before.id, "its time was nearly over", datetime.now(UTC))
        await supervise.to_thread(Path(before.exit_file).unlink, missing_ok=True)
        job = await submitter.submit_head()
        self.run.add([job])
        await self.write()
        self.view.say(f"job {job.id} follows job {before.id}")
        self.alarm.ring()
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
        self.run.registered(self.present(), self.alarm.now_s())
        if self.run.head and self.run.head.state is not JobState.RUNNING:
            self._hurry()  # to learn its nodes: a later answer may not name a lost one

    async def scale(self, jobs: int, *, adapting: bool = False, pool: str = "") -> None:
        """Set the target number of member jobs of a pool; return after the necessary submissions.

        ``adapting``: the number may change soon, so young surplus jobs that wait are kept. Raises JobError if another
        object owns the run; SubmitError in the batch system's words, or only reports it when adapting. Accepted jobs
        stay; a ``transient`` refusal is tried again.
        """
        await supervise.to_thread(self.run.must_own, "scale")
        try:
            async with self._acting:  # the loop must not submit meanwhile: its refusal would not reach this caller
                changed = self.run.target_of(pool) != jobs
                self.run.aim(pool, jobs)
                self._update(pool, adapting=adapting)
                if not adapting:
                    self._errors.pop(pool, None)
                    self._update(pool, failures=Failures(), held_back_until_s=NEVER_S)
                if changed:
                    await self.write()  # another object that takes the run over goes on from here
                await self._act(only=pool)
        except SubmitError as e:
            self._pause()
            self._refused(pool, e, say=adapting)
            if not adapting:
                raise
        finally:
            self.start()

    async def close(self) -> None:
        """Stop, cancel all members, and wait for their end; SubmitError if some may exist nevertheless."""
        self.stop()
        async with self._acting:
            try:
                for submitter in tuple(self._submitters.values()):
                    await self._add(await submitter.lost(self.run.past_ids))
            finally:
                run, say = self.run, self.view.say
                await ending.close(run.system, run.members, _END_S, say, self.policy.patience)

    async def close_head(self) -> bool:
        """End the job with the scheduler; return, and raise SubmitError, as :func:`ending.close_head`."""
        run, say, patience = self.run, self.view.say, self.policy.patience
        return await ending.close_head(run.system, run.head, say, self._head_submitter, patience=patience)

    async def write(self) -> None:
        """Write the record, one write after the other, each with the facts of its time."""
        async with self._writing:
            # there may be member jobs whose ids are unknown yet
            self.run.submitting = any(submitter.unanswered for submitter in self._submitters.values())
            await supervise.to_thread(self.run.save)

    # --- the loop

    def _hurry(self) -> None:
        self._hurried = True
        self.alarm.ring()

    def _pause(self) -> None:
        """Wait after a batch system that has not answered, shortly while the scheduler is awaited."""
        now_s, patience, head = self.alarm.now_s(), self.policy.patience, self.run.head
        waits_s = [patience.refused_s] if self._submitters else []
        if head and not head.heard:
            waits_s.append(poll_in_s(now_s, self._asked_s, [head], (), patience) or 0.0)
        wait_s = min(waits_s, default=patience.refused_s)
        self.alarm.set_in(wait_s, wait_s)

    def _refused(self, pool: str, e: SubmitError, *, say: bool) -> None:
        """Try again later, or not at all; a limit of the user's jobs passes when existing ones have ended."""
        if say:
            self.view.say(str(e))
        until_s = self.alarm.now_s() + self.policy.patience.refused_s
        self._update(pool, held_back_until_s=max(until_s, self._submitters[pool].next_s))
        if not (e.transient or (e.over_limit and self.run.members)):
            self._errors[pool] = e
        self.view.changed()

    async def _look(self) -> None:
        """Poll when due, and act on changes."""
        await self.alarm.wait()
        try:
            if self._hurried or self.alarm.is_time_to_ask:
                self._hurried = False
                try:
                    await self._ask()
                except SubmitError as e:
                    self._not_answered(e)
                    return
            async with self._acting:
                await self._act()
        except Exception:
            self.alarm.ring()  # the next check comes at once, and does the rest
            raise

    def _not_answered(self, e: SubmitError) -> None:
        """Poll again later: only a refused submission stops others."""
        self._pause()
        if str(e) != self._last:
            self._last = str(e)
            self.view.say(f"{self._last}; hpcgpu asks again")
        self.view.changed()

    async def _listen(self) -> None:
        """Ask the scheduler which workers are silent."""
        await asyncio.sleep(self.view.look_s)
        with contextlib.suppress(OSError):  # the cluster object searches its scheduler
            silent = frozenset(await self.view.scheduler().hpcgpu_silent())
            if silent != self.view.silent:
                self.view.silent = silent
                self.alarm.ring()

    async def _ask(self) -> None:
        answer, self._answer = self._answer, asyncio.Event()  # callers that begin to wait now need a later answer
        now_s = self._asked_s = self.alarm.now_s()
        try:
            self.run.registered(self.present(), now_s)
            for submitter in tuple(self._submitters.values()) if self.run.is_mine else ():
                await self._add(await submitter.lost(self.run.past_ids))
            ids = list(self.run.jobs)
            listed = await self._listed(ids)
            now_s, self._last = self.alarm.now_s(), ""
            self._answered_s = now_s
            self.run.listed(ids, listed, now_s)
            self._tell_limits()
            await self._note_ends()
            await supervise.to_thread(self.run.keep_guard)
        except SubmitError:
            self.run.unanswered(self.alarm.now_s())
            raise
        finally:
            answer.set()

    def _tell_limits(self) -> None:
        """Report once if jobs have less time than requested, or a limit without a request."""
        for job in self.run.jobs.values():
            request_s = self._policies[job.pool].walltime_s if job.pool in self._policies else None
            if job.limit_s and job.limit_s not in self._limits_s and job.limit_s < (request_s or math.inf):
                self._limits_s.add(job.limit_s)
                request = f"{format_duration(int(request_s))} was" if request_s else "none was"
                limit = format_duration(job.limit_s)
                self.view.say(f"job {job.id} has a walltime of {limit}, though {request} requested")

    async def _note_ends(self) -> None:
        """Look for the exit codes of members that are ending: some batch systems take long for their output."""
        members = [j for j in self.run.members if j.script_ended_s is not None or (j.status and j.status.is_ending)]
        ends = await supervise.to_thread(lambda: [script_end(job) for job in members])
        for job, (has_left, code) in zip(members, ends, strict=True):
            self.run.script_ended(
                job.id, has_left and bool(job.status and job.status.is_ending), code, self.alarm.now_s()
            )

    async def _listed(self, ids: Sequence[str]) -> dict[str, JobStatus]:
        system, by_id = self.run.system, dict(self.run.jobs)
        jobs = by_id.values()
        listed = await ask(system, ids)
        for submitter in filter(None, (self._head_submitter, *self._submitters.values())):
            mine = {job.id for job in jobs if (job.role, job.pool) == (submitter.role, submitter.pool)}
            listed |= await proven(system, submitter.spec, {i: s for i, s in listed.items() if i in mine})
        heard = [job.id for job in jobs if job.heard and not job.is_head]
        listed = await on_lost_nodes(system, listed, heard, {job.id: job.hosts for job in jobs})
        return await supervise.to_thread(  # it reads files
            lambda: {i: with_exit_code(by_id[i], s) if i in by_id else s for i, s in listed.items()}
        )

    # --- the actions

    async def _act(self, only: str | None = None) -> None:
        """Decide on the present facts, and carry out the actions if this object owns the run; callers hold the lock.

        Raises SubmitError for the pool ``only``; refusals of other ones are told.
        """
        present, now_s = self.present(), self.alarm.now_s()
        if self._submitters:
            await self._look_at_owner()
            if self.run.is_mine:
                unknown = [(job_id, self._submitters.get(present[job_id].pool)) for job_id in self.run.unknown(present)]
                await self._add([submitter.lost_job(job_id) for job_id, submitter in unknown if submitter])
        self.run.registered(present, now_s)
        decided = {pool: self._decide(pool, now_s) for pool in self._facts}
        searches_s = [self.policy.patience.refused_s for s in self._submitters.values() if s.next_s > now_s]
        polls_s = [*searches_s, *(a.next_s for a in decided.values() if a.next_s is not None)]
        wakes_s = [a.wake_s for a in decided.values() if a.wake_s is not None]
        self.alarm.set_in(min(polls_s, default=None), min(wakes_s, default=None))
        for pool, actions in decided.items():
            if pool in self._submitters and self.run.is_mine:
                try:
                    await self._carry_out(pool, actions, present)
                except SubmitError as e:
                    if pool == only:
                        raise
                    self._pause()
                    self._refused(pool, e, say=True)
        self.view.changed()

    def _update(self, pool: str, **facts: Any) -> Facts:
        self._facts[pool] = replace(self._facts[pool], **facts)
        return self._facts[pool]

    def _decide(self, pool: str, now_s: float) -> Actions:
        """Return the next actions about a pool's jobs; the job with the scheduler is looked after with the first."""
        jobs = tuple(job for job in self.run.jobs.values() if job.pool == pool)
        target, asked_s, answered_s = self.run.target_of(pool), self._asked_s, self._answered_s
        facts = self._update(pool, now_s=now_s, jobs=jobs, target=target, asked_s=asked_s, answered_s=answered_s)
        facts = replace(facts, held_back_until_s=math.inf) if pool in self._errors else facts
        return reconcile(facts, self._policies[pool])

    async def _look_at_owner(self) -> None:
        with contextlib.suppress(OSError):  # a file server that is away; nothing is submitted then
            await supervise.to_thread(self.run.reload, self.alarm.now_s())
        if self.run.is_taken_over and not self._has_left:
            self._has_left = True
            self.view.say(f"another object has taken this cluster over: {self.run.owner} owns it; this one only reads")

    async def _carry_out(self, pool: str, actions: Actions, present: Mapping[str, JobWorkers]) -> None:
        submitter = self._submitters[pool]
        self._update(pool, failures=actions.failures)
        await self._cancel(actions.cancel)
        await self._forget(pool, actions, present)
        for job_id in actions.retire:
            self.run.retired(job_id, self.alarm.now_s())
        retired = (present.get(job.id, NO_WORKERS) for job in self.run.jobs.values() if job.retired_s is not None)
        here = {address for workers in retired for address in workers.addresses}
        if unasked := sorted(here - self._leaving):  # some register when their job is retired already
            self._send(self.view.retire, unasked)
        self._leaving = here
        for job_id in actions.lost:
            self._send(self.view.remove, present[job_id].addresses)
        # A search cannot tell whose job it has found: until then only that pool submits.
        if actions.submit and any(other.unsure for other in self._submitters.values() if other is not submitter):
            return
        if actions.submit and (lost := await submitter.lost(self.run.past_ids)):
            await self._add(lost)  # so fewer are missing
        elif actions.submit:
            async for accepted in submitter.submit(actions.submit, self.run.past_ids):
                await self._add(accepted)
        if actions.cancel or actions.forget or actions.retire or actions.submit:
            self.alarm.ring()  # these actions may require more

    async def _cancel(self, job_ids: Sequence[str]) -> None:
        """Cancel jobs. A final refusal does not stop the other actions; an overdue job is cancelled again."""
        try:
            await cancel(self.run.system, job_ids)
        except SubmitError as e:
            if e.transient:
                # It may have reached some of them, whose end is asked for then: the next answer shows who is left.
                self.run.cancelled(job_ids, self.alarm.now_s() - self.policy.leave_limit_s)
                raise
            self.view.say(str(e))
        self.run.cancelled(job_ids, self.alarm.now_s())

    async def _forget(self, pool: str, actions: Actions, present: Mapping[str, JobWorkers]) -> None:
        logs = {job.id: job.log for job in self.run.members}
        for job_id, why in actions.forget:
            job = self.run.jobs[job_id]
            has_left = job.leaving and job.state is JobState.ENDED  # one that is not listed is cancelled just before
            self.run.ended(job_id, why, datetime.now(UTC).astimezone())
            self.view.say(f"job {job_id}: {f'ended on request ({why})' if has_left else why}")
            if job_id in present:
                self._send(self.view.remove, present[job_id].addresses)
        if actions.forget:
            await self._write_jobs()
        if actions.give_up and pool not in self._errors:
            log = logs.get(actions.failures.last_id)
            self._errors[pool] = JobError(
                "; ".join(filter(None, (actions.give_up, log and await supervise.to_thread(log_tail, Path(log)))))
            )
            self.view.say(str(self._errors[pool]))
        elif not actions.give_up and isinstance(self._errors.get(pool), JobError):
            del self._errors[pool]  # a job has its workers after all

    async def _add(self, jobs: Sequence[Job]) -> None:
        self.run.add(jobs)
        for pool in {job.pool for job in jobs}:
            self._update(pool, held_back_until_s=NEVER_S)
        if jobs or self._unwritten:
            await self._write_jobs()

    async def _write_jobs(self) -> None:
        """Write the record. If that fails (a full disk), nothing else is done until it succeeds."""
        self._unwritten = True
        await self.write()
        self._unwritten = False

    def _send(self, request: Callable[[Sequence[str]], Awaitable[object]], addresses: Sequence[str]) -> None:
        """Send a request about workers to the scheduler without awaiting it: the registered workers show its effect."""
        workers, say = f"workers {', '.join(addresses)}", self.view.say

        async def run() -> None:
            try:
                await request(addresses)
            except OSError as e:  # the scheduler is gone for the moment, which is reported elsewhere
                say(f"{workers}: {message_of(e)}")

        # the scheduler's errors arrive unchanged
        name = f"the request to the scheduler about {workers}"
        supervise.start(run, name, lambda e: say(f"{workers}: {e!r}"), self._requests)

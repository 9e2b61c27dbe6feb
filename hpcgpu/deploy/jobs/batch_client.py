"""The batch system's client: submit jobs in few submissions and losing none, poll them, cancel them."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hpcgpu import supervise
from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.run import Run
from hpcgpu.errors import SubmitError
from hpcgpu.host import log, scratch
from hpcgpu.host.run import run
from hpcgpu.launch.environment import inherited_variables
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Patience
from hpcgpu.plan.jobs.job import HEAD, MEMBER, Job
from hpcgpu.plan.jobs.request import shortfalls

_GRACE_ANSWER_S = 2.0  # a job that ends waits for it
_NOT_THERE = 127  # return code of host.run: the program does not exist
# NCAR's qstat answers from a file that is minutes old, but not with this variable, which costs its server.
_EXACT = {"QSCACHE_BYPASS": "1"}
_ELSEWHERE = (
    "submit jobs on a login node of a cluster; 'hpcgpu plan --script' prints the script anywhere, and LocalGPUCluster "
    "uses this machine alone"
)
Answer = TypeVar("Answer")
_reported: set[str] = set()  # variables of the user's shell, each named once in this process


async def submit(
    system: BatchSystem,
    spec: JobSpec,
    script: str,
    tell: Callable[[str], None],
    patience: Patience,
    past_ids: Collection[str] = (),
) -> tuple[str, ...]:
    """Submit a job or an array, again after a transient refusal; return its job ids, or raise SubmitError."""
    inherited = inherited_variables(os.environ)  # this process may run in a job: a notebook's kernel, a script
    command = replace(system.submit(script, spec), timeout_s=patience.submission_s)
    if (shell := frozenset(command.removed(os.environ)) - inherited) and shell - _reported:
        tell(f"left out of the submission, since the job's own options are others: {', '.join(sorted(shell))}")
        _reported.update(shell)
    command = replace(command, without=command.without | inherited)
    pauses_s = list(patience.retries_s)
    while True:
        result = await run(command)
        if result.returncode == _NOT_THERE:
            raise SubmitError(f"{result.stderr.strip()}; {_ELSEWHERE}", evidence=result.stderr)
        try:
            return system.elements(system.read_submit(result), spec.count)
        except SubmitError as e:
            refusal = e
        if not (refusal.transient or refusal.over_limit or refusal.unsure):
            # batch systems do not name the missing resource
            options = " ".join(re.findall(r"^#(?:SBATCH|PBS) (.+)$", script, re.MULTILINE))
            text = "\n".join((f"{refusal}\nThe request was {options}", *await beyond(system, spec)))
            raise SubmitError(text, evidence=refusal.evidence, over_size=refusal.over_size)
        if refusal.over_limit:
            raise refusal
        while pauses_s:
            next_ = "searches for it" if refusal.unsure else "tries again"
            tell(f"{refusal}; hpcgpu {next_} in {pauses_s[0]:g} s")
            await asyncio.sleep(pauses_s.pop(0))
            if not refusal.unsure:
                break
            with contextlib.suppress(SubmitError):
                if jobs := await search(system, spec.name, spec.mark, past_ids):
                    return jobs
        else:  # a job that the search has not found may still appear: no second one is submitted
            raise refusal


async def look(system: BatchSystem, name: str, mark: str, past_ids: Collection[str]) -> tuple[str, ...]:
    """Do a :func:`search`; return () if the site refuses this query to users, and raise SubmitError for now."""
    try:
        return await search(system, name, mark, past_ids)
    except SubmitError as e:
        if e.transient:
            raise
        return ()


async def search(system: BatchSystem, name: str, mark: str, past_ids: Collection[str]) -> tuple[str, ...]:
    """Return a run's existing jobs that are not in ``past_ids``, whose ids were lost; SubmitError without an answer."""
    command = system.find(name, mark) if mark else None
    if command is None or not (ids := system.read_found(await run(command), mark)):
        return ()
    listed, missing = dict[str, JobStatus](), list(ids)
    while missing:  # as in ask
        listed |= system.read_status(await run(replace(system.status(missing), env=_EXACT)), missing)
        late = [i for i in ids if i not in listed and system.elements(i, 2)[0] not in listed]
        if late == missing:
            raise SubmitError(f"the batch system has {', '.join(late)}, but does not list it yet", transient=True)
        missing = late
    lost = [i for i, status in listed.items() if status.state is not JobState.ENDED and i not in past_ids]
    # in the order of submission, elements of an array too
    return tuple(sorted(lost, key=lambda job_id: [int(number) for number in re.findall(r"\d+", job_id)]))


async def ask(system: BatchSystem, ids: Sequence[str], *, exact: bool = False) -> dict[str, JobStatus]:
    """Return the statuses of jobs, by one query for all, and more only for jobs that the answer does not list.

    ``exact``: not from a site's cache.
    """
    statuses: dict[str, JobStatus] = {}
    missing, env = list(ids), _EXACT if exact else {}
    while missing:
        listed = system.read_status(await run(replace(system.status(missing), env=env)), missing)
        if not (new := {job_id: listed[job_id] for job_id in missing if job_id in listed}):
            break
        statuses |= new
        # OpenPBS of 2026-04 lists no job after an unknown one: a missing job may be alive
        missing = [job_id for job_id in missing if job_id not in statuses]
    if missing:
        try:
            listed = system.read_status(await run(replace(system.history(missing), env=env)), missing)
            statuses |= {job_id: listed[job_id] for job_id in missing if job_id in listed}
        except SubmitError as e:
            if e.transient:
                raise
            # a site without accounting: a job that squeue does not list does not exist
    return statuses


async def poll(run: Run) -> list[str]:
    """Poll the jobs of a run, waiting for a batch system that is away; return those that have not ended."""
    ids = list(run.jobs)
    run.listed(ids, await answered(lambda: ask(run.system, ids)), 0.0)
    return run.not_ended


async def answered(request: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return the batch system's answer, waiting if it is away for a while."""
    while True:
        try:
            return await request()
        except SubmitError as e:
            if not e.transient:
                raise
            log.say(str(e))
        await asyncio.sleep(Patience().guard_s)


async def beyond(system: BatchSystem, spec: JobSpec) -> tuple[str, ...]:
    """Return the parts of a request that the batch system does not have, as far as known."""
    command = system.offers(spec)
    return shortfalls(spec, system.read_offers(await run(command))) if command else ()


async def proven(system: BatchSystem, spec: JobSpec, listed: dict[str, JobStatus]) -> dict[str, JobStatus]:
    """Return the statuses of jobs of this request, with those that can never run as stuck.

    A job whose reason has an advice is suspect, and the resources prove it: a limit may be changed, a node come back.
    """
    suspect = {i: s for i, s in listed.items() if s.advice and s.state is JobState.PENDING}
    if not suspect or not (why := "; ".join(await beyond(system, spec))):
        return listed
    stuck = {i: replace(s, state=JobState.STUCK, reason=f"{s.reason}: {why}") for i, s in suspect.items()}
    return {**listed, **stuck}


async def on_lost_nodes(
    system: BatchSystem, listed: dict[str, JobStatus], heard: Collection[str], ran_on: Mapping[str, Sequence[str]]
) -> dict[str, JobStatus]:
    """Add the troubles of the jobs' nodes, or of the nodes that they had last, to their statuses.

    ``heard``: jobs whose workers send heartbeats, which are skipped. ``ran_on``: nodes of earlier answers, as Slurm
    names for a requeued job no node, or only the nodes that it has not lost.
    """
    ended = {i for i, s in listed.items() if s.state is JobState.ENDED}
    on = {i: s.hosts or (() if i in ended else ran_on.get(i, ())) for i, s in listed.items() if i not in heard}
    hosts = sorted({host for of_job in on.values() for host in of_job})
    if not hosts or not (command := system.nodes(hosts)):
        return listed
    lost = system.read_nodes(await run(command))
    troubles = {i: ", ".join(lost[host] for host in of_job if host in lost) for i, of_job in on.items()}
    return listed | {i: replace(listed[i], trouble=trouble) for i, trouble in troubles.items() if trouble}


async def cancel(system: BatchSystem, ids: Sequence[str]) -> None:
    """Cancel all jobs that are not gone or ending; SubmitError if some were not, ``transient`` if they may be yet."""
    refused = [e for e in await asyncio.gather(*(_refusal(system, command) for command in system.cancel(ids))) if e]
    if refused:
        raise SubmitError(
            "; ".join(dict.fromkeys(str(e).strip() for e in refused)),
            evidence="\n".join(e.evidence for e in refused),
            transient=any(e.transient for e in refused),
        )


async def _refusal(system: BatchSystem, command: Command) -> SubmitError | None:
    """Cancel jobs, by force on nodes that do not answer; return the refusal, or None."""
    forced: set[tuple[str, ...]] = set()
    try:
        while again := system.force(result := await run(command)):
            if again.argv in forced:
                return None
            forced.add(again.argv)
            system.read_cancel(await run(again))
        system.read_cancel(result)
    except SubmitError as e:
        return e
    return None


async def requeue(system: BatchSystem, job_id: str, *, by_script: bool) -> str:
    """Have a running job start again; return the id of the job that follows: this one, or a new submission of it.

    ``by_script``: its script is a file. Raises SubmitError, in the batch system's words, if no job follows.
    """
    try:
        system.read_requeue(await run(system.requeue(job_id)))
    except SubmitError:
        command = by_script and system.resubmit(await run(system.status([job_id])), job_id)
        if not command or not await asyncio.to_thread(Path(command.argv[-1]).is_file):
            raise
        return system.read_submit(await run(command))
    return job_id


async def killed_s(system: BatchSystem, job_id: str, came_s: float) -> float:
    """Return when a job is killed that got SIGTERM at ``came_s``, in seconds since the epoch; then if nothing tells."""
    commands = [replace(command, timeout_s=_GRACE_ANSWER_S) for command in system.grace(job_id)]
    return system.read_killed_s(await asyncio.gather(*map(run, commands)), came_s)


async def submit_guarded(run: Run, submit_job: Callable[[], Awaitable[object]]) -> None:
    """Submit the first job of a run, with record and guard in place before the job exists; or raise SubmitError."""
    await supervise.to_thread(run.save)
    # As dask-jobqueue does; without it Slurm fails a job, "JobLaunchFailure" (22.05.8). A folder that only the nodes
    # have cannot be made here, and one with a pattern of sbatch's (%u) has another name.
    logs = run.document.settings.log_directory
    if logs and "%" not in logs:
        with contextlib.suppress(OSError):
            await supervise.to_thread(scratch.make_private, Path(logs))
    await supervise.to_thread(run.start_guard)
    await submit_job()
    run.submitting = False
    await supervise.to_thread(run.save)


class Submitter:
    """Submits one request: for the job with the scheduler (HEAD), or for jobs that join it (MEMBER)."""

    def __init__(
        self,
        system: BatchSystem,
        spec: JobSpec,
        say: Callable[[str], None],  # takes a line for the user
        patience: Patience,
        *,
        # records that a submission is under way: jobs may appear after a client that was killed during it
        write: Callable[[], Awaitable[None]] | None = None,
        role: str = MEMBER,
        expected: int = 0,  # workers of a job
        pool: str = "",  # of members
    ) -> None:
        self._system, self.spec, self._say, self._patience = system, spec, say, patience
        self._write, self.role, self.pool, self._expected = write, role, pool, expected
        self._number = 0
        self._largest = math.inf  # array that was not refused for its size
        self._asking = False
        self.unsure: SubmitError | None = None  # why an answer was lost, until its jobs are found
        self.next_s = -math.inf  # when jobs may be submitted again, although those of a lost answer are not listed

    @property
    def unanswered(self) -> bool:
        """True if the answer to a submission is awaited, or was lost."""
        return self._asking or self.unsure is not None

    async def submit_head(self) -> Job:
        """Submit the job with the scheduler; raise SubmitError in the batch system's words."""
        if command := self._system.version():
            self._system.read_version(await run(command))
        for note in self._system.notes(self.spec):
            self._say(note)
        (job,) = [job async for jobs in self.submit(1, ()) for job in jobs]
        return job

    async def submit(self, count: int, past_ids: Collection[str]) -> AsyncIterator[list[Job]]:
        """Submit ``count`` jobs; yield each submission's, then raise SubmitError if some were refused.

        If a limit of this user's admits fewer jobs, groups of descending powers of two are submitted. A queue may take
        smaller arrays than the site's file says.
        """
        rest = count
        if self.unsure and (wait_s := self.next_s - time.monotonic()) > 0:
            text = f"{self.unsure}\nIts job may be in the queue, so none is submitted for {math.ceil(wait_s)} s"
            raise SubmitError(text, evidence=self.unsure.evidence, transient=True, unsure=True)
        while rest:
            part = int(min(rest, self._system.array_limit, self._largest))
            try:
                yield await self._submit_array(part, past_ids)
                rest -= part
            except SubmitError as e:
                if e.over_size and part > 1:
                    self._largest = part // 2
                    continue
                if not e.over_limit:
                    raise
                left = part - 1
                while left:
                    size = 1 << (left.bit_length() - 1)
                    left = size - 1
                    try:
                        accepted = await self._submit_array(size, past_ids)
                    except SubmitError as again:
                        if not again.over_limit:
                            raise
                    else:
                        yield accepted
                raise

    async def lost(self, past_ids: Collection[str]) -> list[Job]:
        """Return existing jobs of an unanswered submission, [] without one; SubmitError if there is no answer now."""
        if not self.unsure:
            return []
        ids = await look(self._system, self.spec.name, self.spec.mark, past_ids)
        if ids:
            self.unsure, self.next_s = None, -math.inf
        return [self.lost_job(job_id) for job_id in ids]

    def lose(self, why: SubmitError) -> None:
        """Search for the jobs of a lost answer, before others are submitted."""
        self.unsure, self.next_s = why, time.monotonic() + self._patience.unlisted_s

    def lost_job(self, job_id: str) -> Job:
        """Return a job whose id was lost."""
        return self._job(job_id, self.spec, self.spec.exit_file if self.role == HEAD else "")

    async def _submit_array(self, count: int, past_ids: Collection[str]) -> list[Job]:
        spec = replace(self.spec, count=count)
        if self.role == MEMBER:  # each submission of members has exit files of its own
            self._number += 1
            spec = replace(spec, exit_file=f"{spec.exit_file}-{self._number}")
        self._asking = True
        try:
            if self._write:
                await self._write()
            ids = await self._answered(spec, past_ids)
        finally:
            self._asking = False
        files = [spec.exit_file] * len(ids)
        if spec.count > 1:  # of jobs that were found later, while some of the array are missing, the index is unknown
            files = [f"{spec.exit_file}.{i}" if len(ids) == spec.count else "" for i in range(len(ids))]
        return [self._job(job_id, spec, file) for job_id, file in zip(ids, files, strict=True)]

    async def _answered(self, spec: JobSpec, past_ids: Collection[str]) -> Sequence[str]:
        try:
            return await submit(self._system, spec, self._system.script(spec), self._say, self._patience, past_ids)
        except SubmitError as e:
            if self.pool:
                e.parts = (f"pool {self.pool}: {e.parts[0]}", *e.parts[1:])
            if e.unsure:
                self.lose(e)
            raise
        except BaseException:
            # a close of the cluster interrupted it: the answer is lost
            self.lose(SubmitError("the submission was given up before it was answered", unsure=True))
            raise

    def _job(self, job_id: str, spec: JobSpec, exit_file: str) -> Job:
        return Job(
            id=job_id,
            role=self.role,
            pool=self.pool,
            # pathlib takes six times as long, for each of hundreds of jobs
            log=os.path.join(os.getcwd(), self._system.log(spec, job_id)),  # noqa: PTH109, PTH118
            exit_file=exit_file,
            nodes=spec.nodes,
            expected=self._expected,
            submitted_s=time.monotonic(),  # the clock of event loops
        )

"""All runs of this user: poll them together, show their jobs and logs, end them, clean up after dead owners."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TypeVar

from hpcgpu import supervise
from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import Run, script_end
from hpcgpu.deploy.jobs.batch_client import Submitter, ask, cancel, look, mark_of
from hpcgpu.deploy.network.lease import is_detached, is_held
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.host import log
from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs import SILENT, Job, count_by_job, describe, format_script_end
from hpcgpu.report.table import Shown, Table
from hpcgpu.report.workers import jobs_table

_POLL_S = 0.25
# A job whose lease has ended is gone within 5 s.
_HEAD_GRACE_S = 10.0
_HEAD_CANCEL_S = 20.0
# A cancel takes effect within the batch system's KillWait, and a refused one may be accepted later.
_AGAIN_S = 15.0
_BY_ITSELF_POLL_S = 0.5
# If slurmctld is away squeue says so after 40 s (22.05.8), and not within 60 s if SlurmctldTimeout is longer.
_SILENCE_S = 3.0


async def close_head(
    system: BatchSystem, job: Job | None, say: Callable[[str], None], submitter: Submitter | None = None
) -> bool:
    """Wait for the head's end, then cancel it; ``submitter`` finds a lost one. SubmitError if it may still exist.

    Returns False if only its script shows that it has ended: the batch system may start it again.
    """
    if submitter and (unsure := submitter.unsure):
        try:
            job = next(iter(await submitter.lost(())), job)
        except SubmitError as e:
            raise SubmitError(
                f"{unsure}. The job may exist nevertheless ({e}); its guard, a process here, searches for it when this "
                "process has ended",
                evidence=unsure.evidence,
                transient=True,
            ) from e
    if job:
        job_id = job.id

        def tell(text: str) -> None:
            say(f"job {job_id}: {text}")

        return await close(system, [job], _HEAD_CANCEL_S, tell, grace_s=_HEAD_GRACE_S)
    return True


async def close(
    system: BatchSystem, jobs: Sequence[Job], limit_s: float, tell: Callable[[str], None], *, grace_s: float = 0.0
) -> bool:
    """End jobs as :func:`end` does, waiting ``limit_s`` after the first cancel at most.

    Jobs that take longer are only reported to the user by ``tell``. With ``grace_s``, the time to end by themselves
    before they are cancelled, a job whose script has left its exit code has ended, whatever the batch system says:
    False if it says nothing.
    Raises SubmitError if jobs could not be cancelled and may still exist; all others have been cancelled.
    """
    has_ended, listed = await _end_by_themselves(system, jobs, grace_s, tell) if grace_s else (False, True)
    if has_ended:
        return listed
    left, why = await end(system, [job.id for job in jobs], limit_s, tell)
    if why and grace_s and await _left_codes(jobs):
        return False
    names = f"{'job' if len(left) == 1 else 'jobs'} {', '.join(left)}"
    if why:
        raise SubmitError(
            f"{names} may still exist: {why}. Exit this process: the run's guard, a process here, then tries again. Or "
            f"run 'hpcgpu stop {left[0]}'",
            evidence=why.evidence,
            transient=why.transient,
        )
    if left:
        tell(f"cancelled, but still there after {limit_s:g} s: {names}")
    return True


async def end(
    system: BatchSystem, ids: Sequence[str], limit_s: float, tell: Callable[[str], None]
) -> tuple[list[str], SubmitError | None]:
    """Cancel jobs that have not ended, again if need be; return those left after ``limit_s``, and the last refusal."""
    # Without a refusal (None) the batch system may just be slow. tell takes its refusals.
    left, refused, last = list(ids), None, ""
    again_s = float("-inf")
    now_s = asyncio.get_running_loop().time

    async def look() -> bool | None:
        """Poll the jobs, and cancel the remaining ones when due; return True if none is left, else None."""
        nonlocal left, refused, last, again_s
        try:
            listed = await ask(system, left, exact=True) if left else {}
            left = [i for i in left if i in listed and listed[i].state is not JobState.ENDED]
            if left and now_s() >= again_s:
                refused, again_s = None, now_s() + _AGAIN_S
                await cancel(system, left)
        except SubmitError as e:
            refused = e
            if e.transient:
                again_s = now_s()
            if str(e) != last:
                tell(str(e))
            last = str(e)
        return None if left else True

    with contextlib.suppress(TimeoutError):
        await supervise.until(look, _POLL_S, limit_s)
    return left, refused if left else None


async def _end_by_themselves(
    system: BatchSystem, jobs: Sequence[Job], limit_s: float, tell: Callable[[str], None]
) -> tuple[bool, bool]:
    """Wait until the jobs have ended; return whether they have, and whether the batch system says so."""
    last = ""

    async def have_ended() -> tuple[bool, bool] | None:
        """Return False first if a job waits, so will not end by itself; None if they may end soon."""
        nonlocal last
        try:
            async with asyncio.timeout(_SILENCE_S):
                listed = await ask(system, [job.id for job in jobs], exact=True)
        except (SubmitError, TimeoutError) as e:
            codes = await _left_codes(jobs)
            text = str(e) or "; ".join([*map(format_script_end, codes), SILENT] if codes else [])
            if text and text != last:
                tell(text)
            last = text or last
            return (True, False) if codes else None
        states = {status.state for job in jobs if (status := listed.get(job.id))} - {JobState.ENDED}
        if states.intersection(WAITING):
            return False, True
        return None if states else (True, True)

    try:
        return await supervise.until(have_ended, _BY_ITSELF_POLL_S, limit_s)
    except TimeoutError:
        return False, True


async def _left_codes(jobs: Sequence[Job]) -> list[int | None]:
    """Return the exit codes that the jobs' scripts have left; [] unless each of them has ended."""
    ends = await supervise.to_thread(lambda: [script_end(job) for job in jobs])
    return [code for _, code in ends] if all(has_left for has_left, _ in ends) else []


# A job whose lease has ended is gone within 5 s; a batch system gives 5 to 30 s after a cancel.
_BY_ITSELF_S = 5.0
_ENDING_S = 60.0
_ASK_S = 2.0
# An sbatch outlives its client, and tries for 2 minutes where slurmctld is "temporarily unable to accept job".
_SUBMITTING_S = 130.0
_LOST_JOBS_S = 5.0  # between two searches for the jobs of such an sbatch
Answer = TypeVar("Answer")


async def refresh(runs: Sequence[Run]) -> None:
    """Poll all jobs of runs, by one query for each batch system, and ask their schedulers for the workers."""
    for batch in {run.record.batch for run in runs}:
        of_batch = [run for run in runs if run.record.batch == batch]
        job_ids = [job_id for run in of_batch for job_id in run.jobs]
        states = await ask(of_batch[0].system, job_ids) if job_ids else {}
        for run in of_batch:
            run.listed(tuple(run.jobs), states, 0.0)
    if running := [run for run in runs if any(job.state is JobState.RUNNING for job in run.jobs.values())]:
        from hpcgpu.deploy.network.scheduler_file import worker_names

        for run, names in zip(running, await asyncio.gather(*(worker_names(r.folder) for r in running)), strict=True):
            run.workers = names


def clean_up(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Remove the folders of runs that are over, with a line for each; return the others."""
    left = []
    for run in runs:
        if run.owner_state == "alive" or run.not_ended:
            left.append(run)
            continue
        run.remove()
        logs = ", ".join(job.log for job in run.jobs.values()) or "it had no job"
        log.say(f"run {run.name} has ended and its owner is gone: removed from the list ({logs})")
    return tuple(left)


async def abandon(folder: Path, token: str) -> None:
    """End the jobs that a dead owner has left, unless its run has been taken over; called by its guard.

    Pending jobs are cancelled at once. Running jobs end by their lease. They are left alone as long as an object that
    is attached to the run renews it. It takes as many tries as necessary: no other process ends them.
    """

    async def once() -> bool:
        try:
            await _abandon(folder, token)
        except FileNotFoundError:
            if await supervise.to_thread(folder.exists):
                raise
        return True  # also if another process has stopped the run, and removed its folder

    await supervise.Loop(once, f"the end of the run in {folder}").task


async def _abandon(folder: Path, token: str) -> None:
    run = await asyncio.to_thread(Run.open, folder)
    if run.owner.token != token or not await _cancel_pending(run, token):
        return
    grace_s = run.document.settings.client_grace_s
    now = asyncio.get_running_loop().time
    end_s = now() + grace_s + _BY_ITSELF_S

    async def is_over() -> bool | None:
        """Return True if no job is left or the grace is over; False if the run goes on without this owner."""
        nonlocal end_s
        await asyncio.to_thread(run.look)
        if run.owner.token != token or await asyncio.to_thread(is_detached, folder):
            return False
        if not await poll(run):
            return True
        if await asyncio.to_thread(is_held, folder, grace_s):
            end_s = now() + _BY_ITSELF_S
        return True if now() > end_s else None

    if await supervise.until(is_over, _ASK_S):
        await finish(run)


async def _cancel_pending(run: Run, token: str) -> bool:
    """Cancel pending jobs, even with lost ids, and add these to the run; return False if it has another owner."""
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + (_SUBMITTING_S if run.submitting else 0.0)

    async def once() -> bool | None:
        await asyncio.to_thread(run.reload)
        if run.owner.token != token:
            return False
        recorded = list(run.jobs)
        lost = await _answered(functools.partial(look, run.system, run.name, mark_of(run.folder), recorded))
        states = await _states(run.system, [*recorded, *lost])
        if pending := [i for i, status in states.items() if status.state in WAITING]:
            try:
                await _answered(lambda: cancel(run.system, pending))
            except SubmitError as e:
                log.say(str(e))  # a final refusal
        run.add(Job(id=job_id) for job_id in lost)
        return True if lost or now_s() > end_s else None

    return await supervise.until(once, _LOST_JOBS_S)


async def stop(run: Run) -> None:
    """End a run, even another client's, by a goodbye to its scheduler or the batch system; JobError after a minute."""
    # it imports distributed: 0.3 s, which no guard should pay
    from hpcgpu.deploy.network.scheduler_file import say_goodbye

    if await say_goodbye(run.folder):

        async def has_ended() -> bool | None:
            return None if await poll(run) else True

        with contextlib.suppress(TimeoutError):
            await supervise.until(has_ended, _ASK_S / 4, 2 * _BY_ITSELF_S)
    await finish(run)


async def finish(run: Run) -> None:
    """Cancel the jobs, wait for their end, and remove the folder; JobError if they still exist after a minute."""
    left, why = await end(run.system, list(run.jobs), _ENDING_S, log.say)
    while why and why.transient:  # wait for a batch system that is away; each round has its time limit
        left, why = await end(run.system, left, _ENDING_S, log.say)
    if left:
        reason = f": {why}" if why else ""
        raise JobError(f"jobs {', '.join(left)} were cancelled {_ENDING_S:g} s ago, but still exist{reason}")
    await asyncio.to_thread(run.remove)


async def poll(run: Run) -> list[str]:
    """Poll the jobs of a run, waiting for a batch system that is away; return those that have not ended."""
    ids = list(run.jobs)
    run.listed(ids, await _states(run.system, ids), 0.0)
    return run.not_ended


async def _states(system: BatchSystem, job_ids: list[str]) -> dict[str, JobStatus]:
    return await _answered(lambda: ask(system, job_ids)) if job_ids else {}


async def _answered(request: Callable[[], Awaitable[Answer]]) -> Answer:
    """Return the batch system's answer, waiting if it is away for a while."""

    async def once() -> tuple[Answer] | None:
        try:
            return (await request(),)
        except SubmitError as e:
            if not e.transient:
                raise
            log.say(str(e))
            return None

    return (await supervise.until(once, _ASK_S))[0]


@dataclass(frozen=True, slots=True, repr=False)
class Jobs(Shown):
    """The described jobs of a cluster."""

    rows: tuple[Job, ...]  # the one with the scheduler, and all others that are not gone
    gone: tuple[Job, ...] = ()  # the last few that ended unasked, the newest first

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def table(self) -> Table:
        """The jobs, those that are gone last."""
        return jobs_table((*self.rows, *self.gone))


def jobs_of(run: Run) -> tuple[Job, ...]:
    """Return the described jobs of a run, which may be another process's."""
    members = [job.id for job in run.members]
    counts = count_by_job(run.workers or (), members, run.head.id if run.head else "")
    reached = run.workers is not None
    return tuple(describe(job.registered(counts[job.id], 0.0), today(), reached=reached) for job in run.jobs.values())


def today() -> date:
    """Return the local date, which starts are compared with: batch systems write local times."""
    return date.today()  # noqa: DTZ011


_TAIL_LINES = 30
_NEW_LINES_S = 0.5
_FOLLOW_S = 5.0
_CHUNK_BYTES = 1 << 16


def log_of(run: Run, job_id: str) -> Path:
    """Return the log of the named job, or of the run's first job; raise JobError if the run has no job yet."""
    if not run.jobs:
        raise JobError(f"run {run.name} has no job yet")
    jobs = tuple(run.jobs.values())
    return Path(next((job for job in jobs if job_id in (job.id, job.id.partition(".")[0])), jobs[0]).log)


def log_tail(log: Path, *, kept: bool = True) -> str:
    """Format the end of a log for an error. If the log is ``kept`` until the error is read, its path is named."""
    name = f"its log {log}" if kept else "its log (log_directory= keeps it)"
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return (
            f"{name} is not there: it had not begun, its node could not write or deliver it there (give log_directory= "
            "a folder that all nodes see), or an option in job_extra_directives has given it another place"
        )
    except OSError as e:
        return f"{name} cannot be read ({e.strerror})"
    if not lines:
        return f"{name} is empty"
    return f"the end of {name}:\n" + "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def last_lines(log: Path, lines: int) -> tuple[str, int]:
    """Return the last lines and where they end in the file; ("", 0) if there is no log yet."""
    try:
        with log.open("rb") as f:
            end = f.seek(0, os.SEEK_END)
            start, tail = end, b""
            while start > 0 and tail.count(b"\n") <= lines:
                start = max(0, start - _CHUNK_BYTES)
                f.seek(start)
                tail = f.read(end - start)
    except FileNotFoundError:
        return "", 0
    kept = tail.splitlines(keepends=True)[-lines:] if lines else []
    return b"".join(kept).decode(errors="replace"), end


async def follow_log(run: Run, log: Path, offset: int, echo: Callable[[str], None]) -> None:
    """Pass additions to the log to ``echo`` until the run's jobs have ended."""
    now_s = asyncio.get_running_loop().time
    asked_s, over = now_s(), False

    async def hand_out() -> bool | None:
        nonlocal offset, asked_s, over
        if now_s() - asked_s >= _FOLLOW_S:  # first: lines that come after the answer are read below
            over, asked_s = not await poll(run), now_s()
        while part := await asyncio.to_thread(_read, log, offset):
            offset += len(part)
            echo(part.decode(errors="replace"))
        return over or None

    await supervise.until(hand_out, _NEW_LINES_S)


def _read(log: Path, offset: int) -> bytes:
    """Return the next part of the log; b"" at its end, or if there is no log yet."""
    try:
        with log.open("rb") as f:
            f.seek(offset)
            return f.read(_CHUNK_BYTES)
    except FileNotFoundError:
        return b""

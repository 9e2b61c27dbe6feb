"""End jobs: wait until they end by themselves, cancel them, and see that the batch system has let them go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hpcgpu import supervise
from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.batch_client import Submitter, ask, cancel, poll
from hpcgpu.deploy.jobs.run import Run
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.host import log
from hpcgpu.model import JobState, JobStatus, Patience
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_text import SILENT, format_script_end

PATIENCE = Patience()
# A job whose lease has ended is gone within 5 s.
BY_ITSELF_S = 5.0
# A batch system gives 5 to 30 s after a cancel.
_ENDING_S = 60.0


async def close_head(
    system: BatchSystem,
    job: Job | None,
    say: Callable[[str], None],
    submitter: Submitter | None = None,
    *,
    grace_s: float = 10.0,
    limit_s: float = 20.0,
    patience: Patience = PATIENCE,
) -> bool:
    """Wait for the head's end, then cancel it; ``submitter`` finds a lost one. SubmitError if it may still exist.

    ``grace_s``: for its end by itself; a job whose lease has ended is gone within 5 s. ``limit_s``: after a cancel.
    Returns False if only the exit code that its script has left shows that it has ended: the batch system may start it
    again.
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
    if not job:
        return True
    name = f"job {job.id}"

    def tell(text: str) -> None:
        say(f"{name}: {text}")

    has_ended, is_listed = await _end_by_itself(system, job, grace_s, tell, patience)
    if has_ended:
        return is_listed
    try:
        await close(system, [job], limit_s, tell, patience)
    except SubmitError:
        if not (await supervise.to_thread(script_end, job))[0]:
            raise
        return False
    return True


async def close(
    system: BatchSystem, jobs: Sequence[Job], limit_s: float, tell: Callable[[str], None], patience: Patience = PATIENCE
) -> None:
    """End jobs as :func:`end` does, waiting ``limit_s`` after the first cancel at most.

    Jobs that take longer are only reported to the user by ``tell``. Raises SubmitError if jobs could not be cancelled
    and may still exist; all others have been cancelled.
    """
    left, why = await end(system, [job.id for job in jobs], limit_s, tell, patience)
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


async def end(
    system: BatchSystem, ids: Sequence[str], limit_s: float, tell: Callable[[str], None], patience: Patience = PATIENCE
) -> tuple[list[str], SubmitError | None]:
    """Cancel jobs that have not ended, again if need be; return those left after ``limit_s``, and the last refusal.

    Without a refusal (None) the batch system may just be slow. ``tell`` takes its refusals.
    """
    left, refused, last = list(ids), None, ""
    now_s = asyncio.get_running_loop().time
    again_s, end_s, wait_s = float("-inf"), now_s() + limit_s, patience.cancelled_s
    while left and now_s() <= end_s:
        try:
            listed = await ask(system, left, exact=True)
            left = [i for i in left if i in listed and listed[i].state is not JobState.ENDED]
            if left and now_s() >= again_s:
                refused, again_s = None, now_s() + patience.cancel_s
                await cancel(system, left)
        except SubmitError as e:
            refused = e
            if e.transient:
                again_s = now_s()
            if str(e) != last:
                tell(str(e))
            last = str(e)
        if left:
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, patience.guard_s)
    return left, refused if left else None


async def _end_by_itself(
    system: BatchSystem, job: Job, limit_s: float, tell: Callable[[str], None], patience: Patience
) -> tuple[bool, bool]:
    """Wait until a job has ended; return whether it has, and whether the batch system says so."""
    now_s = asyncio.get_running_loop().time
    last, end_s = "", now_s() + limit_s
    while now_s() <= end_s:
        try:
            async with asyncio.timeout(patience.silence_s):
                status = (await ask(system, [job.id], exact=True)).get(job.id)
        except (SubmitError, TimeoutError) as e:
            has_left, code = await supervise.to_thread(script_end, job)
            text = str(e) or (f"{format_script_end(code)}; {SILENT}" if has_left else "")
            if text and text != last:
                tell(text)
            last = text or last
            if has_left:
                return True, False
        else:
            if status is None or status.state is JobState.ENDED:
                return True, True
            if status.state in WAITING:  # it will not end by itself
                break
        await asyncio.sleep(patience.by_itself_s)
    return False, True


async def stop(run: Run) -> None:
    """End a run, even another client's, by a goodbye to its scheduler or the batch system; JobError after a minute."""
    from hpcgpu.deploy.network.scheduler_file import say_goodbye  # distributed: 0.3 s, which no guard should pay

    if await say_goodbye(run.folder):
        now_s = asyncio.get_running_loop().time
        end_s = now_s() + 2 * BY_ITSELF_S
        while now_s() <= end_s and await poll(run):
            await asyncio.sleep(PATIENCE.by_itself_s)
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


def with_exit_code(job: Job, status: JobStatus) -> JobStatus:
    """Return the status with the exit code that the job's script has left, if the batch system has none."""
    if status.state is JobState.ENDED and status.exit_code is None:
        with contextlib.suppress(OSError, ValueError):
            return replace(status, exit_code=int(Path(job.exit_file).read_text()))
    return status


def script_end(job: Job) -> tuple[bool, int | None]:
    """Return whether a job's script has left its exit code, and the code; a requeued script removes it."""
    if not job.exit_file or not Path(job.exit_file).is_file():
        return False, None
    return True, with_exit_code(job, JobStatus(JobState.ENDED, "")).exit_code

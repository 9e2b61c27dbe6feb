"""End jobs: wait for them, cancel them, and poll until the batch system says that they have ended.

Used for the job with the scheduler, the jobs that come and go, the doctor's job and the jobs of a dead client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from hpcgpu import supervise
from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.batch_client import ask, cancel
from hpcgpu.deploy.jobs.run import script_end
from hpcgpu.deploy.jobs.submitter import Submitter
from hpcgpu.errors import SubmitError
from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs import Job
from hpcgpu.plan.jobs.phase import SILENT, format_script_end

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
) -> None:
    """Wait for the job with the scheduler to end by itself, then cancel it; ``submitter`` finds it if its id was lost.

    Raises SubmitError if it could not be cancelled, or if the batch system does not say whether it exists.
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
        await close(system, [job], _HEAD_CANCEL_S, lambda text: say(f"job {job_id}: {text}"), grace_s=_HEAD_GRACE_S)


async def close(
    system: BatchSystem, jobs: Sequence[Job], limit_s: float, tell: Callable[[str], None], *, grace_s: float = 0.0
) -> None:
    """End jobs as :func:`end` does, waiting ``limit_s`` after the first cancel at most.

    Jobs that take longer are only reported to the user by ``tell``. With ``grace_s``, the time to end by themselves
    before they are cancelled, a job whose script has left its exit code has ended, whatever the batch system says.
    Raises SubmitError if jobs could not be cancelled and may still exist; all others have been cancelled.
    """
    if grace_s and await _end_by_themselves(system, jobs, grace_s, tell):
        return
    left, why = await end(system, [job.id for job in jobs], limit_s, tell)
    if why and grace_s and await _have_left_their_codes(jobs):
        return
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
    system: BatchSystem, ids: Sequence[str], limit_s: float, tell: Callable[[str], None]
) -> tuple[list[str], SubmitError | None]:
    """Cancel jobs, again if need be, until all have ended; return those left after ``limit_s``, and why.

    Ended jobs are not cancelled. Without a refusal (None) the batch system may just be slow. ``tell`` takes its
    refusals.
    """
    left, refused, last = list(ids), None, ""
    again_s = float("-inf")
    now_s = asyncio.get_running_loop().time

    async def look() -> bool | None:
        """Poll the jobs, and cancel the remaining ones when due; return True if none is left, else None."""
        nonlocal left, refused, last, again_s
        try:
            listed = await ask(system, left) if left else {}
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
) -> bool:
    """Wait until the jobs have ended; return whether they have."""
    last = ""

    async def have_ended() -> bool | None:
        """Return False if a job waits, so will not end by itself; None if they may end soon."""
        nonlocal last
        try:
            listed = await _answer(system, jobs)
        except SubmitError as e:
            if str(e) != last:
                tell(str(e))
            last = str(e)
            return True if await _have_left_their_codes(jobs) else None
        states = {status.state for job in jobs if (status := listed.get(job.id))} - {JobState.ENDED}
        if states.intersection(WAITING):
            return False
        return None if states else True

    try:
        return await supervise.until(have_ended, _BY_ITSELF_POLL_S, limit_s)
    except TimeoutError:
        return False


async def _answer(system: BatchSystem, jobs: Sequence[Job]) -> dict[str, JobStatus]:
    """Return the jobs' statuses; raise SubmitError if the batch system is silent once their scripts have ended."""
    loop = asyncio.get_running_loop()
    asking, end_s = asyncio.create_task(ask(system, [job.id for job in jobs])), loop.time() + _SILENCE_S
    try:
        while not asking.done():
            await asyncio.wait([asking], timeout=_BY_ITSELF_POLL_S)
            if loop.time() >= end_s:
                ends = await asyncio.to_thread(lambda: [script_end(job) for job in jobs])
                if all(over for over, _ in ends) and not asking.done():
                    raise SubmitError(f"{'; '.join(format_script_end(code) for _, code in ends)}; {SILENT}")
        return asking.result()
    finally:
        if asking.cancel():
            await asyncio.wait([asking])


async def _have_left_their_codes(jobs: Sequence[Job]) -> bool:
    return await asyncio.to_thread(lambda: all(script_end(job)[0] for job in jobs))

"""The end of jobs: by themselves, by a cancel, and until the batch system says that they have ended.

The job with the scheduler, the jobs that come and go, the doctor's job and the jobs of a dead client end by it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.batch_client import ask, cancel
from hpcgpu.deploy.jobs.record import RecordedJob
from hpcgpu.errors import SubmitError
from hpcgpu.model import JobState, JobStatus
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs.phase import SILENT_WORDS, script_words
from hpcgpu.supervise import tasks

_POLL_S = 0.25
# A cancel is carried out within the batch system's KillWait, and one that failed for a reason may be accepted later.
_AGAIN_S = 15.0
_BY_ITSELF_POLL_S = 0.5
# If slurmctld is away squeue says so after 40 s (22.05.8), and not within 60 s if SlurmctldTimeout is longer.
_SILENCE_S = 3.0


async def close(
    system: BatchSystem,
    jobs: Sequence[RecordedJob],
    limit_s: float,
    tell: Callable[[str], None],
    *,
    grace_s: float = 0.0,
) -> None:
    """Have jobs end as :func:`end` does. A job that takes long to end is only said.

    Parameters
    ----------
    system : BatchSystem
        Has them.
    jobs : sequence of RecordedJob
        Those that have ended are not cancelled.
    limit_s : float
        No longer than that after the first cancel.
    tell : callable
        Takes a line for the user.
    grace_s : float
        How long they may take to end by themselves before they are cancelled. If there is a grace, a job whose script
        has left its exit code has ended, whatever the batch system says.

    Raises
    ------
    SubmitError
        Jobs could not be cancelled, and may still be there; all others have been cancelled.

    """
    if grace_s and await _end_by_themselves(system, jobs, grace_s, tell):
        return
    there, why = await end(system, [job.id for job in jobs], limit_s, tell)
    if why and grace_s and await _have_left_their_codes(jobs):
        return
    words = f"{'job' if len(there) == 1 else 'jobs'} {', '.join(there)}"
    if why:
        raise SubmitError(
            f"{words} may still be there: {why}. The run's guard, a process here, goes on trying when this process has "
            f"ended, or 'hpcgpu stop {there[0]}' does",
            evidence=why.evidence,
            transient=why.transient,
        )
    if there:
        tell(f"cancelled, but still there after {limit_s:g} s: {words}")


async def end(
    system: BatchSystem, ids: Sequence[str], limit_s: float, tell: Callable[[str], None]
) -> tuple[list[str], SubmitError | None]:
    """Cancel jobs, again if need be, until the batch system says that all have ended.

    Parameters
    ----------
    system : BatchSystem
        Has them.
    ids : sequence of str
        Those that have ended are not cancelled.
    limit_s : float
        No longer than that.
    tell : callable
        Takes a line for the user: a refusal of the batch system.

    Returns
    -------
    list of str
        The jobs that are still there.
    SubmitError or None
        Why, as far as the batch system does not do it: it may be slow only.

    """
    ending = _Ending(system, ids, tell)
    with contextlib.suppress(TimeoutError):
        await tasks.until(ending.look, _POLL_S, limit_s)
    return ending.there, ending.refused if ending.there else None


class _Ending:
    """Cancels jobs again and again.

    Attributes
    ----------
    there : list of str
        The jobs that have not ended.
    refused : SubmitError or None
        Why the batch system did not cancel them, or did not answer.

    """

    def __init__(self, system: BatchSystem, ids: Sequence[str], tell: Callable[[str], None]) -> None:
        self.there = list(ids)
        self.refused: SubmitError | None = None
        self._system, self._tell, self._said = system, tell, ""
        self._again_s = float("-inf")

    async def look(self) -> bool | None:
        """Ask, and cancel those that are there when it is time to; True when none is, else None."""
        now_s = asyncio.get_running_loop().time
        try:
            listed = await ask(self._system, self.there) if self.there else {}
            self.there = [i for i in self.there if i in listed and listed[i].state is not JobState.ENDED]
            if self.there and now_s() >= self._again_s:
                self.refused, self._again_s = None, now_s() + _AGAIN_S
                await cancel(self._system, self.there)
        except SubmitError as e:
            self.refused = e
            if e.transient:
                self._again_s = now_s()
            if str(e) != self._said:
                self._tell(str(e))
            self._said = str(e)
        return None if self.there else True


async def _end_by_themselves(
    system: BatchSystem, jobs: Sequence[RecordedJob], limit_s: float, tell: Callable[[str], None]
) -> bool:
    """Wait until the jobs have ended, and tell whether they have."""

    async def have_ended() -> bool | None:
        """False if one of them waits, and will not end by itself; None if they may end soon."""
        try:
            listed = await _answer(system, jobs)
        except SubmitError as e:
            tell(str(e))
            return True if await _have_left_their_codes(jobs) else None
        there = [status for job in jobs if (status := listed.get(job.id)) and status.state is not JobState.ENDED]
        if any(status.state in WAITING for status in there):
            return False
        return None if there else True

    try:
        return await tasks.until(have_ended, _BY_ITSELF_POLL_S, limit_s)
    except TimeoutError:
        return False


async def _answer(system: BatchSystem, jobs: Sequence[RecordedJob]) -> dict[str, JobStatus]:
    """Ask about jobs; a batch system that is silent is not waited for once their scripts have ended.

    Raises
    ------
    SubmitError
        It said that it cannot answer, or nothing.

    """
    loop = asyncio.get_running_loop()
    asking, end_s = asyncio.create_task(ask(system, [job.id for job in jobs])), loop.time() + _SILENCE_S
    try:
        while not asking.done():
            await asyncio.wait([asking], timeout=_BY_ITSELF_POLL_S)
            if loop.time() >= end_s:
                ends = await asyncio.to_thread(lambda: [job.script_end() for job in jobs])
                if all(over for over, _ in ends) and not asking.done():
                    raise SubmitError(f"{'; '.join(script_words(code) for _, code in ends)}; {SILENT_WORDS}")
        return asking.result()
    finally:
        if asking.cancel():
            await asyncio.wait([asking])


async def _have_left_their_codes(jobs: Sequence[RecordedJob]) -> bool:
    """Tell whether the script of each job has left its exit code."""
    return await asyncio.to_thread(lambda: all(job.script_end()[0] for job in jobs))

"""Jobs are ended: cancelled as long as they are there, all of them, whatever the batch system says of some."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs.ask import ask, cancel
from hpcgpu.errors import SubmitError
from hpcgpu.model import JobState

_POLL_S = 0.25
# A cancel is carried out within the batch system's KillWait, and one that failed for a reason may be accepted later.
_AGAIN_S = 15.0


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
        Takes a line for the user: what the batch system refuses.

    Returns
    -------
    list of str
        The jobs that are still there.
    SubmitError or None
        Why, as far as the batch system does not do it: it may be slow only.

    """
    now = asyncio.get_running_loop().time
    left, refused, said = list(ids), None, ""
    again_s, end_s = now(), now() + limit_s
    while True:
        try:
            listed = await ask(system, left) if left else {}
            left = [i for i in left if i in listed and listed[i].state is not JobState.ENDED]
            if left and now() >= again_s:
                refused, again_s = None, now() + _AGAIN_S
                await cancel(system, left)
        except SubmitError as e:
            refused = e
            if e.transient:
                again_s = now()
            if str(e) != said:
                tell(said := str(e))
        if not left or now() > end_s:
            return left, refused if left else None
        await asyncio.sleep(_POLL_S)


async def close(system: BatchSystem, ids: Sequence[str], limit_s: float, tell: Callable[[str], None]) -> None:
    """Have jobs end as :func:`end` does; what the batch system takes long for is only said.

    Raises
    ------
    SubmitError
        Jobs may still be there, for they could not be cancelled; all others have been.

    """
    left, why = await end(system, ids, limit_s, tell)
    jobs = f"{'job' if len(left) == 1 else 'jobs'} {', '.join(left)}"
    if why:
        raise SubmitError(
            f"{jobs} may still be there: {why}. The run's guard, a process here, goes on trying when this process has "
            f"ended, or 'hpcgpu stop {left[0]}' does",
            evidence=why.evidence,
            transient=why.transient,
        )
    if left:
        tell(f"cancelled, but still there after {limit_s:g} s: {jobs}")

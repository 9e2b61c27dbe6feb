"""The scheduler's side of cluster objects: retire workers for them, and hold the owner's lease."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from distributed import Scheduler

from hpcgpu.deploy.processes import Control
from hpcgpu.supervise import tasks

_LOOK_S = 0.1
# Interval of the checks, and how late one may come. When it comes later, this process itself has been
# stopped (Slurm and PBS suspend jobs with SIGSTOP), and has read no sign of life of client and workers. With a short
# grace a short stop counts: by the next check the client would be silent for too long.
_CHECK_S = 1.0
_LATE_S = 3.0
# After a stop the client has at least this long: it asks the batch system every 5 s whether the job goes on, and
# connects anew. Not longer: nothing of a dead client's run may be left after its grace and 10 s.
_FIND_S = 10.0
# Rank 0 ends the run, and answers at once. If it does not answer, it has been stopped.
_OBEY_S = 10.0
_CHECKING = "the check for the client's signs of life"


async def retire(scheduler: Scheduler, workers: Sequence[str]) -> list[str]:
    """Retire workers by address (``hpcgpu_retire``); return those that have left the cluster.

    They get no new tasks, sole replicas are moved elsewhere, then they close; the others hold data that no worker can
    take. distributed's ``retire_workers`` does the same, but checks only every 2 s whether the data has been moved (its
    active memory manager, 2026.8.0). A batch system may leave a cancelled job 5 s.
    """
    leaving = asyncio.create_task(scheduler.retire_workers(workers=list(workers), close_workers=True, remove=True))
    pushed = False
    while not (await asyncio.wait([leaving], timeout=_LOOK_S))[0]:
        amm = scheduler.extensions.get("amm")
        # only once: until the data has arrived, each run requests it again
        if not pushed and amm and amm.running and _is_copied(scheduler, workers):
            pushed = True
            amm.run_once()
    await leaving
    return [address for address in workers if address not in scheduler.workers]


def _is_copied(scheduler: Scheduler, workers: Sequence[str]) -> bool:
    going = {scheduler.workers[address] for address in workers if address in scheduler.workers}
    return all(set(ts.who_has or ()) - going for ws in going for ts in ws.has_what)


class LeaseServer:
    """Tells rank 0 that the client outside has been silent for ``grace_s``, or has said goodbye.

    Rank 0 ends the job, but not for silence alone: it first looks for a detachment file in the run's folder. A sign of
    life may be under way while another client detaches, and arrive later. A client that detaches before there is a
    scheduler only writes the file. ``woken`` is called when this process was stopped and continues; ``overdue`` when
    rank 0 was told to end the run and has not, after twice the grace or 10 s.
    """

    def __init__(
        self, grace_s: float, control: Control, woken: Callable[[], None], overdue: Callable[[], None]
    ) -> None:
        self._grace_s, self._control, self._woken, self._overdue = grace_s, control, woken, overdue
        self._heard = self._looked = time.monotonic()
        self._watched = self._detached = False
        # A plain timer, not a task: after a stop it must run before all else that is late, above all before the
        # scheduler's own look for silent workers (worker-ttl).
        self._timer = tasks.repeat(self._look, _CHECK_S, _CHECKING)

    def renew(self, goodbye: bool = False, detach: bool = False) -> str:
        """Handle a client's sign of life (``hpcgpu_lease``); ``goodbye``: end the job.

        ``detach``: the client may be silent until its next sign of life.
        """
        # _look may have set a later time after a stop, and a sign from before the stop is read only now
        self._heard = max(self._heard, time.monotonic())
        self._detached = detach
        if goodbye:
            self._tell("end", "the client said goodbye")
        return "OK"

    def watch(self, *, detached: bool) -> None:
        """Check for silence from now on, or from the next sign of life if the client has detached."""
        self._heard = self._looked = time.monotonic()
        self._watched, self._detached = True, detached
        self._timer.cancel()
        self._timer = tasks.repeat(self._look, _CHECK_S, _CHECKING)

    def close(self) -> None:
        """Stop checking."""
        self._timer.cancel()

    def _look(self) -> None:
        now, before, self._looked = time.monotonic(), self._looked, time.monotonic()
        if now - before > _CHECK_S + min(_LATE_S, self._grace_s / 4):
            self._heard = now + max(0.0, _FIND_S - self._grace_s)
            self._woken()
        if self._watched and not self._detached and now - self._heard >= self._grace_s:
            self._tell("silent", f"the client has not been heard from for {self._grace_s:g} s")

    def _tell(self, what: str, why: str) -> None:
        self._control.send(what, reason=why)
        self.close()
        limit_s = min(2 * self._grace_s, _OBEY_S)
        self._timer = tasks.repeat(self._overdue, limit_s, "the end of a run whose rank 0 does not answer")

"""The client's lease, on the scheduler's side."""

from __future__ import annotations

import time
from collections.abc import Callable

from hpcgpu.deploy.processes.control import Control
from hpcgpu.supervise import tasks

# The lease is looked at so often: when a look comes this much late, this process itself has been stopped
# (Slurm and PBS suspend jobs with SIGSTOP), and the signs of life of client and workers were stopped with it. With a
# short grace a short stop counts: the client would be silent for too long by the next look.
_LOOK_S = 1.0
_LATE_S = 3.0
# Then the client asks the batch system only every 5 s whether the job goes on, and connects anew. No more: of a dead
# client nothing is to be left after its grace and 10 s.
_FIND_S = 10.0
# Rank 0, which ends the run, answers at once; somebody has stopped one that does not.
_OBEY_S = 10.0


class LeaseServer:
    """The client outside must be heard from within ``grace_s``; a goodbye ends the job at once.

    Parameters
    ----------
    grace_s : float
        How long the client may be silent, in seconds.
    control : Control
        To rank 0.
    woken : callable
        Called when this process has been stopped and goes on.
    overdue : callable
        Called when rank 0 does not end the run that is to end, after twice the grace or 10 s.

    """

    def __init__(
        self, grace_s: float, control: Control, woken: Callable[[], None], overdue: Callable[[], None]
    ) -> None:
        self._grace_s, self._control, self._woken, self._overdue = grace_s, control, woken, overdue
        self._heard = self._looked = time.monotonic()
        self._watched = self._detached = False
        # A plain timer, not a task: it must come before whatever else is late, above all the scheduler's own look
        # for workers that were silent (worker-ttl).
        self._timer = tasks.repeat(self._look, _LOOK_S, "the look for the client's signs of life")

    def renew(self, goodbye: bool = False, detach: bool = False) -> str:
        """Handle a client's sign of life (``hpcgpu_lease``).

        Parameters
        ----------
        goodbye : bool
            The job is to end.
        detach : bool
            Nobody need be heard from, until somebody is.

        """
        # not earlier than what a stopped process was given: a sign from before the stop is read after it
        self._heard = max(self._heard, time.monotonic())
        self._detached = detach
        if goodbye:
            self._end("the client said goodbye")
        return "OK"

    def watch(self, *, detached: bool) -> None:
        """Let the job end when the client is silent from now on, or from its next sign of life if it has detached."""
        self._heard = time.monotonic()
        self._watched, self._detached = True, detached

    def close(self) -> None:
        """Look no more."""
        self._timer.cancel()

    def _look(self) -> None:
        now, before, self._looked = time.monotonic(), self._looked, time.monotonic()
        if now - before > _LOOK_S + min(_LATE_S, self._grace_s / 4):
            self._heard = now + max(0.0, _FIND_S - self._grace_s)
            self._woken()
        if self._watched and not self._detached and now - self._heard >= self._grace_s:
            self._end(f"the client has not been heard from for {self._grace_s:g} s")

    def _end(self, why: str) -> None:
        self._control.send("end", reason=why)
        self.close()
        limit_s = min(2 * self._grace_s, _OBEY_S)
        self._timer = tasks.repeat(self._overdue, limit_s, "the end of a run whose rank 0 does not answer")

"""The scheduler's side of its client's lease: rank 0 ends the job of a client that is silent."""

from __future__ import annotations

import os
import signal
import time

from distributed import Scheduler

from hpcgpu import supervise
from hpcgpu.deploy.processes.control import Control
from hpcgpu.host import log

# Interval of the checks, and how late one may come. If later, this process itself has been stopped (Slurm and PBS
# suspend jobs with SIGSTOP), and has read no sign of life. With a short grace a short stop counts, too.
_CHECK_S = 1.0
_LATE_S = 3.0
# After a stop the client has at least this long: it asks the batch system every 5 s whether the job goes on, and
# connects anew. Not longer: nothing of a dead client's run may be left after its grace and 10 s.
_FIND_S = 10.0
# Rank 0 ends the run, and answers at once. If it does not answer, it has been stopped.
_OBEY_S = 10.0
_CHECKING = "the check for the client's signs of life"


class LeaseServer:
    """Tells rank 0, which ends the job, that the client outside has been silent for ``grace_s``, or has said goodbye.

    Not for silence alone: rank 0 first looks for a detachment file in the run's folder. A sign of life may be under way
    while another client detaches, and a client that detaches before there is a scheduler only writes the file.
    """

    def __init__(self, scheduler: Scheduler, control: Control, grace_s: float, rank_pid: int) -> None:
        self._scheduler, self._control, self._grace_s, self._rank_pid = scheduler, control, grace_s, rank_pid
        self._heard = self._looked = time.monotonic()
        self._watched = self._detached = False
        # A plain timer, not a task: after a stop it must run before all else that is late, above all before the
        # scheduler's own look for silent workers (worker-ttl).
        self._timer = supervise.Ticker(self._look, _CHECK_S, _CHECKING)

    def renew(self, goodbye: bool = False, detach: bool = False) -> str:
        """Handle a sign of life (``hpcgpu_lease``), with which the client ends the job, or may be silent for long."""
        self._detached = detach
        # _look may have set a later time after a stop, and a sign from before the stop is read only now
        self._heard = max(self._heard, time.monotonic())
        if goodbye:
            self._tell("end", "the client said goodbye")
        return "OK"

    def watch(self, *, detached: bool) -> None:
        """Check for silence from now on, or from the next sign of life if the client has detached."""
        self._heard = self._looked = time.monotonic()
        self._watched, self._detached = True, detached
        self._timer.cancel()
        self._timer = supervise.Ticker(self._look, _CHECK_S, _CHECKING)

    def close(self) -> None:
        """Stop checking."""
        self._timer.cancel()

    def _look(self) -> None:
        now, before, self._looked = time.monotonic(), self._looked, time.monotonic()
        if now - before > _CHECK_S + min(_LATE_S, self._grace_s / 4):
            self._heard = now + max(0.0, _FIND_S - self._grace_s)
            for worker in self._scheduler.workers.values():
                worker.last_seen = time.time()  # else it counts as silent for the time of the stop (worker-ttl)
        if self._watched and not self._detached and now - self._heard >= self._grace_s:
            self._tell("silent", f"the client has not been heard from for {self._grace_s:g} s")

    def _tell(self, what: str, why: str) -> None:
        self._control.send(what, reason=why)
        self.close()
        limit_s = min(2 * self._grace_s, _OBEY_S)
        self._timer = supervise.Ticker(self._kill_rank_0, limit_s, "the end of a run whose rank 0 does not answer")

    def _kill_rank_0(self) -> None:
        """Kill rank 0, which does not end the run; its end is this process's end."""
        log.say(f"rank 0, process {self._rank_pid}, does not end the run, as if it had been stopped; it is killed")
        os.kill(self._rank_pid, signal.SIGKILL)

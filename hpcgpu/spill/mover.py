"""The thread that makes the moves that are due, so that whoever sets a value waits for none."""

from __future__ import annotations

import logging
import os
import threading
import time

from hpcgpu.spill.moves import Moves
from hpcgpu.spill.spill_log import SpillLog

logger = logging.getLogger("distributed.worker.memory")

# Right after a value was set, tasks and events still hold it (facts: a mover that looks once moves nothing).
_RETRY_S = 0.05
_JOIN_S = 20.0
# How often it is looked at how much memory the kernel has left, once something has moved.
_LOOK_S = 1.0


class Mover:
    """A thread that sleeps until a tier is above its limit."""

    def __init__(self, moves: Moves) -> None:
        self._moves, self._log = moves, SpillLog()
        self._due = threading.Condition()
        self._wanted, self._idle = False, True
        self._thread = threading.Thread(target=self._run, name="hpcgpu-mover", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Have a look now."""
        with self._due:
            self._wanted = True
            self._due.notify_all()

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way, due and possible; return whether that came in time."""
        if not self._thread.is_alive():
            return True
        self.wake()
        with self._due:
            return self._due.wait_for(lambda: self._idle and not self._wanted, timeout_s)

    def close(self, pid: int) -> None:
        """Stop after the move that is under way, and remove what is on disk; in the process that owns it."""
        if pid != os.getpid():  # a child that a task has forked
            return
        self._moves.stopped = True
        self.wake()
        # the garbage collector may call this in any thread, also in this one, or in one that holds what it waits for
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_S)

    def _note(self) -> None:
        if line := self._log.note(self._moves.tiers(), self._moves.counters, time.monotonic()):
            logger.info(line)

    def _run(self) -> None:
        while True:
            with self._due:
                wait_s = _RETRY_S if self._moves.is_over() else self._log.wait_s(time.monotonic())
                if self._moves.host_is_short:
                    wait_s = min(wait_s or _LOOK_S, _LOOK_S)
                self._due.wait_for(lambda: self._wanted, wait_s)
                self._wanted, self._idle = False, False
            while not self._moves.stopped and self._moves.relieve():
                self._note()
            self._note()
            with self._due:
                self._idle = True
                self._due.notify_all()
            if self._moves.stopped:
                self._moves.close()
                return

"""The spill thread: it makes the copies that nobody waits in, so that whoever sets a value waits for none."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from queue import Empty

from hpcgpu.model.backoff import Backoff
from hpcgpu.spill.state.units import HOST
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.store.inbox import become_spill_thread, there_now
from hpcgpu.spill.store.log import SpillLog
from hpcgpu.supervise import threads

logger = logging.getLogger("distributed.worker.memory")

_JOIN_S = 20.0
# How often it is looked at how much memory the kernel has left, and what has failed is tried again.
_LOOK_S = 1.0
# The part of the host tier that goes until it is measured again: values may take more or less than they say.
_SQUEEZE = 0.1
# Room that is used again within this time is not given back before: using it is faster than to get it anew.
_FREE_S = 2.0
# A round that failed is done again soon: meanwhile the tiers grow above their limits.
_BACKOFF = Backoff(first_s=0.05, longest_s=5.0)


class Spiller:
    """A thread that sleeps until the state machine wants a copy, and looks after memory that waits to be used again.

    GpuSpillBuffer makes it, which starts the thread. What is public may be called by any thread; :meth:`settle` and
    :meth:`close` wait for the spill thread.

    Attributes
    ----------
    host_is_short : callable or None
        Tells whether the kernel has little memory left for this process: what is kept to be used again goes back then.
        Called in the spill thread.

    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self._log = executor, SpillLog()
        self.host_is_short: Callable[[], bool] | None = None
        self._inbox = executor.inbox
        self._due = threading.Condition()
        self._idle = self._stops = self._begun = False
        self._squeezes, self._ticked_s = False, time.monotonic()
        self._above_target: Callable[[], int] | None = None
        self._excess_s: float | None = None  # since when there is too much of it
        self._loop = threads.keep(self._round, "the spill store's mover", pause=self._pause, backoff=_BACKOFF)

    def wake(self) -> None:
        """Have a look now."""
        self._inbox.put(None)

    def squeeze(self, above_target: Callable[[], int] | None) -> None:
        """Free host memory, a tenth at a time until ``above_target`` returns 0; without such a measure one tenth."""
        self._above_target, self._squeezes = above_target, True
        self.wake()

    @property
    def idle_bytes(self) -> int:
        """Host memory that is kept to be used again."""
        return self._executor.disk.idle_bytes + sum(memory.idle_bytes for memory in self._executor.page_locked())

    def trim(self) -> int:
        """Give that memory back to the system, which takes a moment; return the bytes."""
        return self._executor.disk.trim() + sum(memory.trim() for memory in self._executor.page_locked())

    def settle(self, timeout_s: float) -> bool:
        """Wait until nothing is under way, due and possible; return whether that came in time.

        Never while moving fails for another reason than a tier that takes nothing.
        """
        if not self._loop.is_alive():
            return self._stops
        self._executor.is_watched = True
        with self._due:
            self._idle = False
            self.wake()
            return self._due.wait_for(lambda: self._idle, timeout_s)

    def close(self, pid: int) -> None:
        """Stop after the copy that is under way, and remove what is on disk; in the process that owns it."""
        if pid != os.getpid():  # a child that a task has forked
            return
        self._executor.closed = True  # first: what is sent after the last look of the spill thread is given up
        self._stops = True
        self.wake()
        # the garbage collector may call this in any thread, also in this one, or in one that holds what it waits for
        self._loop.join(_JOIN_S)

    def _round(self) -> bool:
        """Sleep until something is due, and do it; return whether that was the last time."""
        if not self._begun:
            become_spill_thread(self._inbox)
            self._begun = True
        try:
            got = self._inbox.get(timeout=self._wait_s())
            while True:
                if got is not None:
                    owner, copy = got
                    (owner.give_up if self._stops else owner.copy)(copy)
                    self._note()
                got = self._inbox.get_nowait()
        except Empty:
            pass
        if self._stops:
            self._end()
            return True
        self._look()
        self._note()
        with self._due:
            self._idle = self._inbox.empty() and not self._executor.under_way
            self._due.notify_all()
        return False

    def _wait_s(self) -> float | None:
        wait_s = self._log.wait_s(time.monotonic())
        if self.host_is_short or self._executor.state.is_stuck or self._executor.disk.has_excess:
            wait_s = min(_LOOK_S if wait_s is None else wait_s, _LOOK_S)
        return wait_s

    def _look(self) -> None:
        """Do what is due beside copies."""
        executor = self._executor
        executor.disk.empty_bin()
        self._shrink()
        if self._squeezes:
            self._squeezes = False  # not later: it may be asked again meanwhile
            if self._squeeze():
                self._squeezes = True
        elif executor.wants_trim or (self.host_is_short and self.idle_bytes and self.host_is_short()):
            executor.wants_trim = False
            self.trim()
        if executor.state.is_stuck and time.monotonic() - self._ticked_s >= _LOOK_S:
            self._ticked_s = time.monotonic()
            executor.tell(executor.state.tick)

    def _squeeze(self) -> bool:
        """Free host memory, idle memory first; return whether to measure again when what goes is gone."""
        tiers, above_target = self._executor.state.tiers, self._above_target
        there = tiers.bytes.get(HOST, 0)
        step = int((there + self.idle_bytes) * _SQUEEZE) or there + self.idle_bytes
        freed = self.trim()
        over = min(step, above_target()) if above_target else step - freed
        if over <= 0:
            return False
        self._executor.tell(self._executor.state.shrink, HOST, over)
        return above_target is not None and (tiers.leaving.get(HOST, 0) > 0 or tiers.bytes.get(HOST, 0) < there)

    def _shrink(self) -> None:
        """Give back what has been free for a while: files take less, and memory that no tier counts."""
        disk, now_s = self._executor.disk, time.monotonic()
        if not disk.has_excess:
            self._excess_s = None
            return
        self._excess_s = now_s if self._excess_s is None else self._excess_s
        if now_s - self._excess_s >= _FREE_S:
            disk.shrink()
            if disk.has_excess:
                self.wake()  # copies come first

    def _note(self) -> None:
        if line := self._log.note(self._executor.tiers(), self._executor.counters, time.monotonic()):
            logger.info(line)

    def _end(self) -> None:
        executor = self._executor
        executor.give_up(*there_now(self._inbox))
        try:
            self._note()
            executor.leave_devices()
            executor.disk.close()
        except Exception:  # a device or a file server that does not answer: the next start removes the folder
            logger.exception("the spill store could not be closed, its folder may be left behind")

    def _pause(self, seconds: float) -> None:
        with self._due:
            self._due.wait_for(lambda: self._stops, seconds)

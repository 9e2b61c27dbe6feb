"""The spill thread: it makes the copies that no other thread makes, so that to set a value waits for no copy."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from queue import Empty

from hpcgpu.model.backoff import Backoff
from hpcgpu.spill.state.units import HOST
from hpcgpu.spill.storage.leaf_lock import LeafLock
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.store.inbox import become_spill_thread, drain
from hpcgpu.spill.store.log import SpillLog
from hpcgpu.supervise import threads

logger = logging.getLogger("distributed.worker.memory")

_JOIN_S = 20.0
# The interval at which failed copies are tried again, and the kernel's free memory is read.
_LOOK_S = 1.0
# The part of the host tier that goes before the next measurement: values may take more or less than their sizes say.
_SHRINK_PART = 0.1
# Free room is kept so long: to use it again is faster than to get new room.
_FREE_S = 2.0
# A round that failed is soon done again: meanwhile the tiers grow above their limits.
_BACKOFF = Backoff(first_s=0.05, longest_s=5.0)


class SpillThread:
    """A thread that sleeps until the state machine wants a copy, and gives back memory that is not used again.

    GpuSpillBuffer makes it, which starts the thread. Any thread may call its public methods; :meth:`settle` and
    :meth:`close` wait for the spill thread.

    Attributes
    ----------
    host_is_short : callable or None
        Returns whether the kernel has little memory left for this process: then memory that the store keeps is given
        back. Called in the spill thread.

    """

    def __init__(self, executor: Executor) -> None:
        self._executor, self._log = executor, SpillLog()
        self.host_is_short: Callable[[], bool] | None = None
        self._inbox = executor.inbox
        self._due = threading.Condition(LeafLock())
        self._idle = self._stops = self._begun = False
        self._shrink_requested, self._ticked_s = False, time.monotonic()
        self._above_target: Callable[[], int] | None = None
        self._excess_s: float | None = None  # the time since when there is an excess
        self._moved, self._moved_s = 0, math.inf  # the moves down from devices, and the time of the last one
        self._loop = threads.run_forever(self._round, "the spill thread", pause=self._pause, backoff=_BACKOFF)

    def wake(self) -> None:
        """Wake the thread, if there is a next round."""
        if not self._stops:
            self._inbox.put(None)

    def request_shrink(self, above_target: Callable[[], int] | None) -> None:
        """Ask to free host memory: a tenth at a time until ``above_target`` returns 0; without it, one tenth."""
        self._above_target, self._shrink_requested = above_target, True
        self.wake()

    @property
    def idle_bytes(self) -> int:
        """Host memory that waits to be used again."""
        return self._executor.disk.idle_bytes + sum(memory.idle_bytes for memory in self._executor.page_locked())

    def trim(self) -> int:
        """Give that memory back to the system, which takes a moment; return its bytes."""
        return self._executor.disk.trim() + sum(memory.trim() for memory in self._executor.page_locked())

    def settle(self, timeout_s: float) -> bool:
        """Wait until no move is under way or due; return whether that was in time.

        It is not while moves fail, unless since the tier below is full.
        """
        if not self._loop.is_alive():
            return self._stops
        self._executor.is_watched = True
        with self._due:
            self._idle = False
            self.wake()
            return self._due.wait_for(lambda: self._idle, timeout_s)

    def close(self, pid: int) -> None:
        """Stop after the copy under way, and remove what is on disk; a forked child does nothing."""
        if pid != os.getpid():  # a process that a task has forked
            return
        self._executor.closed = (
            True  # first: copies sent after the thread has read its inbox for the last time are given up
        )
        self._stops = True
        self._inbox.put(None)
        # the garbage collector may call this in any thread: in this one, or in one that holds what this one waits for
        self._loop.join(_JOIN_S)

    def _round(self) -> bool:
        """Sleep until something is due, and do it; return whether this was the last round."""
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
        goes_on = self.host_is_short or self._executor.state.is_stuck or self._executor.disk.has_excess
        if goes_on or self._moved_s < math.inf:
            wait_s = min(_LOOK_S if wait_s is None else wait_s, _LOOK_S)
        return wait_s

    def _look(self) -> None:
        """Do what is due besides copies."""
        executor = self._executor
        for each in executor.bins:
            each.empty_bin()
        self._shrink_free()
        self._give_back()
        if self._shrink_requested:
            self._shrink_requested = False  # before the work: it may be asked again meanwhile
            if self._shrink_host():
                self._shrink_requested = True
        elif executor.wants_trim or (self.host_is_short and self.idle_bytes and self.host_is_short()):
            executor.wants_trim = False
            self.trim()
        if executor.state.is_stuck and time.monotonic() - self._ticked_s >= _LOOK_S:
            self._ticked_s = time.monotonic()
            executor.tell(executor.state.tick)
        try:
            executor.free_unread()
        except Exception as e:
            executor.tell_of_lost_gpu(e)
            raise

    def _give_back(self) -> None:
        """Free device memory that libraries keep: at once where little is left, else a while after the last move."""
        moved, now_s = self._executor.counters["device_to_host"].number, time.monotonic()
        if moved != self._moved:
            self._moved, self._moved_s = moved, now_s
            self._executor.give_back(if_short=True)
        elif now_s - self._moved_s >= _FREE_S:
            self._moved_s = math.inf
            self._executor.give_back()

    def _shrink_host(self) -> bool:
        """Free host memory, idle memory first; return whether to measure again when the units have gone."""
        tiers, above_target = self._executor.state.accounting, self._above_target
        there = tiers.bytes.get(HOST, 0)
        step = int((there + self.idle_bytes) * _SHRINK_PART) or there + self.idle_bytes
        freed = self.trim()
        over = min(step, above_target()) if above_target else step - freed
        if over <= 0:
            return False
        self._executor.tell(self._executor.state.shrink, HOST, over)
        return above_target is not None and (tiers.leaving.get(HOST, 0) > 0 or tiers.bytes.get(HOST, 0) < there)

    def _shrink_free(self) -> None:
        """Give back room in files, and memory that no tier counts, once they have been free for a while."""
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
        executor.give_up(*drain(self._inbox))
        try:
            self._note()
            executor.detach_devices()
            executor.disk.close()
        except Exception:  # a device or a file server does not answer: the next start removes the folder
            logger.exception("the spill store could not be closed, its folder may be left behind")

    def _pause(self, seconds: float) -> None:
        with self._due:
            self._due.wait_for(lambda: self._stops, seconds)

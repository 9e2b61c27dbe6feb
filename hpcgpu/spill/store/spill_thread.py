"""The thread of a store that copies units down above a limit, and up ahead of tasks, and frees idle memory."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from queue import Empty

from hpcgpu.model.waits import Backoff
from hpcgpu.spill.state.instructions import HOST
from hpcgpu.spill.storage.lock import LeafLock
from hpcgpu.spill.store.executor import Executor
from hpcgpu.spill.store.inbox import drain, this_thread
from hpcgpu.spill.store.reports import SpillLog
from hpcgpu.supervise import ThreadLoop

logger = logging.getLogger("distributed.worker.memory")
_JOIN_S = 20.0
# The interval at which failed copies are tried again, and the kernel's free memory is read.
_LOOK_S = 1.0
# The part of the host tier that goes before the next measurement: values may take more or less memory than their sizes.
_SHRINK_PART = 0.1
# How long free room is kept: to use it again is faster than to get new room.
_FREE_S = 2.0
# The pauses after failed rounds are short: meanwhile the tiers grow above their limits.
_BACKOFF = Backoff(first_s=0.05, longest_s=5.0)


class SpillThread:
    """A thread that makes ordered copies and gives back unused memory; any thread may call its public methods."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._log = executor, SpillLog()
        self.host_is_short: Callable[[], bool] | None = None
        self._due = threading.Condition(LeafLock())
        self._idle = False
        self._shrink_requested, self._ticked_s = False, time.monotonic()
        self._above_target: Callable[[], int] | None = None
        self._excess_s: float | None = None  # the beginning of an excess
        self._moved, self._moved_s = 0, math.inf  # the moves down from devices, and the time of the last one
        self._loop = ThreadLoop(self._round, "the spill thread", pause=time.sleep, backoff=_BACKOFF)

    def request_shrink(self, above_target: Callable[[], int] | None) -> None:
        """Ask to free host memory: a tenth at a time until ``above_target`` returns 0; without it, one tenth."""
        self._above_target, self._shrink_requested = above_target, True
        self._executor.wake()

    def settle(self, timeout_s: float) -> bool:
        """Wait until no move is under way, due or fails, unless the tier below is full; return if that was in time."""
        if not self._loop.is_alive():
            return self._executor.closed
        self._executor.is_watched = True
        with self._due:
            self._idle = False
            self._executor.wake()
            return self._due.wait_for(lambda: self._idle, timeout_s)

    def close(self, pid: int) -> None:
        """Stop after the copy under way, and remove the files; does nothing in a forked child."""
        if pid != os.getpid():  # a process that a task has forked
            return
        # first: copies that are sent after the thread has read its inbox for the last time are given up
        self._executor.closed = True
        self._executor.inbox.put(None)
        # the garbage collector may call this in the spill thread itself, or in a thread for which that waits
        self._loop.join(_JOIN_S)

    def _round(self) -> bool:
        """Sleep until work is due, and do it; return whether this was the last round."""
        this_thread.inbox, this_thread.spills = self._executor.inbox, True
        try:
            item = self._executor.inbox.get(timeout=self._wait_s())
            while True:
                if self._executor.has_excess:  # before copies: data takes its place
                    self._executor.trim_excess()
                if item is not None:
                    owner, copy = item
                    (owner.give_up if self._executor.closed else owner.copy)(copy)
                    self._note()
                item = self._executor.inbox.get_nowait()
        except Empty:
            pass
        if self._executor.closed:
            self._end()
            return True
        try:
            self._tidy_up()
        except Exception as e:
            self._executor.report_lost_gpu(e)
            raise
        self._note()
        with self._due:
            self._idle = self._executor.inbox.empty() and not self._executor.state.moves
            self._due.notify_all()
        return False

    def _wait_s(self) -> float | None:
        wait_s = self._log.wait_s(time.monotonic())
        is_due = self.host_is_short or self._executor.state.is_stuck or self._executor.disk.has_excess
        if is_due or self._moved_s < math.inf:
            wait_s = min(_LOOK_S if wait_s is None else wait_s, _LOOK_S)
        return wait_s

    def _tidy_up(self) -> None:
        """Do all due work but copies."""
        executor = self._executor
        for each in executor.bins:
            each.empty_bin()
        self._shrink_free()
        self._give_back()
        if self._shrink_requested:
            self._shrink_requested = False  # before the work: there may be a new request meanwhile
            self._shrink_requested = self._shrink_host() or self._shrink_requested
        elif executor.wants_trim or (self.host_is_short and self._executor.idle_bytes and self.host_is_short()):
            executor.wants_trim = False
            self._executor.trim()
        elif executor.wants_locks:
            executor.lock_ahead()
        if executor.state.is_stuck and time.monotonic() - self._ticked_s >= _LOOK_S:
            self._ticked_s = time.monotonic()
            executor.report(executor.state.tick)
        executor.free_unread()

    def _give_back(self) -> None:
        """Free device memory that libraries keep: at once if little is left, else a while after the last move."""
        moved, now_s = self._executor.counters["device_to_host"].number, time.monotonic()
        if moved != self._moved:
            self._moved, self._moved_s = moved, now_s
            self._executor.give_back(if_short=True)
        elif now_s - self._moved_s >= _FREE_S:
            self._moved_s = math.inf
            self._executor.give_back()

    def _shrink_host(self) -> bool:
        """Free host memory, idle memory first; return whether to measure again when the units have gone."""
        above_target, host_bytes = self._above_target, self._executor.state.usage(HOST).total
        step = int((host_bytes + self._executor.idle_bytes) * _SHRINK_PART) or host_bytes + self._executor.idle_bytes
        freed = self._executor.trim()
        over = min(step, above_target()) if above_target else step - freed
        if over <= 0:
            return False
        self._executor.report(self._executor.state.shrink, HOST, over)
        now = self._executor.state.usage(HOST)
        return above_target is not None and (now.leaving > 0 or now.total < host_bytes)

    def _shrink_free(self) -> None:
        """Give back room in files, and memory that no tier counts, a while after it became free."""
        disk, now_s = self._executor.disk, time.monotonic()
        if not disk.has_excess:
            self._excess_s = None
            return
        self._excess_s = now_s if self._excess_s is None else self._excess_s
        if now_s - self._excess_s >= _FREE_S:
            disk.shrink()
            if disk.has_excess:
                self._executor.wake()  # copies come first

    def _note(self) -> None:
        if line := self._log.note(self._executor.tiers(), self._executor.counters, time.monotonic()):
            logger.info(line)

    def _end(self) -> None:
        executor = self._executor
        executor.give_up(*drain(self._executor.inbox))
        try:
            self._note()
            executor.detach_devices()
            executor.disk.close()
        except Exception:  # a device or a file server does not answer
            logger.exception("the spill store could not be closed; its folder may stay until the next worker starts")

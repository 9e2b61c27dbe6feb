"""Detect tasks that wait in vain, and tell cluster objects; a deadline for the handshake of connections.

All workers have paused, because memory and disk are full, or no worker is left. distributed lets such tasks wait
forever and tells the client nothing (2026.8.0). Anyone who reaches a port can open a connection without a certificate.
"""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import math
import termios
import time
from collections.abc import Callable
from typing import Any

import dask
from dask.utils import parse_timedelta
from distributed import Scheduler, Status
from distributed.scheduler import WorkerStatusPlugin

from hpcgpu import supervise
from hpcgpu.deploy import compat
from hpcgpu.deploy.processes.control import Control
from hpcgpu.errors import JobError
from hpcgpu.host import host_memory, process
from hpcgpu.spill.distributed.trouble import TROUBLE
from hpcgpu.units import format_bytes

logger = logging.getLogger("distributed.hpcgpu")

_DEADLINE, _DEADLINE_S = "distributed.comm.timeouts.handshake", 10.0
# Each has an SSLSocket: 20,000 took 567 MiB, for good, and 55 s without any answer. Of 1,000 workers that join
# all at once more than 512 are unfinished for a moment, and a peer that is closed between TCP and TLS gets a ValueError
# (tornado 6.6), which distributed's Worker takes as its end.
_MOST = 4096
# After so many unfinished ones memory goes back: 9 KiB for each of 1,000 workers that join at once.
_BURST = 256
_SAY_S = 60.0
# The deadline has so many turns. One that is late by this part of it shows that this process was busy or stopped, and
# did not read from the peer: it does not count.
_TURNS, _LATE = 10, 0.25
_LOOKS = 12
# If the workers' memory shrinks by a larger fraction between two checks, the store still writes to disk.
_LESS = 0.01


def limit_handshakes() -> None:
    """Raise the limit of descriptors for this process and its forks; set a deadline to the listeners that it opens."""
    process.allow_open_files()
    compat.limit_handshakes(HandshakeDeadline(parse_timedelta(dask.config.get(_DEADLINE, _DEADLINE_S))))


class HandshakeDeadline:
    """Closes the connections of one process whose handshake takes too long; logs a failed one a minute.

    Of more than ``most`` unfinished ones it closes the oldest of the address that has the most, unless that has sent
    what this process has not read.
    """

    def __init__(self, deadline_s: float, most: int = _MOST) -> None:
        self._deadline_s, self._most, self._burst = deadline_s, most, min(most, _BURST)
        self._open: dict[Any, tuple[str, asyncio.TimerHandle]] = {}  # address and next turn, by stream
        self._of: dict[str, dict[Any, None]] = {}  # the same streams by address, the oldest first
        self._has_burst = False
        self._logged_s = -math.inf

    def begin(self, stream: Any, address: str) -> None:  # a stream of tornado
        """Start the deadline of a connection that was accepted."""
        self._wait(stream, address, _TURNS)
        self._of.setdefault(address, {})[stream] = None
        self._has_burst |= len(self._open) > self._burst
        if len(self._open) > self._most:
            oldest = next(iter(self._of[max(self._of, key=lambda address: len(self._of[address]))]))
            if oldest.closed() or not any(fcntl.ioctl(oldest.socket, termios.FIONREAD, bytes(4))):
                self.fail(oldest, f"more than {self._most} at the same time")
                oldest.close()

    def _wait(self, stream: Any, address: str, turns: int) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._deadline_s / _TURNS
        look = supervise.log_errors(self._look, "the deadline of a handshake", supervise.only_log)
        self._open[stream] = address, loop.call_at(due_s, look, stream, due_s, turns)

    def done(self, stream: Any) -> None:
        """Forget a connection whose handshake succeeded, or that is gone."""
        if stream not in self._open:
            return
        address, deadline = self._open.pop(stream)
        deadline.cancel()
        del self._of[address][stream]
        if not self._of[address]:
            del self._of[address]
        if self._has_burst and len(self._open) < self._burst / 2:
            self._has_burst = False
            trim = functools.partial(supervise.to_thread, host_memory.trim_heap)
            supervise.start(trim, "the return of memory after many connections", supervise.only_log)

    def fail(self, stream: Any, why: object) -> None:
        """Forget a connection whose handshake failed."""
        now_s = asyncio.get_running_loop().time()
        if stream in self._open and now_s - self._logged_s > _SAY_S:
            self._logged_s = now_s
            logger.warning("connections without a handshake: the last one from %s: %s", self._open[stream][0], why)
        self.done(stream)

    def _look(self, stream: Any, due_s: float, turns: int) -> None:
        turns -= asyncio.get_running_loop().time() - due_s <= _LATE * self._deadline_s / _TURNS
        if stream.closed():
            self.done(stream)
        elif turns:
            self._wait(stream, self._open[stream][0], turns)
        else:
            self.fail(stream, f"no handshake within {self._deadline_s:g} s")
            stream.close()


class StallDetector:
    """Checks whether tasks make progress, and fails the futures that wait when none has for ``patience_s``."""

    def __init__(
        self,
        scheduler: Scheduler,
        control: Control,  # for rank 0
        patience_s: float,
        none_come: Callable[[], bool] = lambda: False,  # asked while there are no workers: will none come?
    ) -> None:
        self._scheduler, self._control = scheduler, control
        self._patience_s, self._none_come = patience_s, none_come
        self._since_s: float | None = None  # without progress; the workers' memory of then
        self._memory_bytes = 0
        self.reason = ""  # as last reported
        self._loop = supervise.Loop(self._look, "the look for tasks that wait in vain")

    def close(self) -> None:
        """Stop checking."""
        self._loop.cancel()

    async def _look(self) -> None:
        await asyncio.sleep(self._patience_s / _LOOKS)
        memory_bytes = sum(w.metrics.get("memory", 0) for w in self._scheduler.workers.values())
        now_s = time.monotonic()
        if not self._is_stuck():
            self._since_s = None
            if self.reason:
                self._report("", "")
        elif self._since_s is None or memory_bytes < self._memory_bytes * (1 - _LESS):
            self._since_s, self._memory_bytes = now_s, memory_bytes
        elif not self.reason and now_s - self._since_s >= self._patience_s:
            self._tell()

    def _is_stuck(self) -> bool:
        workers = self._scheduler.workers.values()
        idle = all(w.status is Status.paused and not w.executing for w in workers) if workers else self._none_come()
        tasks_ = self._scheduler.tasks.values()
        return idle and any(t.state not in ("memory", "erred", "released", "forgotten") for t in tasks_)

    def _tell(self) -> None:
        short = "no worker is left, and none comes"
        reason = (
            f"{short}: tasks have waited for {self._patience_s:g} s in vain. Start another cluster, or do not retire "
            "workers that are needed"
        )
        if self._scheduler.workers:
            short = "all workers have paused"
            reason = (
                f"{short} for {self._patience_s:g} s, because their memory is full: {_shown(self._scheduler)}. "
                "Release unused data, or take more workers, memory (memory_limit), or room in local_directory"
            )
        self._scheduler.log_event("hpcgpu", {"action": "stalled", "reason": reason})
        compat.fail_futures(self._scheduler, JobError(reason), waiting=True)
        self._report(short, reason)

    def _report(self, short: str, reason: str) -> None:
        """Tell rank 0 and all cluster objects the reason of a stall; empty: tasks progress again."""
        self.reason = reason
        self._control.send("stalled", why=short, text=reason)
        for plugin in self._scheduler.plugins.values():
            if isinstance(plugin, ObjectStatusPlugin):
                plugin.bcomm.send(["stalled", reason])

    def subscribe(self, comm: Any) -> dict[str, Any]:
        """Handle ``subscribe_worker_status`` as distributed's scheduler does, for any number of cluster objects."""
        ObjectStatusPlugin(self._scheduler, comm)
        facts: dict[str, Any] = {**self._scheduler.identity(), "stalled": self.reason}
        for worker in facts["workers"].values():
            del worker["metrics"], worker["last_seen"]
        return facts


def _shown(scheduler: Scheduler) -> str:
    out = []
    for worker in sorted(scheduler.workers.values(), key=lambda w: str(w.name)):
        spilled = worker.metrics.get("spilled_bytes", {}).get("disk", 0)
        trouble = f" ({worker.metrics[TROUBLE]})" if worker.metrics.get(TROUBLE) else ""
        used, limit = format_bytes(worker.metrics.get("memory", 0)), worker.memory_limit
        most = f" of {format_bytes(limit)}" if limit else ""
        out.append(f"{worker.name} has {used}{most}, {format_bytes(spilled)} spilled{trouble}")
    more = f", and {len(out) - 4} more" if len(out) > 4 else ""
    return "; ".join(out[:4]) + more


class ObjectStatusPlugin(WorkerStatusPlugin):
    """Tells one cluster object which workers are registered."""

    def __init__(self, scheduler: Scheduler, comm: Any) -> None:  # distributed has no types
        # distributed's plugins for it all have one name: a second object would replace the first (2026.8.0)
        self.name = f"{WorkerStatusPlugin.name}-{id(comm)}"
        super().__init__(scheduler, comm)

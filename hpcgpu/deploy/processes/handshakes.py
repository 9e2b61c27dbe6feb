"""A deadline for the handshake of connections: anyone who reaches a port can open one without a certificate."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import logging
import math
import termios
from typing import Any

import dask
from dask.utils import parse_timedelta

from hpcgpu import supervise
from hpcgpu.deploy import compat
from hpcgpu.host import host_memory, process

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

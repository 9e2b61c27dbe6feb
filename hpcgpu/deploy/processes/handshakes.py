"""A deadline for the handshake of connections, which anyone who reaches a port can open without a certificate."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import dask
from dask.utils import parse_timedelta

from hpcgpu.deploy import compat
from hpcgpu.host import process
from hpcgpu.supervise import tasks

logger = logging.getLogger("distributed.hpcgpu")

_DEADLINE, _DEADLINE_S = "distributed.comm.timeouts.handshake", 10.0
_SAY_S = 60.0
# A timer that is so late shows that this process was busy or stopped, and did not read from the peer.
_LATE = 0.1


def limit() -> None:
    """Raise the limit of descriptors for this process and its forks; set a deadline to the listeners that it opens."""
    process.allow_open_files()
    compat.limit_handshakes(HandshakeDeadline(parse_timedelta(dask.config.get(_DEADLINE, _DEADLINE_S))))


class HandshakeDeadline:
    """Closes the connections of one process whose handshake takes too long; logs a failed one a minute."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._timers: dict[Any, asyncio.TimerHandle] = {}  # by stream
        self._addresses: dict[Any, str] = {}
        self._said_s = -math.inf

    def begin(self, stream: Any, address: str) -> None:  # a stream of tornado
        """Start the deadline of a connection that was accepted."""
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._deadline_s
        self._addresses[stream] = address
        expire = tasks.log_errors(self._expire, "the deadline of a handshake", tasks.only_log)
        self._timers[stream] = loop.call_at(due_s, expire, stream, due_s)

    def done(self, stream: Any) -> None:
        """Forget a connection whose handshake succeeded, or that is gone."""
        if timer := self._timers.pop(stream, None):
            timer.cancel()
            del self._addresses[stream]

    def fail(self, stream: Any, why: object) -> None:
        """Forget a connection whose handshake failed."""
        now_s = asyncio.get_running_loop().time()
        if stream in self._timers and now_s - self._said_s > _SAY_S:
            self._said_s = now_s
            logger.warning("connections without a handshake: the last one from %s: %s", self._addresses[stream], why)
        self.done(stream)

    def _expire(self, stream: Any, due_s: float) -> None:
        if stream.closed():
            self.done(stream)
        elif asyncio.get_running_loop().time() - due_s > _LATE * self._deadline_s:
            self.begin(stream, self._addresses[stream])
        else:
            self.fail(stream, f"no handshake within {self._deadline_s:g} s")
            stream.close()

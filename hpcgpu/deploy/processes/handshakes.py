"""Limit connections before their handshake, which anyone who reaches a port can open without a certificate.

They end at a deadline. Their number is limited: the process keeps descriptors for its own connections. The log counts
the failed ones once a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import struct
from typing import Any, NamedTuple

import dask
from dask.utils import parse_timedelta

from hpcgpu.deploy import compat
from hpcgpu.host import process
from hpcgpu.supervise import tasks

logger = logging.getLogger("distributed.hpcgpu")

_DEADLINE = "distributed.comm.timeouts.handshake"
_DEADLINE_S = 10.0
# Ticks of a deadline. A late tick counts as one: this process was stopped or busy, and did not read from the peers.
_TICKS = 10
_SAY_S = 60.0
# Each takes at most 70 KiB of the process. A peer that is turned away tries again (distributed.comm.core.connect).
_MOST = 1024
_RESET = struct.pack("ii", 1, 0)


def limit() -> None:
    """Raise the limit of descriptors for this process and its forks; limit the listeners that it will open."""
    process.allow_open_files()
    deadline_s = parse_timedelta(dask.config.get(_DEADLINE, _DEADLINE_S))
    compat.limit_handshakes(
        HandshakeLimiter(deadline_s, min(_MOST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
    )


class _Peer(NamedTuple):
    address: str
    due: int  # tick


class HandshakeLimiter:
    """Limits the time and the number of one process's handshakes.

    A peer has ``deadline_s``, counted while this process listens to it. At most ``most`` handshakes are under way; one
    more ends the oldest.
    """

    def __init__(self, deadline_s: float, most: int) -> None:
        self._deadline_s, self._most = deadline_s, most
        self._peers: dict[Any, _Peer] = {}  # by stream, in their order
        self._timer: tasks.Timer | None = None  # while there are peers
        self._ticks = 0
        self._failed, self._last = 0, ""
        self._quiet = False

    def begin(self, stream: Any, address: str) -> None:  # a stream of tornado
        """Add a connection that was accepted."""
        if len(self._peers) >= self._most:
            oldest = next(iter(self._peers))
            with contextlib.suppress(OSError):  # it ends with a reset, after which an honest peer tries again
                oldest.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self._end(oldest, "turned away for newer ones")
        self._peers[stream] = _Peer(address, self._ticks + _TICKS + 1)  # the next tick may come at once
        if not self._timer:
            self._timer = tasks.repeat(self._tick, self._deadline_s / _TICKS, "the end of handshakes")

    def done(self, stream: Any) -> None:
        """Remove a connection whose handshake succeeded, or that is gone."""
        self._peers.pop(stream, None)

    def fail(self, stream: Any, why: object) -> None:
        """Record a failed handshake; a connection that was ended here is recorded already."""
        if peer := self._peers.get(stream):
            self.done(stream)
            self._failed += 1
            self._last = f"{peer.address}: {why}"
            if not self._quiet:
                self._say()

    def _tick(self) -> None:
        self._ticks += 1
        while self._peers and (oldest := next(iter(self._peers.items())))[1].due <= self._ticks:
            if oldest[0].closed():
                self.done(oldest[0])
            else:
                self._end(oldest[0], f"no handshake within {self._deadline_s:g} s")
        if not self._peers and self._timer:
            self._timer.cancel()
            self._timer = None

    def _end(self, stream: Any, why: str) -> None:
        self.fail(stream, why)
        stream.close()

    def _say(self) -> None:
        """Log how many failed since the last time, then log nothing for a minute."""
        self._quiet = self._failed > 0
        if self._quiet:
            logger.warning("connections without a handshake: %d; the last one from %s", self._failed, self._last)
            self._failed = 0
            say = tasks.log_errors(self._say, "what is said of handshakes", tasks.only_log)
            asyncio.get_running_loop().call_later(_SAY_S, say)

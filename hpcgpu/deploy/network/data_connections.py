"""Connections for large frames, beside one of distributed: threads encrypt and copy them, and not the event loop.

A frame is cut into as many parts as there are connections. Each connection carries its parts in the order of the
messages, and nothing else: sizes go by the connection of distributed.

TLS shows who the peer is, and carries a key. Then AES-256-GCM of ``cryptography`` encrypts records of 1 MiB: those of
TLS have 16 KiB, each with its own call of the kernel (decision 28).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from selectors import EVENT_READ, EVENT_WRITE
from typing import TYPE_CHECKING

import numpy as np

from hpcgpu.supervise import ThreadLoop

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
_TAG_BYTES = 16
_MOST_THREADS = 4
_CALL_BYTES = 1 << 20  # sent by one call, or encrypted as one record

Done = Callable[[BaseException | None], object]


def thread_count() -> int:
    """Return how many threads of this process move frames: one for each of its cores, at most four."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


class Encrypted:
    """A socket that does not block, whose bytes both ways are encrypted in records by a key that no other one has.

    After a BlockingIOError the next call must be for the same bytes: a part of their record has gone or come.
    """

    def __init__(self, sock: socket.socket, key: bytes, *, dials: bool) -> None:
        self._socket, self._key, self.fileno = sock, key, sock.fileno
        # a number for each record, and another one for each side's
        self._sends, self._receives = itertools.count(dials, 2), itertools.count(not dials, 2)
        self._sending = self._receiving = memoryview(b"")
        self._received_bytes = 0

    @functools.cached_property
    def _cipher(self) -> AESGCM:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 60 ms, here in a thread

        return AESGCM(self._key)

    def send(self, part: memoryview) -> int:
        """Send the first record of ``part``, and return its size."""
        nbytes = min(part.nbytes, _CALL_BYTES)
        if not self._sending:
            self._sending = memoryview(self._cipher.encrypt(_nonce(self._sends), part[:nbytes], None))
        while self._sending:
            self._sending = self._sending[socket.socket.send(self._socket, self._sending) :]
        return nbytes

    def recv_into(self, part: memoryview) -> int:
        """Fill ``part`` with a record, and return its size; 0 at the end of the connection."""
        nbytes = min(part.nbytes, _CALL_BYTES)
        if not self._receiving:
            self._receiving, self._received_bytes = np.empty(nbytes + _TAG_BYTES, np.uint8).data, 0
        while rest := self._receiving[self._received_bytes :]:
            if not (moved := socket.socket.recv_into(self._socket, rest)):
                return 0
            self._received_bytes += moved
        from cryptography.exceptions import InvalidTag

        try:
            part[:nbytes] = self._cipher.decrypt(_nonce(self._receives), self._receiving, None)
        except InvalidTag as e:
            raise ConnectionAbortedError("bytes of a large frame were changed on their way") from e
        self._receiving = memoryview(b"")
        return nbytes


def _nonce(numbers: Iterator[int]) -> bytes:
    return next(numbers).to_bytes(12, "little")


class _Channel:
    """A socket that does not block, and what is to be received and sent by it, in order."""

    def __init__(self, sock: socket.socket | Encrypted) -> None:
        self.socket = sock
        self.jobs: dict[int, deque[tuple[memoryview, Done]]] = {EVENT_READ: deque(), EVENT_WRITE: deque()}
        self.events = 0  # for which the thread waits
        self.error: BaseException | None = None
        self.lock = threading.RLock()  # of a use of the socket; the garbage collector may close it inside

    def move(self, direction: int) -> None:
        """Do all jobs of a direction; raise if the socket is not ready for more, or broken."""
        jobs = self.jobs[direction]
        while jobs:
            part, done = jobs[0]
            with self.lock:
                if self.error:
                    raise self.error
                moved = self.socket.recv_into(part) if direction == EVENT_READ else self.socket.send(part[:_CALL_BYTES])
            if not moved:
                raise ConnectionResetError("the peer has closed a connection for large frames")
            if moved < part.nbytes:
                jobs[0] = part[moved:], done
            else:
                jobs.popleft()
                done(None)


class _Mover:
    """A thread that moves the bytes of its channels, and alone uses their sockets."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken = os.eventfd(0)
        self._selector.register(self._woken, EVENT_READ)
        self._requests: deque[Callable[[], object]] = deque()  # append and popleft are atomic
        ThreadLoop(self._round, "the thread that moves large frames", pause=time.sleep)

    def request(self, act: Callable[[], object]) -> None:
        """Let the thread call something."""
        self._requests.append(act)
        os.eventfd_write(self._woken, 1)

    def _round(self) -> None:
        for key, _ in self._selector.select():
            if key.data:
                self.move(key.data)
                continue
            os.eventfd_read(self._woken)
            while self._requests:
                self._requests.popleft()()

    def add(self, channel: _Channel, direction: int, part: memoryview, done: Done) -> None:
        """Receive or send a part after those before it."""
        channel.jobs[direction].append((part, done))
        self.move(channel)

    def move(self, channel: _Channel) -> None:
        """Move what can be moved without waiting; after an error let all of it fail."""
        events = 0
        for direction in channel.jobs:
            try:
                channel.move(direction)
            except BlockingIOError:
                events |= direction
            except Exception as e:  # the other channels go on
                channel.error = e
        with channel.lock:  # it may have been closed since
            self._wait_for(channel, 0 if channel.error else events)
        for jobs in channel.jobs.values() if channel.error else ():
            while jobs:
                jobs.popleft()[1](channel.error)

    def _wait_for(self, channel: _Channel, events: int) -> None:
        before, channel.events = channel.events, events
        if before and events:
            self._selector.modify(channel.socket, events, channel)
        elif events:
            self._selector.register(channel.socket, events, channel)
        elif before:
            self._selector.unregister(channel.socket)


@functools.cache
def movers() -> itertools.cycle[_Mover]:
    """Return the threads of this process, each as the next one."""
    return itertools.cycle([_Mover() for _ in range(thread_count())])


class DataConnections:
    """Connections for the large frames of one connection of distributed, whose event loop uses them."""

    def __init__(self, sockets: Iterable[socket.socket | Encrypted], close: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._channels = [(next(movers()), _Channel(sock)) for sock in sockets]
        self._close = close  # the sockets

    def send(self, frames: Iterable[memoryview]) -> asyncio.Future[None]:
        """Send frames, which must stay as they are until the peer has them."""
        return self._move(EVENT_WRITE, frames)

    def receive(self, frames: Iterable[memoryview]) -> asyncio.Future[None]:
        """Fill frames by what the peer sends."""
        return self._move(EVENT_READ, frames)

    def close(self) -> None:
        """Close all; what has not been moved fails."""
        channels, self._channels = self._channels, []
        for mover, channel in channels:
            with channel.lock:
                channel.error = channel.error or ConnectionAbortedError("the connection was closed")
            mover.request(functools.partial(mover.move, channel))
        if channels:
            self._close()

    def _move(self, direction: int, frames: Iterable[memoryview]) -> asyncio.Future[None]:
        moved, count = self._loop.create_future(), len(self._channels)
        parts = [
            (*self._channels[i], frame[frame.nbytes * i // count : frame.nbytes * (i + 1) // count])
            for frame in frames
            for i in range(count)
        ]
        left = len(parts)

        def done(error: BaseException | None) -> None:
            nonlocal left
            left -= 1
            if error and not moved.done():
                moved.set_exception(error)
            elif not left and not moved.done():
                moved.set_result(None)

        for mover, channel, part in parts:
            mover.request(functools.partial(mover.add, channel, direction, part, functools.partial(self._call, done)))
        if not parts:
            moved.set_exception(ConnectionAbortedError("the connection was closed"))
        return moved

    def _call(self, act: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act, *args)

"""Connections for large frames, beside one of distributed: threads encrypt and copy them, and not its event loop.

The large frames of a message are cut, as if they were one, into as many parts as there are connections. Each connection
carries its parts in the order of the messages, and nothing else: sizes go by the connection of distributed.

TLS shows who the peer is, and carries a key. Then AES-256-GCM of ``cryptography`` encrypts records of 1 MiB: those of
TLS have 16 KiB, each with its own call of the kernel (decision 28).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import socket
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import numpy as np

from hpcgpu.host.peer_memory import Spans
from hpcgpu.supervise import ThreadLoop

KEY_BYTES = 32
_TAG_BYTES = 16
_MOST_THREADS = 4
_RECORD_BYTES = 1 << 20


def thread_count() -> int:
    """Return how many threads of this process move frames: one for each of its cores, at most four."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


@functools.cache
def loops() -> itertools.cycle[asyncio.AbstractEventLoop]:
    """Return the event loops of these threads, each as the next one."""
    made = [asyncio.new_event_loop() for _ in range(thread_count())]
    for loop in made:
        ThreadLoop(loop.run_forever, "the thread that moves large frames", pause=time.sleep)
    return itertools.cycle(made)


_executor = functools.cache(lambda: ThreadPoolExecutor(thread_count(), "hpcgpu-copies"))


def in_thread(call: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    """Call in one of as many other threads: user code may keep all threads of an event loop busy for long."""
    return asyncio.get_running_loop().run_in_executor(_executor(), call, *args)


for made in (loops, _executor):
    os.register_at_fork(after_in_child=made.cache_clear)  # a child has none of these threads


def part_of(frames: Spans, i: int, count: int) -> Iterator[tuple[int, memoryview]]:
    """Yield what belongs to one of ``count`` equal parts of all bytes; each frame has an address, or 0."""
    total = sum(frame.nbytes for _, frame in frames)
    begin, end = total * i // count, total * (i + 1) // count
    for address, frame in frames:
        low, high = max(begin, 0), min(end, frame.nbytes)
        if low < high:
            yield address + low, frame[low:high]
        begin, end = begin - frame.nbytes, end - frame.nbytes


class Channel:
    """A connection, whose bytes one thread moves; for any thread.

    It has a copy of the socket ``connected``; ``key`` is for this connection alone, and empty for bytes that are not
    encrypted; ``dials``: this side has made the connection.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, dials: bool) -> None:
        self.socket = socket.socket(fileno=os.dup(connected.fileno()))
        self.socket.setblocking(False)
        self._key, self._loop, self._pid = key, next(loops()), os.getpid()
        # a number for each record, and another one for each side's
        self._sent, self._received = itertools.count(dials, 2), itertools.count(not dials, 2)
        self._sending, self._receiving = asyncio.Lock(), asyncio.Lock()

    def send(self, part: Iterable[memoryview]) -> Future[None]:
        """Send bytes, which must stay as they are until the peer has them."""
        return self._start(self._send(part))

    def receive(self, part: Iterable[memoryview]) -> Future[None]:
        """Fill ``part`` by what the peer sends."""
        return self._start(self._receive(part))

    def close(self) -> None:
        """Let all fail that has not been moved, and close; in a forked child close its copy alone."""
        if os.getpid() != self._pid:
            self.socket.close()
            return
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._start(self._close())

    def _start(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    @property
    def _cipher(self) -> Any:  # cryptography's AESGCM; 2 us, where a cached property has a lock, which a fork may copy
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 60 ms, here in a thread

        return AESGCM(self._key)

    async def _send(self, part: Iterable[memoryview]) -> None:
        async with self._sending:
            for record, buffer in self._records(part):
                await self._loop.sock_sendall(self.socket, self._sealed(record, buffer) if self._key else record)

    async def _receive(self, part: Iterable[memoryview]) -> None:
        async with self._receiving:
            for record, buffer in self._records(part):
                rest = sealed = buffer[: record.nbytes + _TAG_BYTES] if self._key else record
                while rest:
                    moved = await self._loop.sock_recv_into(self.socket, rest)
                    if not moved:
                        raise ConnectionResetError("the peer has closed a connection for large frames")
                    rest = rest[moved:]
                if self._key:
                    self._open(sealed, record)

    def _records(self, part: Iterable[memoryview]) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield each record, and memory for it: new memory for each would cost more than its encryption."""
        buffer, nbytes = np.empty(0, np.uint8).data, _RECORD_BYTES if self._key else 1 << 62
        for frame in part:
            for record in (frame[start : start + nbytes] for start in range(0, frame.nbytes, nbytes)):
                if self._key and buffer.nbytes < record.nbytes + _TAG_BYTES:
                    buffer = np.empty(record.nbytes + _TAG_BYTES, np.uint8).data
                yield record, buffer

    def _sealed(self, record: memoryview, buffer: memoryview) -> memoryview:
        nonce, sealed = next(self._sent).to_bytes(12, "little"), buffer[: record.nbytes + _TAG_BYTES]
        if hasattr(cipher := self._cipher, "encrypt_into"):  # from cryptography 47 on
            cipher.encrypt_into(nonce, record, None, sealed)
        else:
            sealed[:] = cipher.encrypt(nonce, record, None)
        return sealed

    def _open(self, sealed: memoryview, record: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        nonce = next(self._received).to_bytes(12, "little")
        try:
            if hasattr(cipher := self._cipher, "decrypt_into"):
                cipher.decrypt_into(nonce, sealed, None, record)
            else:
                record[:] = cipher.decrypt(nonce, sealed, None)
        except InvalidTag as e:
            raise ConnectionAbortedError("bytes of a large frame were changed on their way") from e

    async def _close(self) -> None:
        async with self._sending, self._receiving:
            self.socket.close()


class DataConnections:
    """Connections for the large frames of one connection of distributed, whose event loop uses them."""

    def __init__(self, channels: list[Channel]) -> None:
        self.channels = channels

    def send(self, frames: Spans) -> asyncio.Future[Any]:
        """Send frames, which must stay as they are until the peer has them."""
        return self._move(Channel.send, frames)

    def receive(self, frames: Spans) -> asyncio.Future[Any]:
        """Fill frames by what the peer sends."""
        return self._move(Channel.receive, frames)

    def close(self) -> None:
        """Close all; what has not been moved fails."""
        for channel in self.channels:
            channel.close()

    def _move(self, act: Callable[[Channel, Iterable[memoryview]], Future[None]], frames: Spans) -> Any:
        # the channel's thread cuts its part, which takes long of thousands of frames
        parts = (map(itemgetter(1), part_of(frames, i, len(self.channels))) for i in range(len(self.channels)))
        return asyncio.gather(*(asyncio.wrap_future(act(*each)) for each in zip(self.channels, parts, strict=True)))

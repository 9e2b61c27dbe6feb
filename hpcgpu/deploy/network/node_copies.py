"""Connections of distributed whose large frames cross a node by one copy of the kernel, beside TLS or TCP.

Each side's handshake names its process, with a challenge. A side that finds its answer in the memory of the other one
grants it to lend: from then on the large frames of the other side are lent. The connection, encrypted as before, has
their addresses. The receiver copies them and returns a word, and the sender lets them go. No message goes before both
sides have granted or refused: the first one may be large, such as a value that is scattered.

Where no memory can be read, such as between nodes, large frames of 1 MiB together are cut, and go by data connections.
The side that made the connection makes them as soon as one side has had such a message. All other frames go by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import hmac
import itertools
import logging
import secrets
import struct
import traceback
import weakref
from collections.abc import Callable, Mapping
from ssl import SSLError, SSLSocket
from typing import Any, NoReturn

import numpy as np
from distributed.comm import tcp
from distributed.comm.core import CommClosedError, connect
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.utils import pack_frames_prelude, unpack_frames
from distributed.utils import ensure_memoryview
from distributed.utils import nbytes as nbytes_of
from tornado.gen import coroutine
from tornado.iostream import IOStream, StreamClosedError

from hpcgpu import supervise
from hpcgpu.deploy.network import data_connections, framing
from hpcgpu.deploy.network.data_connections import KEY_BYTES, Channel, DataConnections, in_thread, thread_count
from hpcgpu.deploy.network.framing import CUT_BYTES, LOOP_FRAMES, SMALL_BYTES, THRESHOLD_BYTES, Word
from hpcgpu.host import peer_memory
from hpcgpu.host.peer_memory import Identity, Spans

logger = logging.getLogger("distributed.hpcgpu")
KEY, DATA_KEY = "hpcgpu-memory-3", "hpcgpu-data-3"  # in the handshake; before 2026-11-29 with 2
PACKED = Word.PACKED.value  # Python 3.11 takes 0.1 us for each attribute of an Enum
LOOP_BYTES = 512 * 1024  # at most so much is copied on the event loop, in about 0.1 ms; a thread costs as much
PART_BYTES = 4 << 20  # at least so much is copied by each of several threads
_LENT_S = 30.0  # after a close; as long as distributed's connection outlives a silent peer
_CLOSE_S = 1.0  # who closes waits no longer; what is lent stays lent meanwhile
_slots = peer_memory.Slots()
_numbers = itertools.count()
_in_pools: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # data connections of each
_by_number: weakref.WeakValueDictionary[str, NodeTCP] = weakref.WeakValueDictionary()  # begins its token


class ThisProcess:
    """The part of this process in copies within its node."""

    def __init__(self) -> None:
        self.adopted = False  # its connections are of this kind
        self.allowed = True  # node_copies
        # Returns memory for a frame; a worker sets its store's pool, whose pages have been used before.
        self.allocate: Callable[[int], np.ndarray] = functools.partial(np.empty, dtype=np.uint8)
        # Tells whether an array is page-locked memory of a GPU's driver; a worker sets the function of its store.
        self.is_page_locked: Callable[[np.ndarray], bool] = lambda _: False
        self.copied_bytes = self.cut_bytes = 0  # from peers, by reading their memory and by data connections
        self.refusals: set[str] = set()  # rules by which it cannot read the memory of peers on its node

    def obstacle(self) -> str:
        """Return why large values come by the connection; "" if they are copied."""
        if not (self.adopted and self.allowed):
            return "node_copies=False" if self.adopted else "the protocol is neither tls nor tcp"
        return "" if self.copied_bytes else ", ".join(sorted(self.refusals)) or peer_memory.obstacle()


this_process = ThisProcess()


def _in_locked_pages(frame: Any) -> bool:
    owner = getattr(frame, "obj", None)  # bytes have none
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    return isinstance(owner, np.ndarray) and frame.nbytes >= SMALL_BYTES and this_process.is_page_locked(owner)


def _readable(frame: memoryview) -> memoryview:
    """Return the frame, or a copy if it is in page-locked memory that other processes cannot read.

    NVIDIA's kernel module 525.89 maps host memory as VM_IO, which the kernel copies for no one; 570.124 and 575.64 do
    not (nvidia/nv-mmap.c). A copy takes a fifth of the CPU time of TLS.
    """
    if not _in_locked_pages(frame) or peer_memory.are_readable([(framing.address_of(frame), frame.nbytes)]):
        return frame
    out = this_process.allocate(frame.nbytes)
    np.copyto(out, np.frombuffer(frame, np.uint8))
    return out.data


def _layout(way: Word, frames: list[Any]) -> framing.Layout:
    parts = [ensure_memoryview(f) for f in frames]
    return framing.layout(way, [_readable(f) for f in parts] if way == Word.LENT else parts)


async def _copy(peer: Identity, lent: Spans, answer: bytes) -> None:
    """Copy, more than a little with each core: one reads 7 GiB/s where two read 13 (AMD EPYC, 2 cores, 2026-11-27)."""
    nbytes = sum(out.nbytes for _, out in lent)
    if nbytes <= LOOP_BYTES:
        peer.copy(lent, answer)
        return
    count = max(1, min(thread_count(), nbytes // PART_BYTES))
    parts = (data_connections.part_of(lent, i, count) for i in range(count))  # each thread lists its own
    await asyncio.gather(*(in_thread(peer.copy, part, answer) for part in parts))


class _Lender:
    """The memory of both ends of a connection: how its large frames go, and which the peer has not returned."""

    def __init__(self) -> None:
        self.slot = 0  # of this end
        self.peer: Identity | None = None  # of the same host
        self.answer = b""  # what the peer's slot has as long as its memory may be read
        self.granted = False  # the peer can read this process's memory
        self.data: DataConnections | None = None
        self.peer_has_data = False  # it receives by data connections
        self.permits: list[tuple[asyncio.AbstractEventLoop, Any]] = []  # of a pool of distributed
        # An Event or a deque takes 0.7 KiB: of most connections of a scheduler neither is used.
        self.ended: asyncio.Event | None = None  # of its data connections
        self.frames: list[list[memoryview]] = []  # of each message

    @property
    def way(self) -> Word:
        """How large frames go: lent, cut or inline."""
        if self.granted:
            return Word.LENT
        return Word.CUT if self.data and self.peer_has_data else Word.INLINE

    def hide(self) -> None:
        """Clear the slot: a copy that is not over now fails."""
        slot, self.slot, self.granted = self.slot, 0, False
        if slot:
            _slots.free(slot)

    def end(self) -> None:
        """Let all frames go, and a pool make other connections."""
        self.hide()
        self.peer_has_data = False
        if self.data:
            self.data.close()
        self.give_back()
        if self.ended:
            self.ended.set()
        self.frames.clear()

    def give_back(self) -> None:
        """Let the pool make as many connections as its data connections were, from any thread."""
        while self.permits:
            loop, pool = self.permits.pop()
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(pool.semaphore.release)
            _in_pools[pool] -= 1


def _end(closed: weakref.ref[NodeTCP], lender: _Lender) -> None:
    """Note that a connection was closed, by this side or the peer."""
    if comm := closed():
        comm._is_over = True
    lender.end()


class NodeTCP(tcp.TCP):
    """A connection of distributed that lends large frames to a peer."""

    _is_over = False

    def __init__(self, *args: Any, dials: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._dials = dials  # this side has made the connection
        self._expected: frozenset[Word] = frozenset({Word.PLAIN})  # the words that the peer may send
        self._greeting: asyncio.Task[None] | None = None
        self._dialing: asyncio.Task[None] | None = None
        self._wants_data = False
        self._token = ""  # of its data connections; the peer alone has it
        self._joined: dict[int, NodeTCP] = {}  # data connections that have come, by their number
        self._lender = lender = _Lender()
        self._reading = asyncio.Lock()
        weakref.finalize(self, lender.end).atexit = False
        self.stream.set_close_callback(functools.partial(_end, weakref.ref(self), lender))

    def handshake_info(self) -> dict[str, Any]:
        """Name this process and connection to the peer, in addition to distributed's terms."""
        self._token = f"{(number := next(_numbers))}-{secrets.token_hex(16)}"
        _by_number[str(number)] = self
        info = {**super().handshake_info(), DATA_KEY: {"token": self._token, "threads": thread_count()}}
        if this_process.allowed and peer_memory.host() and (slot := _slots.take()):
            self._lender.slot = slot
            info[KEY] = Identity.of_this_process(slot)._asdict()
        return info

    def handshake_configuration(self, local: dict[str, Any], remote: dict[str, Any]) -> dict[str, Any]:
        """Answer the peer's challenge if it is on this host; then do as distributed."""
        lender, here, peer = self._lender, Identity.parse(local.get(KEY)), Identity.parse(remote.pop(KEY, None))
        ways = [info.get(DATA_KEY) for info in (local, remote)]
        if self.stream and all(isinstance(way, Mapping) and "of" not in way for way in ways):
            framing.write_in_turns(self.stream)
            self._expected = framing.FIRST if self._dials else framing.FIRST - {Word.WANT_DATA}
            if here and peer and here.host == peer.host:
                try:
                    ends = [str(end()[:2]) for end in (self.stream.socket.getsockname, self.stream.socket.getpeername)]
                except OSError as e:  # the peer has gone
                    self._fail(e)
                lender.peer, lender.answer = peer, peer_memory.answer_to(here.challenge, *reversed(ends))
                _slots.write(lender.slot, peer_memory.answer_to(peer.challenge, *ends))
                self._expected |= {Word.ANSWER, Word.GRANT, Word.REFUSE}
                greet = functools.partial(self._greet, self.stream)
                self._greeting = supervise.start(greet, "a greeting within the node", lambda _: self.abort())
        if not lender.peer:
            lender.hide()
        return tcp.TCP.handshake_configuration(local, remote)

    async def _greet(self, stream: IOStream) -> None:
        """Answer, then read the peer's first words: the answer to the challenge, and whether it grants."""
        with contextlib.suppress(OSError):  # who reads or writes sees the end
            stream.write(framing.word(Word.ANSWER))
            async with self._reading:
                while self._expected & {Word.ANSWER, Word.GRANT}:
                    if await self._step() is not None:
                        self._fail(OSError("its first words are no answer, and neither a grant nor a refusal"))

    def closed(self) -> bool:
        """Return whether this side or the peer has closed it; the scheduler asks for each pair of workers."""
        return self._is_over or self.stream is None

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        """Write a message; its large frames are lent, or cut, as soon as the peer has granted it."""
        if self._greeting and not self._greeting.done():
            await asyncio.wait([self._greeting])
        if self._is_over or (stream := self.stream) is None:
            raise CommClosedError
        if PACKED not in self._expected:
            return int(await super().write(msg, serializers=serializers, on_error=on_error))
        info = {"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options}
        options = {"serializers": serializers, "on_error": on_error, "frame_split_size": 1 << 62}  # none is split
        frames = await to_frames(msg, allow_offload=self.allow_offload, context=info, **options)
        try:
            few = len(frames) <= LOOP_FRAMES
            if few and (nbytes := sum(map(nbytes_of, frames))) < THRESHOLD_BYTES:
                prelude = pack_frames_prelude(frames)
                stream.write(b"".join((framing.word(Word.PACKED, nbytes + len(prelude)), prelude, *frames)))
                return nbytes
            way = self._lender.way
            is_quick = few and not (way == Word.LENT and any(map(_in_locked_pages, frames)))
            way, large, pieces, nbytes = _layout(way, frames) if is_quick else await in_thread(_layout, way, frames)
            if self.closed():
                self._fail(CommClosedError())
            if large:
                self._lender.frames.append(large)
            for piece in pieces:  # at once, so nothing comes between: as distributed does (2025.4 to 2026.8.0)
                stream._write_buffer.append(piece)
                stream._total_write_index += len(piece)
            stream.write(b"")
            if way == Word.CUT and self._lender.data:
                sending = self._lender.data.send([(0, f) for f in large])
                sending.add_done_callback(lambda sent: self.abort() if sent.cancelled() or sent.exception() else None)
            if way == Word.INLINE and nbytes >= CUT_BYTES and not self._lender.granted:
                self._want_data(stream)
        except BaseException as e:
            self._fail(e)
        return nbytes

    def _want_data(self, stream: IOStream) -> None:
        """Once: let the side that made the connection make data connections."""
        terms = self.remote_info.get(DATA_KEY)
        if self._wants_data or not isinstance(terms, Mapping):
            return
        self._wants_data = True
        if not self._dials:
            stream.write(framing.word(Word.WANT_DATA))
        elif isinstance(token := terms.get("token"), str) and type(threads := terms.get("threads")) is int:
            count = max(1, min(threads, thread_count()))
            self._dialing = supervise.start(
                lambda: self._dial(stream, token, count), "making data connections", lambda _: self.abort()
            )

    async def _dial(self, stream: IOStream, token: str, count: int) -> None:
        """Make data connections; where that fails, large frames go on by this connection."""
        count = await self._count_in_pool(count)
        tls = {"ssl_context": "context", "server_hostname": "server_hostname"}
        options = {name: value for name, of in tls.items() if (value := getattr(stream.socket, of, None))}
        common = {"of": token, "count": count}
        terms = [{**common, "number": i, "key": secrets.token_bytes(KEY_BYTES)} for i in range(count)]
        dialed = (connect(self.peer_address, handshake_overrides={DATA_KEY: each}, **options) for each in terms)
        comms = await asyncio.gather(*dialed, return_exceptions=True)
        made = [comm for comm in comms if isinstance(comm, NodeTCP)]
        if count and len(made) == count and not self.closed():
            self._use(stream, made)
            return
        for comm in made:
            comm.abort()
        self._lender.give_back()
        if reasons := {str(e) or repr(e) for e in comms if isinstance(e, BaseException)}:
            text = "large values to and from %s go by one connection, as more cannot be made: %s"
            logger.warning(text, self.peer_address, "; ".join(sorted(reasons)))

    async def _count_in_pool(self, count: int) -> int:
        """Return how many data connections may be made; those of a pool of distributed take up to half of its limit."""
        if (pool := getattr(self, "_pool", lambda: None)()) is None:
            return count
        lender, most = self._lender, pool.limit // 2 - _in_pools.get(pool, 0)
        while len(lender.permits) < min(count, most) and not pool.semaphore.locked():
            await pool.semaphore.acquire()  # at once
            lender.permits.append((asyncio.get_running_loop(), pool))
        _in_pools[pool] = _in_pools.get(pool, 0) + len(lender.permits)
        return len(lender.permits)

    def _join(self, terms: Mapping[str, Any]) -> asyncio.Event:
        """Be a data connection of the connection with the token of ``terms``; return the event of its end."""
        number, count, token, key = terms.get("number"), terms.get("count"), str(terms.get("of")), terms.get("key")
        owner, has_key = _by_number.get(token.partition("-")[0]), isinstance(key, bytes) and len(key) == KEY_BYTES
        if not (has_key and type(number) is type(count) is int and 0 <= number < count <= thread_count()) or (
            owner is None
            or not hmac.compare_digest(token.encode(), owner._token.encode())
            or (stream := owner.stream) is None
            or owner._is_over
            or owner._lender.data
            or number in owner._joined
        ):
            raise CommClosedError(f"data connection {number} of {count} belongs to no connection")
        owner._joined[number] = self
        if all(i in owner._joined for i in range(count)):
            owner._use(stream, [owner._joined.pop(i) for i in range(count)])
        owner._lender.ended = owner._lender.ended or asyncio.Event()
        return owner._lender.ended

    def _use(self, stream: IOStream, comms: list[NodeTCP]) -> None:
        """Receive large frames by data connections from now on, and tell the peer."""
        if any(comm.stream is None for comm in comms):
            return
        channels = []
        for comm in comms:
            key = (comm.local_info if comm._dials else comm.remote_info)[DATA_KEY].pop("key")
            is_tls = isinstance(comm.stream.socket, SSLSocket)
            channels.append(Channel(comm.stream.socket, key if is_tls else b"", dials=comm._dials))
            comm.abort()  # the channel has a copy of the socket, which distributed and tornado do not touch again
        self._lender.data = DataConnections(channels)
        self._expected |= {Word.CUT}
        stream.write(framing.word(Word.HAVE_DATA))

    async def read(self, deserializers: Any = None) -> Any:
        """Read a message, and copy what the peer lends."""
        frames, terms = None, self.remote_info.get(DATA_KEY)
        if not self._dials and isinstance(terms, Mapping) and "of" in terms:
            try:
                await self._join(terms).wait()
            finally:
                self.abort()
            raise CommClosedError("a data connection has ended")
        while frames is None:
            async with self._reading:
                frames = await self._step()
        try:
            return await from_frames(
                frames, deserialize=self.deserialize, deserializers=deserializers, allow_offload=self.allow_offload
            )
        except EOFError as e:
            self.abort()
            raise CommClosedError("aborted stream on truncated data") from e

    async def _step(self) -> list[Any] | None:
        """Read a word, and the message that it begins; None if it begins none."""
        if (stream := self.stream) is None or (self._is_over and not self._lender.frames):
            raise CommClosedError
        try:
            (word,) = framing.WORD.unpack(await stream.read_bytes(framing.WORD.size))
            kind, value = word >> 56, word & framing.VALUE
            if kind == PACKED and kind in self._expected and value < 2 * THRESHOLD_BYTES:  # as most
                frames = unpack_frames(await stream.read_bytes(value))
                return [memoryview(bytearray(f)) for f in frames]  # each can be freed alone
            return await self._receive(stream, kind, value)
        except BaseException as e:
            self._fail(e)

    async def _receive(self, stream: IOStream, kind: int, value: int) -> list[Any] | None:
        """Return the frames of a message; None for a word that is no message."""
        if kind not in self._expected - {PACKED} or (kind == Word.RETURN and not self._lender.frames):
            raise OSError(f"a word of kind {kind} with {value}")
        word = Word(kind)
        over, coming = framing.AFTER.get(word, ((), ()))
        self._expected = self._expected.difference(over).union(coming) if over else self._expected
        if word == Word.PLAIN:
            frames, sizes = unpack_frames(await tcp.read_bytes_rw(stream, value), partial=True)
            return [*frames, *[await tcp.read_bytes_rw(stream, nbytes) for nbytes in sizes]]
        if word in (Word.INLINE, Word.LENT, Word.CUT):
            return await self._take(stream, word, value)
        if word == Word.ANSWER:
            self._check(stream)
        elif word in (Word.GRANT, Word.REFUSE):
            self._lender.granted = word == Word.GRANT
        elif word == Word.RETURN:
            self._lender.frames.pop(0)
        elif word == Word.WANT_DATA:
            self._want_data(stream)
        else:
            self._lender.peer_has_data = True
        return None

    def _check(self, stream: IOStream) -> None:
        """Find out whether the peer's memory can be read, and tell it."""
        if refusal := self._lender.peer.refusal(self._lender.answer) if self._lender.peer else peer_memory.ELSEWHERE:
            this_process.refusals |= {refusal} - {peer_memory.ELSEWHERE, peer_memory.ENDED}
            self._expected -= {Word.LENT}
        stream.write(framing.word(Word.REFUSE if refusal else Word.GRANT))

    async def _take(self, stream: IOStream, way: Word, count: int) -> list[memoryview]:
        """Return the frames of a message: those without an address come next in the stream."""
        if not 0 < count <= framing.MOST_BYTES // framing.FRAME_BYTES:
            raise OSError(f"a message of {count} frames")
        table = np.frombuffer(await tcp.read_bytes_rw(stream, count * framing.FRAME_BYTES), np.uint64).reshape(-1, 2)
        if (table >= 1 << 62).any() or (way == Word.INLINE and table[:, 0].any()):
            raise OSError("a frame that no memory holds, or an address that means nothing")
        frames: list[memoryview] = []
        lent: list[tuple[int, memoryview]] = []
        for start in range(0, count, LOOP_FRAMES):
            items = table[start : start + LOOP_FRAMES].tolist()
            inline = await framing.read_inline(stream, [nbytes for address, nbytes in items if not address])
            for address, nbytes in items:
                frames.append(this_process.allocate(nbytes).data if address else next(inline))
                if address:
                    lent.append((address, frames[-1]))
            if count > LOOP_FRAMES:
                await asyncio.sleep(0)
        if not lent:
            return frames
        if way == Word.CUT and self._lender.data:
            await self._lender.data.receive(lent)
            this_process.cut_bytes += sum(out.nbytes for _, out in lent)
        elif self._lender.peer:
            await _copy(self._lender.peer, lent, self._lender.answer)
            this_process.copied_bytes += sum(out.nbytes for _, out in lent)
        stream.write(framing.word(Word.RETURN))
        return frames

    def _fail(self, e: BaseException) -> NoReturn:
        """End the connection by an error inside: it is not known how much of a message the stream has had."""
        self.abort()
        traceback.clear_frames(e.__traceback__)  # distributed's log of a worker keeps it, and with it all their bytes
        if isinstance(e, (StreamClosedError, SSLError)):
            tcp.convert_stream_closed_error(self, e)
        if isinstance(e, OSError) and e.errno == errno.ENOMEM:  # Dask would take the peer for dead, and ask without end
            raise MemoryError(str(e)) from e
        if isinstance(e, (OSError, struct.error)) and not isinstance(e, CommClosedError):
            raise CommClosedError(f"in {self}: a message of the peer cannot be read: {e}") from e
        raise e

    @coroutine  # it begins without being awaited, as distributed's
    def close(self) -> Any:
        """Close; return when the peer has all that was written and lent, or after a second."""
        if self._lender.frames and not self.closed():
            self._is_over = True
            draining = supervise.start(self._drain, "the end of a connection", lambda _: self.abort())
            yield asyncio.wait([draining], timeout=_CLOSE_S)
        else:
            yield super().close()

    async def _drain(self) -> None:
        """Keep what is lent until the peer has it, then close; messages that come meanwhile are read by no one."""
        try:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(_LENT_S):
                    while self._lender.frames:
                        async with self._reading:
                            await self._step()
        finally:
            self._lender.end()
            closing = super().close()
        await closing

    def abort(self) -> None:
        """Close at once, with all data connections; a copy that the peer has not ended fails."""
        self._lender.end()
        super().abort()


class NodeTLS(NodeTCP, tcp.TLS):
    """The same beside TLS."""


def adopt() -> None:
    """Use these connections for ``tcp://`` and ``tls://`` in this process from now on."""
    this_process.adopted = True
    for comm, connector, listener in (
        (NodeTCP, tcp.TCPConnector, tcp.TCPListener),
        (NodeTLS, tcp.TLSConnector, tcp.TLSListener),
    ):
        listener.comm_class = comm
        connector.comm_class = staticmethod(functools.partial(comm, dials=True))

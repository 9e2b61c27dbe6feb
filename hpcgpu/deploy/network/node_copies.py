"""Connections of distributed whose large frames cross a node by one copy of the kernel, beside TLS or TCP.

Each side's handshake names its process. A side that can read the memory of the other one grants it with its first
word: from then on the other side lends its large frames. The connection, encrypted as before, carries their addresses.
The receiver copies them and returns a word, and the sender lets them go. The side that made the connection waits for
the other one's first word: its first message may be large, such as a value that is scattered.

Where no memory can be read, such as between nodes, frames of 1 MiB and more are lent likewise, and go by data
connections. The side that made the connection makes them as soon as one side has had such a message.

A message begins with a word of 8 bytes: the kind in its highest byte, a number in the others. ``_PLAIN`` is 0: there it
is the first word of a message of distributed, so a peer without this module, such as a laptop's client, sees nothing
else.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import itertools
import secrets
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from ssl import SSLError, SSLSocket
from typing import Any

import numpy as np
from distributed.comm import tcp
from distributed.comm.core import CommClosedError, connect
from distributed.comm.utils import from_frames, to_frames
from distributed.protocol.utils import unpack_frames
from distributed.utils import ensure_memoryview
from tornado.iostream import IOStream, StreamClosedError

from hpcgpu import supervise
from hpcgpu.deploy.network.data_connections import KEY_BYTES, Channel, DataConnections, executor, thread_count
from hpcgpu.host import host_memory
from hpcgpu.host.host_memory import Identity

KEY, DATA_KEY = "hpcgpu-memory-2", "hpcgpu-data-2"  # in the handshake; before 2026-11-28 without numbers
THRESHOLD_BYTES = 64 * 1024  # a message with fewer bytes goes by the connection as a whole
SMALL_BYTES = 2048  # a smaller frame of a larger message is not lent
LOOP_BYTES = 512 * 1024  # at most so much is copied on the event loop, in about 0.1 ms; a thread costs as much
PART_BYTES = 4 << 20  # at least so much is copied by each of several threads
CUT_BYTES = 1 << 20  # a frame that cannot be copied goes by data connections from this size
_MOST_BYTES = 1 << 30  # of a head, and of one write
_LAST_COPIES_S = 30.0  # as long as distributed's connection outlives a silent peer
_PLAIN, _GRANT, _RETURN, _OWN, _WANT_DATA, _HAVE_DATA, _REFUSE = range(7)
_CUT = 1  # in place of the address of a frame that comes by data connections
_WORD, _HEAD, _FRAME = struct.Struct("=Q"), struct.Struct("=QQQ"), struct.Struct("=QQ")
_VALUE = (1 << 56) - 1

Lent = list[tuple[int, memoryview]]  # addresses of a peer, and where their bytes go

_proofs = host_memory.Proofs()
_numbers = itertools.count()
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
        self.copied_bytes = 0  # from peers
        self.cut_bytes = 0  # by data connections from peers
        self.refusals: set[str] = set()  # rules by which it cannot read the memory of peers on its node

    def obstacle(self) -> str:
        """Return why large values come by the connection; "" if they are copied."""
        if not (self.adopted and self.allowed):
            return "node_copies=False" if self.adopted else "the protocol is neither tls nor tcp"
        return "" if self.copied_bytes else ", ".join(sorted(self.refusals)) or host_memory.obstacle()


this_process = ThisProcess()


def _spans(frames: list[memoryview]) -> list[tuple[int, int]]:
    """Return address and size of each frame; the address is 0 if it is small, or other processes cannot read it."""
    spans = [(np.frombuffer(f, np.uint8).ctypes.data if f.nbytes >= SMALL_BYTES else 0, f.nbytes) for f in frames]
    if host_memory.are_readable([span for span in spans if span[0]]):  # in few calls
        return spans
    return [span if span[0] and host_memory.are_readable([span]) else (0, span[1]) for span in spans]


def _in_locked_pages(frame: memoryview) -> bool:
    owner: Any = frame.obj
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    return frame.nbytes >= SMALL_BYTES and isinstance(owner, np.ndarray) and this_process.is_page_locked(owner)


async def _readable(frames: list[memoryview]) -> list[memoryview]:
    """Return the frames, with copies of those in page-locked memory if other processes cannot read it."""
    # NVIDIA's kernel module 525.89 maps host memory as VM_IO, which the kernel copies for no one; 570.124 and 575.64 do
    # not (nvidia/nv-mmap.c). A copy takes a fifth of the CPU time of TLS.
    locked = {i: np.frombuffer(f, np.uint8) for i, f in enumerate(frames) if _in_locked_pages(f)}
    if not locked or host_memory.are_readable([(array.ctypes.data, array.nbytes) for array in locked.values()]):
        return frames

    def copy(array: np.ndarray) -> memoryview:
        out = this_process.allocate(array.nbytes)
        np.copyto(out, array)
        return out.data

    loop = asyncio.get_running_loop()
    copies = await loop.run_in_executor(executor(), lambda: {i: copy(array) for i, array in locked.items()})
    return [copies.get(i, f) for i, f in enumerate(frames)]


def _part(lent: Lent, i: int, count: int) -> Lent:
    """Return one of ``count`` parts of each frame."""
    cuts = ((out.nbytes * i // count, out.nbytes * (i + 1) // count, address, out) for address, out in lent)
    return [(address + begin, out[begin:end]) for begin, end, address, out in cuts if begin < end]


async def _copy_in_threads(peer: int, lent: Lent, proof: tuple[int, int]) -> None:
    """Copy with each core of this process: one reads 7 GiB/s where two read 13 (AMD EPYC, 2 cores, 2026-11-27)."""
    count = max(1, min(thread_count(), sum(out.nbytes for _, out in lent) // PART_BYTES))
    run = functools.partial(asyncio.get_running_loop().run_in_executor, executor(), host_memory.copy, peer)
    await asyncio.gather(*(run(_part(lent, i, count), proof) for i in range(count)))


def _word(kind: int, value: int = 0) -> bytes:
    return _WORD.pack(kind << 56 | value)


def parse_head(head: memoryview) -> tuple[list[tuple[int, int]], memoryview, tuple[int, int]]:
    """Return address and size of each frame, the frames in the head, and address and value of the proof."""
    *proof, count = _HEAD.unpack_from(head)
    start = _HEAD.size + count * _FRAME.size
    if not count or start > head.nbytes:
        raise OSError(f"{count} frames in a head of {head.nbytes} bytes")
    items = list(_FRAME.iter_unpack(head[_HEAD.size : start]))
    if any(address + nbytes >= 1 << 63 for address, nbytes in items):
        raise OSError("a frame outside of all memory")
    inline = sum(nbytes for address, nbytes in items if not address and nbytes < THRESHOLD_BYTES)
    if inline != head.nbytes - start:
        raise OSError(f"{head.nbytes - start} bytes for frames of {inline} bytes")
    return items, head[start:], (proof[0], proof[1])


class _Lender:
    """One side of a connection: whether both sides may copy, and the frames that the peer has not returned."""

    def __init__(self) -> None:
        self.peer = 0  # pid of the peer, if its memory can be read
        self.granted = False  # the peer can read this process's memory
        self.proof: tuple[int, int] | None = None
        self.data: DataConnections | None = None
        self.peer_has_data = False  # it receives by data connections
        self.ended = asyncio.Event()
        self.frames: deque[list[memoryview]] = deque()  # of each message
        self.all_returned = asyncio.Event()

    def lend(self, frames: list[memoryview]) -> list[tuple[int, int]] | None:
        """Return address and size of each frame, address 0 for one that goes by the connection; None: all do."""
        if sum(f.nbytes for f in frames) < THRESHOLD_BYTES:
            return None
        if not self.granted:
            cut = [(_CUT if f.nbytes >= CUT_BYTES else 0, f.nbytes) for f in frames]
            return cut if any(address for address, _ in cut) else None
        self.proof = self.proof or _proofs.begin()
        items = _spans(frames)
        return items if self.proof and any(address for address, _ in items) else None

    def returned(self) -> None:
        """Let the frames of the oldest message go."""
        self.frames.popleft()
        if not self.frames:
            self.all_returned.set()

    def end(self) -> None:
        """Let all frames go; a copy that is not over now fails."""
        proof, self.proof, self.granted, self.peer_has_data = self.proof, None, False, False
        if proof:
            _proofs.end(proof[0])
        if self.data:
            self.data.close()
        self.ended.set()
        self.frames.clear()
        self.all_returned.set()


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
        self._dialing: asyncio.Task[None] | None = None
        self._wants_data = False
        self._token = ""  # of its data connections; the peer alone has it
        self._joined: dict[int, NodeTCP] = {}  # data connections that have come, by their number
        self._lender = lender = _Lender()
        self._reading = asyncio.Lock()
        self._awaits_answer = False  # the peer's first word
        weakref.finalize(self, lender.end).atexit = False
        self.stream.set_close_callback(functools.partial(_end, weakref.ref(self), lender))

    def handshake_info(self) -> dict[str, Any]:
        """Name this process and connection to the peer, in addition to distributed's terms."""
        number = str(next(_numbers))
        _by_number[number], self._token = self, f"{number}-{secrets.token_hex(16)}"
        data = {"token": self._token, "threads": thread_count()}
        info: dict[str, Any] = {**super().handshake_info(), DATA_KEY: data}
        return {**info, KEY: Identity.of_this_process()._asdict()} if this_process.allowed else info

    def handshake_configuration(self, local: dict[str, Any], remote: dict[str, Any]) -> dict[str, Any]:
        """Find out whether the peer's memory can be read, and tell it; then do as distributed."""
        peer, ways = Identity.parse(remote.get(KEY)), [info.get(DATA_KEY) for info in (local, remote)]
        if peer and self.stream and KEY in local and not any(isinstance(way, Mapping) and "of" in way for way in ways):
            if refusal := peer.refusal():
                this_process.refusals |= {refusal} - {host_memory.ELSEWHERE, host_memory.ENDED}
            self._lender.peer = 0 if refusal else peer.pid
            self._awaits_answer = self._dials and not refusal
            with self._ending_by_errors():
                self.stream.write(_word(_REFUSE if refusal else _GRANT))
        return tcp.TCP.handshake_configuration(local, remote)

    def closed(self) -> bool:
        """Return whether this side or the peer has closed it; the scheduler asks for each pair of workers."""
        return self._is_over or self.stream is None

    async def write(self, msg: Any, serializers: Any = None, on_error: str = "message") -> int:
        """Write a message; its large frames are lent as soon as the peer has granted it."""
        stream = self.stream
        if stream is None:
            raise CommClosedError
        if self._awaits_answer and not self._reading.locked():
            with self._ending_by_errors():
                if await self._next() is not None or self._awaits_answer:
                    raise OSError("its first word is neither a grant nor a refusal")
        if not (self._lender.granted or (self._lender.data and self._lender.peer_has_data)):
            nbytes = int(await super().write(msg, serializers=serializers, on_error=on_error))
            if nbytes >= CUT_BYTES and not self._lender.peer and not self.closed():
                with self._ending_by_errors():
                    self._want_data(stream)
            return nbytes
        info = {"sender": self.local_info, "recipient": self.remote_info, **self.handshake_options}
        options = {"serializers": serializers, "on_error": on_error, "frame_split_size": 1 << 62}  # none is split
        frames = await to_frames(msg, allow_offload=self.allow_offload, context=info, **options)
        with self._ending_by_errors():
            parts = [ensure_memoryview(f) for f in frames]
            return self._send(stream, await _readable(parts) if self._lender.granted else parts)

    def _send(self, stream: IOStream, frames: list[memoryview]) -> int:
        """Enqueue a message as a whole: no other one comes between."""
        items = self._lender.lend(frames)
        if items:
            self._lender.frames.append(frames)
        address, value = self._lender.proof if items and self._lender.proof else (0, 0)
        items = items or [(0, f.nbytes) for f in frames]
        inline = [f for f, item in zip(frames, items, strict=True) if not item[0]]
        table = (_HEAD.pack(address, value, len(items)), *(_FRAME.pack(*item) for item in items))
        head = b"".join((*table, *(f for f in inline if f.nbytes < THRESHOLD_BYTES)))
        stream.write(_word(_OWN, len(head)) + head)
        for part in (f for f in inline if f.nbytes >= THRESHOLD_BYTES):
            for start in range(0, part.nbytes, _MOST_BYTES):
                stream.write(part[start : start + _MOST_BYTES])
        cut = [f for f, item in zip(frames, items, strict=True) if item[0] and not address]
        if cut and self._lender.data:
            self._lender.data.send(cut).add_done_callback(self._after_sending)
        return sum(f.nbytes for f in frames)

    def _after_sending(self, sent: asyncio.Future[None]) -> None:
        if not sent.cancelled() and sent.exception():
            self.abort()

    def _want_data(self, stream: IOStream) -> None:
        """Once: let the side that made the connection make data connections."""
        terms = self.remote_info.get(DATA_KEY)
        if self._wants_data or not isinstance(terms, Mapping):
            return
        self._wants_data = True
        if not self._dials:
            stream.write(_word(_WANT_DATA))
        elif isinstance(token := terms.get("token"), str) and type(threads := terms.get("threads")) is int:
            count = max(1, min(threads, thread_count()))
            self._dialing = supervise.start(
                lambda: self._dial(stream, token, count), "making data connections", lambda _: self.abort()
            )

    async def _dial(self, stream: IOStream, token: str, count: int) -> None:
        """Make data connections; where that fails, large frames go on by this connection."""
        options: dict[str, Any] = {}
        if context := getattr(stream.socket, "context", None):
            name = stream.socket.server_hostname
            options = {"ssl_context": context, **({"server_hostname": name} if name else {})}
        dialed = []
        for i in range(count):
            terms = {"of": token, "number": i, "count": count, "key": secrets.token_bytes(KEY_BYTES)}
            dialed.append(connect(self.peer_address, handshake_overrides={DATA_KEY: terms}, **options))
        comms = await asyncio.gather(*dialed, return_exceptions=True)
        made = [comm for comm in comms if isinstance(comm, NodeTCP)]
        if self.closed() or len(made) < count:
            for comm in made:
                comm.abort()
        else:
            self._use(stream, made)

    def _join(self, terms: Mapping[str, Any]) -> asyncio.Event:
        """Be a data connection of the connection with the token of ``terms``; return the event of its end."""
        number, count, token = terms.get("number"), terms.get("count"), str(terms.get("of"))
        owner = _by_number.get(token.partition("-")[0])
        has_key = isinstance(key := terms.get("key"), bytes) and len(key) == KEY_BYTES
        if not (has_key and type(number) is type(count) is int and 0 <= number < count <= thread_count()) or (
            owner is None
            or not hmac.compare_digest(token.encode(), owner._token.encode())
            or (stream := owner.stream) is None
            or owner._lender.data
            or number in owner._joined
        ):
            raise CommClosedError(f"data connection {number} of {count} belongs to no connection")
        owner._joined[number] = self
        if all(i in owner._joined for i in range(count)):
            owner._use(stream, [owner._joined.pop(i) for i in range(count)])
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
        stream.write(_word(_HAVE_DATA))

    async def read(self, deserializers: Any = None) -> Any:
        """Read a message, and copy what the peer lends."""
        frames, terms = None, self.remote_info.get(DATA_KEY)
        if not self._dials and isinstance(terms, Mapping) and "of" in terms:
            await self._join(terms).wait()
            raise CommClosedError("a data connection has ended")
        while frames is None:
            frames = await self._next()
        try:
            return await from_frames(
                frames, deserialize=self.deserialize, deserializers=deserializers, allow_offload=self.allow_offload
            )
        except EOFError as e:
            self.abort()
            raise CommClosedError("aborted stream on truncated data") from e

    async def _next(self) -> list[Any] | None:
        """Read a word, and the message that it begins; None if it begins none."""
        with self._ending_by_errors():
            async with self._reading:
                if (stream := self.stream) is None:
                    raise CommClosedError
                (word,) = _WORD.unpack(await stream.read_bytes(_WORD.size))
                return await self._receive(stream, word >> 56, word & _VALUE)

    async def _receive(self, stream: IOStream, kind: int, value: int) -> list[Any] | None:
        """Return the frames of a message; None for a word that is no message."""
        lender = self._lender
        if kind == _PLAIN:
            frames, sizes = unpack_frames(await tcp.read_bytes_rw(stream, value), partial=True)
            return [*frames, *[await tcp.read_bytes_rw(stream, nbytes) for nbytes in sizes]]
        if kind == _OWN and (lender.peer or lender.data) and _HEAD.size <= value <= _MOST_BYTES:
            return await self._take(stream, await tcp.read_bytes_rw(stream, value))
        if kind in (_GRANT, _REFUSE) and KEY in self.local_info:
            lender.granted, self._awaits_answer = kind == _GRANT, False
        elif kind == _RETURN and lender.frames:
            lender.returned()
        elif kind == _WANT_DATA and self._dials:
            self._want_data(stream)
        elif kind == _HAVE_DATA and DATA_KEY in self.local_info:
            lender.peer_has_data = True
        else:
            raise OSError(f"a word of kind {kind} with {value}")
        return None

    async def _take(self, stream: IOStream, head: memoryview) -> list[memoryview]:
        """Return the frames of a message with this head: copied, in the head, or next in a stream."""
        items, rest, proof = parse_head(head)
        frames: list[memoryview] = []
        lent: Lent = []
        for address, nbytes in items:
            if address:
                frames.append(this_process.allocate(nbytes).data)
                lent.append((address, frames[-1]))
            elif nbytes < THRESHOLD_BYTES:
                frames.append(np.array(rest[:nbytes]).data)  # a copy, so each can be freed alone
                rest = rest[nbytes:]
            else:
                frames.append(await tcp.read_bytes_rw(stream, nbytes))
        nbytes, (peer, data) = sum(out.nbytes for _, out in lent), (self._lender.peer, self._lender.data)
        if not lent:
            return frames
        if data and not proof[0]:
            await data.receive(out for _, out in lent)
            this_process.cut_bytes += nbytes
        elif not (peer and proof[0]):
            raise OSError("lent frames of a peer whose memory cannot be read")
        else:
            if nbytes <= LOOP_BYTES:
                host_memory.copy(peer, lent, proof)
            else:
                await _copy_in_threads(peer, lent, proof)
            this_process.copied_bytes += nbytes
        stream.write(_word(_RETURN))
        return frames

    @contextlib.contextmanager
    def _ending_by_errors(self) -> Iterator[None]:
        """End the connection by an error inside: it is not known how much of a message the stream has had."""
        try:
            yield
        except (StreamClosedError, SSLError) as e:
            self.abort()
            tcp.convert_stream_closed_error(self, e)
        except (OSError, MemoryError) as e:
            self.abort()
            if isinstance(e, CommClosedError):
                raise
            raise CommClosedError(f"in {self}: a message of the peer cannot be read: {e}") from e
        except BaseException:
            self.abort()
            raise

    def close(self) -> Any:
        """Close when the peer has all that was written and lent."""
        return self._close() if self._lender.frames and not self.closed() else super().close()

    async def _close(self) -> None:
        lender = self._lender
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_LAST_COPIES_S):
                if self._reading.locked() and lender.frames:
                    lender.all_returned.clear()
                    await lender.all_returned.wait()
                while lender.frames:
                    await self._next()  # messages that come now are read by no one
        lender.end()
        await super().close()

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

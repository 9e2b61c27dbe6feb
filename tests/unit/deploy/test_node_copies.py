"""Connections that copy within a node: both ends are in this process, whose memory each end reads as a peer's."""

import asyncio
import contextlib
import errno
import gc
import itertools
import os
import random
import runpy
import socket
import struct
import sys
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
from distributed.comm import tcp, ws
from distributed.comm.core import CommClosedError, connect, listen
from distributed.core import ConnectionPool, Server
from distributed.protocol import to_serialize
from fake_cuda import secret_pages
from hypothesis import example, given, settings
from hypothesis import strategies as st
from waiting import aside, run, until, when

from hpcgpu.deploy import network
from hpcgpu.deploy.network import framing, node_copies, scheduler_file
from hpcgpu.deploy.network.data_connections import KEY_BYTES, Channel, DataConnections
from hpcgpu.deploy.network.framing import CUT_BYTES, SMALL_BYTES, THRESHOLD_BYTES, Word
from hpcgpu.host import peer_memory
from hpcgpu.host.peer_memory import Identity
from hpcgpu.spill.storage.disk import Loan, Pool

SECURITY = scheduler_file.security(scheduler_file.Certificate.make())
BIG = 2 * CUT_BYTES + 1
SIZES = st.sampled_from([0, 1, 100, SMALL_BYTES - 1, SMALL_BYTES, 30_000, THRESHOLD_BYTES, 100_000, 700_000, BIG])
MESSAGES = st.lists(st.lists(st.tuples(st.sampled_from(["array", "bytes"]), SIZES), max_size=4), min_size=1, max_size=4)
TERMS = st.fixed_dictionaries(
    {"of": st.text(max_size=3) | st.none() | st.sampled_from(["token", "guess"])},
    optional={
        "number": st.integers(-1, 2) | st.text(max_size=1),
        "count": st.integers(-1, 3) | st.none(),
        "key": st.just(bytes(KEY_BYTES)) | st.binary(max_size=2) | st.text(max_size=1),
    },
)
KINDS = st.sampled_from([int(word) for word in Word if word]) | st.integers(1, 255)
NUMBERS = st.integers(0, 3) | st.integers(0, 2**64 - 1)
TABLES = st.lists(NUMBERS, max_size=6).map(lambda numbers: struct.pack(f"={len(numbers)}Q", *numbers))
WORDS = st.builds(
    lambda kind, number, rest, end: struct.pack("=Q", kind << 56 | number) + rest + end,
    KINDS,
    st.integers(0, 3) | st.integers(0, 200) | st.integers(0, 2**56 - 1),
    TABLES | st.binary(max_size=100),
    st.binary(max_size=20),
)


@pytest.fixture(autouse=True)
def adopted(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (tcp.TCPConnector, tcp.TCPListener, tcp.TLSConnector, tcp.TLSListener):
        monkeypatch.setattr(kind, "comm_class", kind.comm_class)
    node_copies.adopt()


@contextlib.asynccontextmanager
async def pair(scheme: str = "tls") -> AsyncIterator[tuple[Any, Any]]:
    """Connect two ends: the one that connects may lend at once, the other one when it has read a message."""
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    over, ends = asyncio.Event(), list[Any]()

    async def handle(comm: Any) -> None:
        if accepted.done():  # a data connection
            ends.append(await asyncio.gather(comm.read(), return_exceptions=True))
            comm.abort()
            return
        accepted.set_result(comm)
        await over.wait()

    security = SECURITY if scheme in ("tls", "wss") else scheduler_file.security(None)
    async with listen(f"{scheme}://127.0.0.1", handle, **security.get_listen_args("worker")) as listener:
        a = await connect(listener.contact_address, **security.get_connection_args("worker"))
        b = await accepted
        try:
            yield a, b
        finally:
            a.abort()
            b.abort()
            over.set()
    assert all(isinstance(end, CommClosedError) for (end,) in ends)


async def send_both_ways(a: Any, b: Any, nbytes: int) -> None:
    for one, other in ((a, b), (b, a)):
        await one.write({"x": to_serialize(np.ones(nbytes, np.uint8))})
        assert (await other.read())["x"].sum() == nbytes


@contextlib.asynccontextmanager
async def far_pair(scheme: str = "tls") -> AsyncIterator[tuple[Any, Any]]:
    """Connect two ends as if they were on two nodes, with data connections."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Identity, "refusal", lambda *_: peer_memory.ELSEWHERE)
        async with pair(scheme) as (a, b):
            while not all(comm._lender.peer_has_data and comm._lender.data for comm in (a, b)):
                await send_both_ways(a, b, BIG)
                await asyncio.sleep(0.001)  # what is in a socket's buffers is written and read without a pause
            yield a, b


async def test_connection_without_large_frames_has_no_event() -> None:
    """An asyncio.Event takes 0.8 KiB, and a scheduler has two connections of each of thousands of workers."""

    def events() -> int:
        gc.collect()  # those that an earlier test has left would go in the middle
        return sum(isinstance(each, asyncio.Event) for each in gc.get_objects())

    async with contextlib.AsyncExitStack() as pairs:
        before = events()
        for _ in range(4):
            await pairs.enter_async_context(pair())
        assert events() - before == 4  # those of the pairs


def value(kind: str, nbytes: int) -> Any:
    array = np.frombuffer(random.Random(nbytes).randbytes(nbytes), np.uint8)
    return array if kind == "array" else array.tobytes()


def lent(comm: Any) -> int:
    return len(comm._lender.frames)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what is copied between the ends."""
    sizes: list[int] = []
    copy = Identity.copy

    def count(peer: Identity, lent: peer_memory.Spans, answer: bytes) -> None:
        copy(peer, lent := list(lent), answer)
        sizes.extend(out.nbytes for _, out in lent)

    monkeypatch.setattr(Identity, "copy", count)
    return sizes


def exchange(there: Any, back: Any, connected: AbstractAsyncContextManager[tuple[Any, Any]]) -> None:
    async def test() -> None:
        async with connected as (a, b):

            async def send(comm: Any, messages: Any) -> None:
                for message in messages:
                    await comm.write({"data": [to_serialize(value(*item)) for item in message]})

            async def receive(comm: Any, messages: Any) -> None:
                for message in messages:
                    got = (await comm.read())["data"]
                    assert [bytes(part) for part in got] == [bytes(value(*item)) for item in message]

            await asyncio.gather(send(a, there), receive(b, there), send(b, back), receive(a, back))

    run(test)


@given(MESSAGES, MESSAGES, st.sampled_from(["tcp", "tls"]), st.sampled_from([1, 3, 0]))
@settings(max_examples=35)
def test_messages_arrive_whole_and_in_order_both_ways(there: Any, back: Any, scheme: str, cores: int) -> None:
    connected = pair if cores else far_pair
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(node_copies, "thread_count", lambda: cores or 2)
        patched.setattr(node_copies, "PART_BYTES", CUT_BYTES)
        exchange(there, back, connected(scheme))


@pytest.mark.parametrize("word", [b"", struct.pack("=Q", Word.RETURN << 56)], ids=["a message", "another word"])
async def test_a_first_word_that_is_no_answer_ends_the_connection(word: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    name, answer, silent = "handshake_configuration", node_copies.NodeTCP.handshake_configuration, tcp.TCP
    monkeypatch.setattr(
        node_copies.NodeTCP, name, lambda comm, *of: answer(comm, *of) if comm._dials else getattr(silent, name)(*of)
    )
    async with pair("tcp") as (a, b):
        await (b.stream.write(word) if word else b.write("hello"))
        with pytest.raises(CommClosedError):
            await a.write("hello")
        assert a.closed()


async def test_large_frames_are_copied_and_released(copied: list[int]) -> None:
    async with pair() as (a, b):
        array = np.ones(1_000_000, np.uint8)
        gone = weakref.ref(array)
        await a.write({"x": to_serialize(array)})
        del array
        assert lent(a) == 1
        got = (await b.read())["x"]
        assert got.sum() == 1_000_000
        got[:] = 2  # it is the receiver's
        assert copied == [1_000_000]
        await b.write("next")
        assert await a.read() == "next"
        gc.collect()
        assert (lent(a), gone()) == (0, None)


async def test_tasks_that_hold_all_default_threads_delay_no_copy(copied: list[int]) -> None:
    """As a task may that reads many files by ``asyncio.to_thread``."""
    over = threading.Event()
    tasks = [asyncio.ensure_future(asyncio.to_thread(over.wait)) for _ in range(64)]
    try:
        async with pair() as (a, b):
            await a.write({"x": to_serialize(np.ones(1_000_000, np.uint8))})
            assert (await b.read())["x"].sum() == sum(copied) == 1_000_000
    finally:
        over.set()
        await asyncio.gather(*tasks)


async def test_page_locked_memory_of_no_reader_is_copied_first(
    copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_copies.this_process, "is_page_locked", lambda array: isinstance(array.base, Loan))
    pool = Pool(4 << 20, secret_pages)
    async with pair() as (a, b):
        array: Any = pool.take(1_000_000)
        array[:] = 1
        assert not peer_memory.are_readable([(array.ctypes.data, array.nbytes)])
        await a.write({"x": to_serialize(array), "y": to_serialize(np.full(700_000, 2, np.uint8))})
        del array
        await when(lambda: pool._held_bytes <= pool.free_bytes)  # the thread that copied forgets it
        assert lent(a) == 1
        message = await b.read()
        assert (message["x"].sum(), message["y"].sum(), copied) == (1_000_000, 1_400_000, [1_000_000, 700_000])


async def test_a_message_written_before_close_arrives() -> None:
    for connected, is_read in itertools.product((pair, far_pair), (False, True)):
        async with connected() as (a, b):
            await a.write({"x": to_serialize(np.ones(BIG, np.uint8))})
            reading = asyncio.ensure_future(a.read()) if is_read else None
            closing = asyncio.ensure_future(a.close())
            assert (await b.read())["x"].sum() == BIG
            await closing
            if reading:
                with pytest.raises(CommClosedError):
                    await reading


async def test_many_small_frames_are_sent_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MOST_BYTES", 4 * framing.PIECE_BYTES)  # of a table, and of one write
    arrays = [np.full(i % 3 * 10_000, i % 251, np.uint8) for i in range(1000)]
    for connected in (pair, far_pair):
        async with connected("tcp") as (a, b):
            await a.write({"data": [to_serialize(array) for array in arrays]})
            got = (await b.read())["data"]
            assert all((one == other).all() for one, other in zip(got, arrays, strict=True))
            got[1][:] = 9  # it has memory of its own
            assert (got[4] == 4).all()
    pieces = framing.layout(Word.INLINE, [memoryview(bytes(10_000))] * 1000)[2]
    assert max(map(len, pieces)) <= framing.PIECE_BYTES + SMALL_BYTES


async def test_many_frames_leave_the_event_loop_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turn, read, layout = 0, framing.read_inline, node_copies._layout
    frames, written, threads = Counter[int](), Counter[int](), set[threading.Thread]()

    def tick() -> None:
        nonlocal turn, ticking
        turn, ticking = turn + 1, asyncio.get_running_loop().call_soon(tick)

    def count_frames(stream: Any, sizes: list[int]) -> Any:
        frames[turn] += len(sizes)
        return read(stream, sizes)

    def count_threads(*args: Any) -> Any:
        threads.add(threading.current_thread())
        return layout(*args)

    monkeypatch.setattr(Identity, "refusal", lambda *_: "a rule of this test")  # so all go by the connection
    monkeypatch.setattr(framing, "TURN_BYTES", 256 << 10)  # less than the kernel's buffers
    async with pair("tcp") as (a, b):
        send = a.stream.write_to_fd

        def count_bytes(data: memoryview) -> int:
            written[turn] += (nbytes := send(data))
            return nbytes

        a.stream.write_to_fd = count_bytes
        monkeypatch.setattr(framing, "read_inline", count_frames)
        monkeypatch.setattr(node_copies, "_layout", count_threads)
        arrays = [to_serialize(np.ones(60 << 10, np.uint8)) for _ in range(300)]
        ticking = asyncio.get_running_loop().call_soon(tick)
        assert len((await asyncio.gather(a.write({"data": arrays}), b.read()))[1]["data"]) == 300
        ticking.cancel()
    assert sum(frames.values()) > 300
    assert max(frames.values()) <= 64
    assert sum(written.values()) > 300 * 60 << 10
    assert max(written.values()) <= 2 * (256 + 128 << 10)  # tornado writes 128 KiB at once
    assert threading.current_thread() not in threads


@pytest.mark.parametrize("scheme", ["tls", "tcp"])
@pytest.mark.parametrize("nbytes", [0, 1000, 10_000])
async def test_small_messages_take_no_more_calls_than_plain_ones(
    monkeypatch: pytest.MonkeyPatch, scheme: str, nbytes: int
) -> None:
    """Calls of functions, Python's and C's: the CPU time of a round trip, but the same on any machine at any load."""
    message, calls = {"op": "x", "data": bytes(nbytes)}, Counter[type]()

    def count(_: Any, event: str, __: Any) -> None:
        calls[kind] += event in ("call", "c_call")

    for plain in (False, True):
        if plain:
            for kind in (tcp.TCPConnector, tcp.TCPListener, tcp.TLSConnector, tcp.TLSListener):
                monkeypatch.setattr(kind, "comm_class", tcp.TLS if "TLS" in kind.__name__ else tcp.TCP)
        async with pair(scheme) as (a, b):
            kind = type(a)
            for trip in range(20):
                sys.setprofile(count if trip >= 5 else None)  # by then both sides have greeted
                await asyncio.gather(a.write(message), b.read())
                await asyncio.gather(b.write(message), a.read())
            sys.setprofile(None)
    (ours, theirs) = calls.values()
    assert 0 < ours <= theirs


async def test_close_reads_what_a_reader_that_went_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_copies, "_CLOSE_S", 20.0)
    async with pair() as (a, b):
        reading = asyncio.ensure_future(a.read())
        await a.write({"x": to_serialize(np.ones(BIG, np.uint8))})
        await b.write("an answer before the copy")
        await reading
        closing = a.close()
        assert (await b.read())["x"].sum() == BIG
        await closing
        assert (lent(a), a.stream) == (0, None)


async def test_close_does_not_wait_for_a_peer_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_copies, "_CLOSE_S", 0.01)
    async with pair() as (a, b):
        await a.write({"x": to_serialize(np.ones(BIG, np.uint8))})
        closing = a.close()
        assert a.closed()
        with pytest.raises(CommClosedError):
            await a.write("more")
        await closing
        assert (await b.read())["x"].sum() == BIG  # it stays lent
        await when(lambda: not a.stream)


async def test_an_answer_of_another_connection_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    # as if a peer in the middle had passed on the challenges of one process to another one
    monkeypatch.setattr(peer_memory.secrets, "token_bytes", bytes)
    async with pair("tcp") as (a, b):
        await a.write("hello")
        assert a._lender.granted
        for slot in (a._lender.slot, b._lender.slot):
            shown = {node_copies.KEY: {**a.local_info[node_copies.KEY], "slot": slot}}
            comm = await connect(a.peer_address, handshake_overrides=shown)
            await asyncio.wait([comm._greeting])
            assert (comm._lender.granted, comm.closed()) == (False, False)
            comm.abort()
        await a.stream.write(framing.word(Word.ANSWER))  # a slot is written once
        with pytest.raises(CommClosedError, match="a word of kind 6"):
            while await b._step():
                pass


@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(errno.ENOMEM, "none left")])
async def test_a_lack_of_memory_is_no_dead_peer(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Dask would ask a peer that it takes for dead again, without end."""
    monkeypatch.setattr(Identity, "copy", Mock(side_effect=error))
    async with pair() as (a, b):
        await a.write({"x": to_serialize(np.ones(100_000, np.uint8))})
        with pytest.raises(MemoryError, match="none left"):
            await b.read()
        assert b.closed()


async def test_where_one_side_may_read_the_other_way_is_cut(copied: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = ["a rule of this test", ""]
    monkeypatch.setattr(Identity, "refusal", lambda *_: refusals.pop())
    async with pair() as (a, b):
        await asyncio.wait([a._greeting, b._greeting])
        ways = {Word.LENT, Word.INLINE}
        while {a._lender.way, b._lender.way} != {Word.LENT, Word.CUT}:
            assert {a._lender.way, b._lender.way} <= {*ways, Word.CUT}
            await send_both_ways(a, b, BIG)
            await asyncio.sleep(0.001)
        await send_both_ways(a, b, BIG)
        assert copied


async def test_data_connections_count_in_a_pools_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_copies, "thread_count", lambda: 3)
    monkeypatch.setattr(Identity, "refusal", lambda *_: peer_memory.ELSEWHERE)
    server = Server({"echo": lambda value: to_serialize(value)})
    await server.listen("tcp://127.0.0.1")
    pool = await ConnectionPool(limit=4)
    comms = [await pool.connect(server.address) for _ in range(2)]
    for comm in comms:
        while not comm._dialing or not comm._dialing.done():
            await comm.write({"op": "echo", "value": to_serialize(np.ones(BIG, np.uint8)), "reply": True})
            assert (await comm.read()).sum() == BIG
            await asyncio.sleep(0.001)
    assert [len(comm._lender.data.channels) if comm._lender.data else 0 for comm in comms] == [2, 0]
    assert pool.semaphore.locked()
    for comm in comms:
        comm.abort()
        pool.reuse(server.address, comm)
    await asyncio.gather(*(pool.semaphore.acquire() for _ in range(pool.limit)))  # all are free again
    await pool.close()
    await server.close()


@contextlib.contextmanager
def at_copy(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> Iterator[None]:
    """Do something between the copy of the frames and the check of the proof."""
    read, acted = peer_memory.read, []

    def read_and_act(pid: int, spans: peer_memory.Spans) -> None:
        read(pid, spans := list(spans))
        if spans[0][1].nbytes > SMALL_BYTES and not acted:
            acted.append(1)
            act()

    with monkeypatch.context() as patched:
        patched.setattr(peer_memory, "read", read_and_act)
        yield


@pytest.mark.parametrize("nbytes", [100_000, 1_000_000])
async def test_bytes_given_up_during_a_copy_are_no_message(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    async with pair() as (a, b):
        await a.write({"x": to_serialize(np.ones(nbytes, np.uint8))})
        with at_copy(monkeypatch, a._lender.end), pytest.raises(CommClosedError, match="given up"):
            await b.read()
        assert b.closed()


async def test_a_cancelled_read_ends_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    async with pair() as (a, b):
        await a.write({"x": to_serialize(np.ones(1_000_000, np.uint8))})
        reading = asyncio.ensure_future(b.read())
        loop = asyncio.get_running_loop()
        copying = threading.Event()

        def cancel() -> None:
            loop.call_soon_threadsafe(reading.cancel)
            copying.wait()

        with at_copy(monkeypatch, cancel), pytest.raises(asyncio.CancelledError):
            await reading
        assert b.closed()
        with pytest.raises(CommClosedError):
            await a.read()
        assert lent(a) == 0
        copying.set()


@contextlib.contextmanager
def channels(count: int, key: bytes = b"") -> Iterator[list[tuple[Channel, Channel]]]:
    """Pairs of connected channels."""
    made = []
    for pair in (socket.socketpair() for _ in range(count)):
        with pair[0], pair[1]:
            made.append((Channel(pair[0], key, dials=True), Channel(pair[1], key, dials=False)))
    yield made
    for channel in itertools.chain(*made):
        channel.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_moves_frames_by_threads_of_its_own() -> None:
    with channels(1) as [(here, there)]:
        pid = os.fork()
        if not pid:
            with contextlib.suppress(BaseException), channels(1) as [(one, other)]:
                here.close()  # as the garbage collector may: it stays open in the parent
                one.send([memoryview(b"bytes")])
                other.receive([out := memoryview(bytearray(5))]).result(10)
                os._exit(out != b"bytes")
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        here.send([memoryview(b"bytes")])
        there.receive([memoryview(bytearray(5))]).result(10)


async def test_what_moves_when_data_connections_are_closed_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The garbage collector closes them in any thread."""
    with channels(4) as made:
        data = DataConnections([here for here, _ in made])  # more than one for each thread
        moves = data.send([(0, memoryview(bytearray(100 * BIG)))]), data.receive([(0, memoryview(bytearray(BIG)))])
        aside(data.close).result(30)
        for move in moves:
            with pytest.raises(ConnectionError):
                await move
    assert caplog.records == []


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
async def test_large_frames_to_another_node_go_by_data_connections(
    monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    monkeypatch.setattr(node_copies, "thread_count", lambda: 3)
    async with far_pair(scheme) as (a, b):
        before = node_copies.this_process.cut_bytes
        for one, other in ((a, b), (b, a)):
            array = np.frombuffer(random.Random(1).randbytes(BIG), np.uint8)
            await one.write({"x": to_serialize(array), "y": to_serialize(array[:1000])})
            message = await other.read()
            assert (message["x"] == array).all() and (message["y"] == array[:1000]).all()
        assert node_copies.this_process.cut_bytes - before == 2 * BIG
        sockets = [channel.socket for channel in a._lender.data.channels]
        assert len(sockets) == 3
        assert [bool(channel._key) for channel in a._lender.data.channels] == [scheme == "tls"] * 3
    until(lambda: all(s.fileno() == -1 for s in sockets), "they are closed with it")


@given(st.binary(min_size=16, max_size=1000), st.binary(min_size=16, max_size=1000), st.integers(0), st.data())
def test_records_are_secret_and_only_the_next_one_is_read(first: bytes, second: bytes, bit: int, data: Any) -> None:
    out, records = memoryview(bytearray(len(first))), list[bytes]()
    with channels(1, b"k" * KEY_BYTES) as [(one, other)]:

        def take(record: bytes, to: Channel) -> None:
            (other if to is one else one).socket.sendall(record)
            to.receive([out]).result(30)

        for part in (first, second):
            one.send([memoryview(part)]).result(30)
            records.append(other.socket.recv(2000))
            assert part not in records[-1]
        changed = bytearray(records[0])
        changed[bit // 8 % len(changed)] ^= 1 << bit % 8
        wrong = {"changed": changed, "sent back": records[0], "early": (records[1] * 64)[: len(records[0])]}
        how = data.draw(st.sampled_from(["again", *wrong]))
        if how == "again":
            take(records[0], other)
            assert out == first
        with pytest.raises(ConnectionAbortedError, match="changed on their way"):
            take(bytes(wrong.get(how, records[0])), one if how == "sent back" else other)


async def test_a_broken_data_connection_ends_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, errors = list[Any](), list[Any]()
    noted = lambda nbytes: taken.append(weakref.ref(out := np.empty(nbytes, np.uint8))) or out  # noqa: E731
    for acts_first in (True, False):
        async with far_pair("tcp") as (a, b):
            monkeypatch.setattr(node_copies.this_process, "allocate", noted)
            sockets = [channel.socket for channel in a._lender.data.channels]
            if acts_first:
                sockets[-1].shutdown(socket.SHUT_RDWR)
            await a.write({"x": to_serialize(np.ones(20 * BIG, np.uint8))})
            if not acts_first:
                sockets[-1].shutdown(socket.SHUT_RDWR)
            for end in (b, a):
                with pytest.raises(CommClosedError) as caught:
                    await end.read()
                errors.append(caught.value)  # as in the logs of a worker: they keep no bytes
            assert (lent(a), a.closed(), b.closed()) == (0, True, True)
    await when(lambda: gc.collect() >= 0 and {out() is None for out in taken} == {True})


async def test_a_cancelled_read_of_data_connections_ends_both_sides() -> None:
    async with far_pair() as (a, b):
        loop, waits, receive = asyncio.get_running_loop(), asyncio.Event(), b._lender.data.receive
        a._lender.data.send = lambda _: loop.create_future()  # it stands still
        b._lender.data.receive = lambda frames: (waits.set(), receive(frames))[1]
        await a.write({"x": to_serialize(np.ones(BIG, np.uint8))})
        reading = asyncio.ensure_future(b.read())
        await waits.wait()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(CommClosedError):
            await a.read()
        assert (lent(a), b.closed()) == (0, True)


@given(st.lists(TERMS, min_size=1, max_size=3))
@example([{"of": "token", "number": 3 - i, "count": 4 - i, "key": bytes(KEY_BYTES)} for i in (1, 2)])
@settings(max_examples=30)
def test_data_connections_that_fit_nothing_are_closed(terms: list[dict[str, Any]]) -> None:
    async def test() -> None:
        async with pair("tcp") as (a, b):
            own = {"token": b._token, "guess": b._token[:-1] + "?"}
            over = ({node_copies.DATA_KEY: {**each, "of": own.get(each["of"], each["of"])}} for each in terms)
            comms = [await connect(a.peer_address, handshake_overrides=each) for each in over]
            reading = [asyncio.ensure_future(comm.read()) for comm in comms]
            while not all(each.done() for each in reading):
                await asyncio.sleep(0.002)
                if b._joined or b._lender.data:  # these wait for others, or for its end
                    b.abort()
            assert all(isinstance(each.exception(), CommClosedError) for each in reading)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(node_copies, "thread_count", lambda: 3)
        run(test)


async def test_a_place_of_data_connections_is_given_once_by_token() -> None:
    async with pair("tcp") as (a, b):
        terms = {"of": b._token, "number": 0, "count": 2, "key": bytes(KEY_BYTES)}
        neighbour = f"{b._token.partition('-')[0]}-{a._token.partition('-')[2]}"  # guessed from a token of one's own
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(node_copies, "thread_count", lambda: 3)
            for of, is_refused in ((neighbour, True), (b._token, False), (b._token, True)):
                comm = await connect(a.peer_address, handshake_overrides={node_copies.DATA_KEY: {**terms, "of": of}})
                if is_refused:
                    with pytest.raises(CommClosedError):
                        await comm.read()
                else:
                    await when(lambda: b._joined)
                    (owner,) = b._joined.values()
        assert list(b._joined.values()) == [owner]


async def test_without_data_connections_frames_go_plainly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Identity, "refusal", lambda *_: peer_memory.ELSEWHERE)
    monkeypatch.setattr(node_copies, "connect", AsyncMock(side_effect=OSError("no port")))
    async with pair() as (a, b):
        await send_both_ways(a, b, BIG)  # the second one asks for data connections
        await send_both_ways(a, b, BIG)
        await when(lambda: a._dialing and a._dialing.done())
        assert not a._lender.data
    assert "as more cannot be made: no port" in caplog.text


@pytest.mark.parametrize(("scheme", "theirs"), [("tls", tcp.TLS), ("wss", ws.WSS)])
async def test_a_connection_of_distributed_is_served_plainly(
    copied: list[int], monkeypatch: pytest.MonkeyPatch, scheme: str, theirs: type
) -> None:
    monkeypatch.setattr(tcp.TLSConnector, "comm_class", tcp.TLS)
    async with pair(scheme) as (a, b):
        assert type(a) is theirs
        await send_both_ways(a, b, BIG)
    assert copied == []


@pytest.mark.parametrize("reason", ["a rule of this test", "/proc/sys/kernel/random/boot_id cannot be read"])
async def test_a_refusal_is_known(copied: list[int], monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    monkeypatch.setattr(Identity, "refusal", lambda *_: reason)
    if "boot_id" in reason:  # as where a container masks a part of /proc
        monkeypatch.setattr(peer_memory.Path, "read_text", Mock(side_effect=FileNotFoundError))
        monkeypatch.setattr(peer_memory, "host", peer_memory.host.__wrapped__)
    monkeypatch.setattr(node_copies, "this_process", node_copies.ThisProcess())
    node_copies.adopt()
    async with pair("tcp") as (a, b):
        await send_both_ways(a, b, 1_000_000)
    assert (copied, node_copies.this_process.obstacle()) == ([], reason)


def test_a_script_lets_its_runs_leader_alone_read_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not its parent, which is 1 where the launcher has gone; ``scripts/yama.sh`` tries it on a kernel with Yama."""
    (yama := tmp_path / "ptrace_scope").write_text("1")
    monkeypatch.setattr(peer_memory, "_YAMA", yama)
    monkeypatch.setattr(peer_memory.ctypes, "CDLL", library := Mock())
    monkeypatch.setattr(network, "prepare", Mock())
    monkeypatch.setenv("HPCGPU_SCRIPT_LEADER", "4711")
    monkeypatch.setenv("DASK_SCHEDULER_ADDRESS", "tls://127.0.0.1:1")
    runpy.run_module("hpcgpu.deploy.client_preload")
    assert [call.args[:2] for call in library().prctl.call_args_list] == [(0x59616D61, 4711)]  # PR_SET_PTRACER


@given(st.lists(WORDS, min_size=1, max_size=3))
@example([struct.pack("=QQQ", 1 << 56 | 8, 0, 0)])  # a message of no frame, and one of no byte
@settings(max_examples=300)
def test_any_words_of_a_peer_are_a_message_or_end_the_connection(words: list[bytes]) -> None:
    async def test() -> None:
        async with pair("tcp") as (a, b):
            await asyncio.wait([a._greeting, b._greeting])
            a.stream.write(b"".join(words))
            await a.stream.write(b"")
            a.stream.close()
            with contextlib.suppress(Exception):  # of any kind where distributed does not understand the frames
                await b.read()
            with contextlib.suppress(MemoryError), pytest.raises(CommClosedError):
                while True:
                    await b._step()
            assert b.closed()

    run(test)

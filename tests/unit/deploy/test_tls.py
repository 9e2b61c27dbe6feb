"""Certificates, TLS connections that break, and peers that must show soon who they are."""

import asyncio
import contextlib
import ctypes
import datetime
import errno
import logging
import socket
import ssl
import struct
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import dask
import pytest
from comms import knock
from distributed import Client
from distributed.comm import connect, listen, registry
from distributed.comm.core import FatalCommClosedError
from waiting import logged, run, scaled, when

from hpcgpu.deploy import compat
from hpcgpu.deploy.cluster import security_loader
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.network.scheduler_file import Certificate, connect_first, security
from hpcgpu.deploy.processes.handshakes import HandshakeDeadline
from hpcgpu.errors import ConfigError, TrustError
from hpcgpu.host import host_memory, process

DAY = datetime.timedelta(days=1)
# Nobody waits for it: what is tested is said at once, or the test never ends.
NEVER_S = 3600
ONE, OTHER = Certificate.make(), Certificate.make()
_ERR_LIB_SYS = 2  # openssl/err.h
SECURE = security(Certificate.make())
BOTH = pytest.mark.parametrize("protocol", ["tcp", "tls"])


def made(ago: datetime.timedelta) -> Certificate:
    return Certificate.make(datetime.datetime.now(datetime.UTC) - ago)


def knock_as_we_do(scheduler: Certificate, comes_with: Certificate) -> Any:
    return knock(scheduler, lambda address: connect_first([address], security(comes_with), NEVER_S, "client"))


@pytest.mark.parametrize("age", [0 * DAY, 3640 * DAY, -DAY / 2], ids=["new", "of ten years ago", "of a clock ahead"])
def test_it_is_good_for_longer_than_any_cluster_lives(age: datetime.timedelta) -> None:
    """A job that joins a cluster of weeks has nothing to renew; a clock may be half a day wrong."""
    certificate = made(age)
    assert knock_as_we_do(certificate, certificate).own_host == "127.0.0.1"


@pytest.mark.parametrize(
    ("age", "message"),
    [
        (3660 * DAY, r"certificate has expired, by this host's clock \({clock}"),
        # OpenSSL 3.6 adds a guess
        (-2 * DAY, r"certificate is not yet valid( or the system clock is incorrect)?, by this host's clock \({clock}"),
        (None, "the certificates do not belong together"),
    ],
)
def test_wrong_certificate_is_reported_at_once(age: datetime.timedelta | None, message: str) -> None:
    """With a wrong date, or that of another cluster."""
    certificate = made(0 * DAY if age is None else age)
    clock = datetime.datetime.now().astimezone().strftime("%F %H:")
    with pytest.raises(TrustError, match=message.format(clock=clock)):
        knock_as_we_do(certificate, Certificate.make() if age is None else certificate)


@pytest.mark.parametrize("age", [0 * DAY, 3660 * DAY], ids=["another cluster's", "expired"])
def test_dasks_own_client_hears_it_at_once(age: datetime.timedelta) -> None:
    ours = made(age)
    theirs = ours if age else Certificate.make()

    async def connect(address: str) -> None:
        async with Client(address, security=security(theirs), asynchronous=True, timeout=NEVER_S):
            pass

    with pytest.raises(FatalCommClosedError, match="TLS certificate does not match") as caught:
        knock(ours, connect)
    assert ("has expired" in str(caught.value.__cause__)) == bool(age)


@pytest.mark.parametrize(
    "certificate",
    [
        Certificate(ONE.cert_pem, OTHER.key_pem),
        Certificate(ONE.cert_pem, ONE.key_pem[:100]),
        Certificate(ONE.cert_pem[:100] + "\n", ONE.key_pem),
        Certificate("no certificate", "no key"),
    ],
    ids=["the key of another", "half a key", "half a certificate", "neither"],
)
def test_one_that_was_damaged_is_an_error_without_the_key(certificate: Certificate) -> None:
    with pytest.raises(TrustError, match="the certificate of this cluster, or its key, cannot be used: ") as caught:
        security(certificate).get_connection_args("client")
    assert not [line for line in certificate.key_pem.splitlines() if line in repr(caught.value)]


def test_a_process_makes_its_tls_contexts_once() -> None:
    """A leader has a nanny for each GPU; a context takes 3 ms."""
    first, second = security(ONE), security(Certificate(ONE.cert_pem, ONE.key_pem))
    assert first.get_connection_args("client") == second.get_connection_args("worker")
    assert first.get_listen_args("scheduler") == second.get_listen_args("worker")
    assert first.get_listen_args("worker") != security(OTHER).get_listen_args("worker")


def test_the_key_lies_in_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is killed while OpenSSL reads it leaves nothing behind."""
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    made = security(Certificate.make())
    assert made.get_listen_args("scheduler")["ssl_context"].cert_store_stats()["x509_ca"] == 1
    assert made.get_connection_args("client")["ssl_context"].cert_store_stats()["x509_ca"] == 1


# --- what one connection leaves in OpenSSL's queue of errors


@pytest.fixture
def crypto() -> ctypes.CDLL:
    """Return the libcrypto of this Python's ssl."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libcrypto" in line}
    if not paths:
        pytest.skip("this Python has its OpenSSL inside")
    return ctypes.CDLL(sorted(paths)[0])


@pytest.fixture
def pair() -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Two ends of a connection between members of a cluster, as tornado has them: non-blocking."""
    trust = security(Certificate.make())
    ends = socket.socketpair()
    listen = trust.get_listen_args("scheduler")["ssl_context"]
    connect = trust.get_connection_args("worker")["ssl_context"]
    server = listen.wrap_socket(ends[0], server_side=True, do_handshake_on_connect=False)
    client = connect.wrap_socket(ends[1], do_handshake_on_connect=False)
    accepting = threading.Thread(target=server.do_handshake)
    accepting.start()
    client.do_handshake()
    accepting.join()
    for end in (server, client):
        end.setblocking(False)
    yield server, client
    server.close()
    client.close()


def test_scheduler_sends_no_session_tickets(pair: tuple[ssl.SSLSocket, ssl.SSLSocket]) -> None:
    """Each connection is made with certificates; OpenSSL's default makes two tickets, for a third of the CPU time."""
    server, client = pair
    server.send(b"first words")
    assert client.recv(100) == b"first words"
    assert (client.version(), client.session.has_ticket) == ("TLSv1.3", False)


def test_a_peer_that_goes_leaves_nothing(crypto: ctypes.CDLL, pair: tuple[ssl.SSLSocket, ssl.SSLSocket]) -> None:
    server, client = pair
    assert {type(server), type(client)} == {scheduler_file.TlsSocket}
    client.send(b"last words")
    assert server.recv(100) == b"last words"
    with pytest.raises(ssl.SSLWantReadError):
        server.recv(1)
    client.close()
    try:
        assert server.recv(1) == b""
    except OSError as e:  # OpenSSL 3.4 and later
        assert e.errno in (errno.EPIPE, errno.ECONNRESET)
    assert crypto.ERR_peek_error() == 0


def test_what_others_leave_is_not_ours_for_long(crypto: ctypes.CDLL, pair: tuple[ssl.SSLSocket, ssl.SSLSocket]) -> None:
    """An error that something else in this thread left fails one call, not all that follow."""
    server, client = pair
    crypto.ERR_new()  # as OpenSSL does when an alert cannot be sent
    crypto.ERR_set_error(_ERR_LIB_SYS, errno.EPIPE, None)
    with pytest.raises(OSError):  # noqa: PT011 - SSLError or BrokenPipeError, by the version
        server.recv(1)
    assert crypto.ERR_peek_error() == 0
    with pytest.raises(ssl.SSLWantReadError):
        server.recv(1)
    client.send(b"x")
    assert server.recv(1) == b"x"


# --- listeners of distributed


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., None]:
    """Limit the listeners of this process to come, for one test."""
    caplog.set_level(logging.WARNING)
    for name in ("tcp", "tls"):
        monkeypatch.setitem(registry.backends, name, registry.backends[name])
    return lambda *limits: compat.limit_handshakes(HandshakeDeadline(*limits))


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The connections whose end, or handshake, was taken note of."""
    streams: list[object] = []
    done = HandshakeDeadline.done
    monkeypatch.setattr(HandshakeDeadline, "done", lambda self, stream: (streams.append(stream), done(self, stream))[1])
    return streams


async def echo(comm: Any) -> None:
    async with asyncio.timeout(scaled(60)):
        while (message := await comm.read()) != "end":
            await comm.write(message)


async def end_of(reader: asyncio.StreamReader) -> str:
    try:
        async with asyncio.timeout(scaled(30)):
            await reader.read()
    except ConnectionResetError:
        return "reset"
    return "closed"


def arguments(protocol: str, way: str) -> dict[str, Any]:
    return {} if protocol == "tcp" else getattr(SECURE, f"get_{way}_args")("worker")


@contextlib.asynccontextmanager
async def listening(protocol: str) -> AsyncIterator[tuple[Any, str, int]]:
    """A listener on this machine, its host and its port."""
    async with listen(f"{protocol}://127.0.0.1", echo, **arguments(protocol, "listen")) as listener:
        host, port = listener.contact_address.rpartition("/")[2].split(":")
        yield listener, host, int(port)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in logged(caplog)]


@BOTH
async def test_many_silent_peers_of_one_address_leave_room_for_another(
    limit: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    """The oldest of them go at once, not at the deadline; and their memory goes back after it."""
    trimmed = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(host_memory, "trim_heap", lambda: loop.call_soon_threadsafe(trimmed.set))
    limit(scaled(600), 8)
    async with listening(protocol) as (listener, host, port):
        other = await asyncio.open_connection(host, port, local_addr=("127.0.0.2", 0))
        silent = [await asyncio.open_connection(host, port) for _ in range(20)]
        assert {await end_of(reader) for reader, _ in silent[:12]} <= {"closed", "reset"}
        comm = await connect(listener.contact_address, timeout=scaled(20), **arguments(protocol, "connection"))
        await comm.write("end")
        await comm.close()
        left = [other, *silent[14:]]
        assert not [reader for reader, _ in left if reader.at_eof()]
        for _, writer in (other, *silent):
            writer.close()
        await asyncio.wait_for(trimmed.wait(), scaled(30))
    assert "127.0.0.1: more than 8 at the same time" in warnings(caplog)[0]


async def test_peers_that_come_all_at_once_are_not_closed(
    limit: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handshakes of a thousand workers are unfinished because this process has had no time for them.

    The memory that they took goes back.
    """
    trimmed, loop = asyncio.Event(), asyncio.get_running_loop()
    monkeypatch.setattr(host_memory, "trim_heap", lambda: loop.call_soon_threadsafe(trimmed.set))
    process.allow_open_files()
    limit(scaled(600))
    async with listening("tcp") as (listener, host, port):
        peers = [await asyncio.open_connection(host, port) for _ in range(600)]
        comm = await connect(listener.contact_address, timeout=scaled(20))
        await comm.write("end")
        await comm.close()
        assert not any(reader.at_eof() for reader, _ in peers)
        assert not trimmed.is_set()
        for _, writer in peers:
            writer.close()
        await asyncio.wait_for(trimmed.wait(), scaled(30))


async def test_peers_that_come_while_the_loop_is_held_are_not_closed(limit: Callable[..., None]) -> None:
    """A hundred workers come while each turn of the loop takes long, for several times the deadline."""
    process.allow_open_files()
    limit(1.0)
    async with listening("tls") as (listener, _, _):
        secure = arguments("tls", "connection")
        coming = [
            asyncio.create_task(connect(listener.contact_address, timeout=scaled(600), **secure)) for _ in range(100)
        ]
        for _ in range(15):  # before they are accepted, before TLS, and within it
            await asyncio.sleep(0)
            time.sleep(0.3)  # noqa: ASYNC251
        comms = await asyncio.gather(*coming)
        for comm in comms:
            await comm.write("end")
            await comm.close()


async def test_peers_with_one_certificate_share_a_dict_of_it(limit: Callable[..., None]) -> None:
    """A scheduler keeps 1 KiB less for each of thousands of connections."""
    limit(scaled(600))
    accepted: list[Any] = []

    async def keep(comm: Any) -> None:
        accepted.append(comm)
        await echo(comm)

    async with listen("tls://127.0.0.1", keep, **arguments("tls", "listen")) as listener:
        secure = arguments("tls", "connection")
        comms = [await connect(listener.contact_address, timeout=scaled(60), **secure) for _ in range(2)]
        await when(lambda: len(accepted) == 2)
        one, other = (comm.extra_info["peercert"] for comm in accepted)
        assert one
        assert one is other
        for comm in comms:
            await comm.write("end")
            await comm.close()


@BOTH
async def test_silent_peers_go_at_the_deadline(
    limit: Callable[[float], None], caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    limit(1.0)
    async with listening(protocol) as (listener, host, port):
        silent = [await asyncio.open_connection(host, port) for _ in range(20)]
        comm = await connect(listener.contact_address, timeout=scaled(20), **arguments(protocol, "connection"))
        ends = await asyncio.gather(*(end_of(reader) for reader, _ in silent))
        assert set(ends) == {"closed"}
        await comm.write("still here")
        assert await comm.read() == "still here"
        await comm.write("end")
        await comm.close()
        for _, writer in silent:
            writer.close()
    (line,) = warnings(caplog)
    assert line == (
        f"connections without a handshake: the last one from {protocol}://127.0.0.1: no handshake within 1 s"
    )


async def test_handshake_deadline_without_the_time_of_a_busy_loop(
    limit: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop with much to do turns slowly, though none of its timers is late for long."""
    accepted, begin = asyncio.Event(), HandshakeDeadline.begin
    monkeypatch.setattr(HandshakeDeadline, "begin", lambda *given: (begin(*given), accepted.set()))
    limit(1.0)
    async with listening("tcp") as (_, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        end = asyncio.create_task(end_of(reader))
        await accepted.wait()
        for _ in range(6):  # it turns six times in more than twice the deadline
            time.sleep(0.4)  # noqa: ASYNC251
            await asyncio.sleep(0)
        assert not end.done()
        assert await end == "closed"
        writer.close()


@BOTH
async def test_garbage_is_counted_and_closed(
    limit: Callable[[float], None], caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    limit(20.0)
    async with listening(protocol) as (_, host, port):
        for _ in range(3):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n" * 9)
            await end_of(reader)
            writer.close()
    (line,) = warnings(caplog)
    assert line.startswith(f"connections without a handshake: the last one from {protocol}://127.0.0.1: ")


@BOTH
@pytest.mark.parametrize("begun", [b"", b"\x16\x03\x01"], ids=["nothing", "a part of a handshake"])
@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_peers_that_have_gone_are_not_logged(
    limit: Callable[[float], None],
    caplog: pytest.LogCaptureFixture,
    forgotten: list[object],
    protocol: str,
    begun: bytes,
    reset: bool,
) -> None:
    """As the processes of a run do when it ends; a stranger who only knocks holds nothing."""

    async def main() -> None:
        limit(20.0)
        async with listening(protocol) as (_, host, port):
            for _ in range(3):
                _, writer = await asyncio.open_connection(host, port)
                writer.write(begun)
                if reset:
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.close()
                await writer.wait_closed()
            await when(lambda: len(forgotten) == 3)

    run(main)
    assert warnings(caplog) == []


async def test_handshakes_at_the_end_are_not_logged(
    limit: Callable[[float], None], caplog: pytest.LogCaptureFixture, forgotten: list[object]
) -> None:
    limit(20.0)
    async with listening("tcp") as (listener, host, port):
        reader, writer = await asyncio.open_connection(host, port)
        await reader.readexactly(8)  # it greets first
        listener.abort_handshaking_comms()  # as distributed.core.Server.close does
        await end_of(reader)
        writer.close()
        await when(lambda: forgotten)
    assert warnings(caplog) == []


async def test_stranger_with_own_certificate_gets_the_tls_reason(limit: Callable[[float], None]) -> None:
    limit(20.0)
    async with listen("tls://127.0.0.1", echo, **arguments("tls", "listen")) as listener:
        stranger = security(Certificate.make()).get_connection_args("worker")
        with pytest.raises(OSError) as told:
            await connect(listener.contact_address, timeout=5, **stranger)
        assert isinstance(told.value.__cause__, ssl.SSLCertVerificationError)


def test_a_user_without_a_home_may_connect_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    assert security_loader.load({"address": "tcp://there:8786"}) is None
    assert capsys.readouterr().err == ""
    with dask.config.set({"distributed.comm.tls.ca-file": "/of/another"}):
        assert security_loader.load({"address": "tls://there:8786"}) is None
    with pytest.raises(ConfigError, match=r"^tls://there:8786: none of .* LocalGPUCluster.attach\('that/folder'\)"):
        security_loader.load({"address": "tls://there:8786"})
    assert "the certificate of tls://there:8786 is not among those of your runs: user " in capsys.readouterr().err

"""Listeners whose peers have to show soon who they are, on real ones of distributed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from distributed.comm import connect, listen, registry
from waiting import logged, run, scaled, when

from hpcgpu.deploy import compat
from hpcgpu.deploy.network.scheduler_file import Certificate, security
from hpcgpu.deploy.processes.stalls import HandshakeDeadline

SECURE = security(Certificate.make())
BOTH = pytest.mark.parametrize("protocol", ["tcp", "tls"])


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[[float], None]:
    """Limit the listeners of this process to come, for one test."""
    caplog.set_level(logging.WARNING)
    for name in ("tcp", "tls"):
        monkeypatch.setitem(registry.backends, name, registry.backends[name])
    return lambda deadline_s: compat.limit_handshakes(HandshakeDeadline(deadline_s))


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
def test_silent_peers_go_at_the_deadline(
    limit: Callable[[float], None], caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    async def main() -> None:
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

    asyncio.run(main())
    (line,) = warnings(caplog)
    assert line == (
        f"connections without a handshake: the last one from {protocol}://127.0.0.1: no handshake within 1 s"
    )


def test_handshake_deadline_without_the_time_of_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop with much to do turns slowly, though none of its timers is late for long."""
    limiter = HandshakeDeadline(1.0)
    monkeypatch.setitem(registry.backends, "tcp", registry.backends["tcp"])
    monkeypatch.setitem(registry.backends, "tls", registry.backends["tls"])

    async def main() -> None:
        accepted = asyncio.Event()
        begin = limiter.begin
        monkeypatch.setattr(limiter, "begin", lambda *given: (begin(*given), accepted.set()))
        compat.limit_handshakes(limiter)
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

    asyncio.run(main())


@BOTH
def test_garbage_is_counted_and_closed(
    limit: Callable[[float], None], caplog: pytest.LogCaptureFixture, protocol: str
) -> None:
    async def main() -> None:
        limit(20.0)
        async with listening(protocol) as (_, host, port):
            for _ in range(3):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET / HTTP/1.0\r\n\r\n" * 9)
                await end_of(reader)
                writer.close()

    asyncio.run(main())
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


@BOTH
def test_handshakes_at_the_end_are_not_logged(
    limit: Callable[[float], None], caplog: pytest.LogCaptureFixture, forgotten: list[object], protocol: str
) -> None:
    async def main() -> None:
        limit(20.0)
        async with listening(protocol) as (listener, host, port):
            reader, writer = await asyncio.open_connection(host, port)
            if protocol == "tcp":
                await reader.readexactly(8)  # it greets first
                listener.abort_handshaking_comms()  # as distributed.core.Server.close does
                await end_of(reader)
            writer.close()
            await writer.wait_closed()
            await when(lambda: forgotten)

    run(main)
    assert warnings(caplog) == []


def test_stranger_with_own_certificate_gets_the_tls_reason(limit: Callable[[float], None]) -> None:
    async def main() -> None:
        limit(20.0)
        async with listen("tls://127.0.0.1", echo, **arguments("tls", "listen")) as listener:
            stranger = security(Certificate.make()).get_connection_args("worker")
            with pytest.raises(OSError) as told:
                await connect(listener.contact_address, timeout=5, **stranger)
            assert isinstance(told.value.__cause__, ssl.SSLCertVerificationError)

    asyncio.run(main())

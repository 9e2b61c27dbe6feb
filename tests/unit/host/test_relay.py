"""A tunnel of many connections: one that breaks leaves the others alone, and when it ends, all have ended."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator

import pytest
from waiting import run

from hpcgpu.host.relay import Mux

RESET = struct.pack("ii", 1, 0)


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


class Tunnel:
    """A port that leads to an echo through two ends, and what connects them."""

    def __init__(self) -> None:
        self.port, self.running = 0, list[asyncio.Task[None]]()
        self.far: asyncio.StreamWriter

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)


@contextlib.asynccontextmanager
async def tunnel() -> AsyncIterator[Tunnel]:
    made, (near, far) = Tunnel(), socket.socketpair()
    target = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = target.sockets[0].getsockname()[1]
    here = Mux(*await asyncio.open_connection(sock=near))
    reader, made.far = await asyncio.open_connection(sock=far)
    there = Mux(reader, made.far, lambda: asyncio.open_connection("127.0.0.1", port))
    server = await asyncio.start_server(here.carry, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    made.running = [asyncio.create_task(here.run()), asyncio.create_task(there.run())]
    try:
        yield made
    finally:
        for task in made.running:
            task.cancel()
        await asyncio.wait(made.running)
        server.close()
        target.close()


async def asked(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes) -> bytes:
    reader, writer = connection
    writer.write(data)
    return await reader.readexactly(len(data))


def test_a_connection_that_is_reset_leaves_the_others_alone() -> None:
    async def body() -> None:
        async with tunnel() as through:
            first, second = await through.connect(), await through.connect()
            assert await asked(first, b"one") == b"one"
            assert await asked(second, b"two") == b"two"
            first[1].write(bytes(8 << 20))  # more than fits into the buffers, and nobody reads what comes back
            await asyncio.sleep(0.1)
            first[1].transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            first[1].transport.abort()
            for _ in range(20):
                assert await asked(second, b"three") == b"three"
            assert not any(task.done() for task in through.running)

    run(body)


@pytest.mark.parametrize("end", ["closed", "cancelled"])
def test_when_the_tunnel_ends_all_its_connections_have_ended(end: str) -> None:
    """Their users would wait for an answer for ever."""

    async def body() -> None:
        async with tunnel() as through:
            connections = [await through.connect() for _ in range(3)]
            for connection in connections:
                assert await asked(connection, b"one") == b"one"
            if end == "closed":
                through.far.close()
            else:
                through.running[0].cancel()
            assert [await reader.read() for reader, _ in connections] == [b"", b"", b""]

    run(body)

"""A tunnel of many connections, and the addresses that a scheduler publishes."""

import asyncio
import contextlib
import socket
import struct
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace

import leaks
import psutil
import pytest
from distributed import Scheduler, Worker
from distributed.comm.addressing import get_address_host

from hpcgpu.deploy import compat
from hpcgpu.deploy.network.dashboard import Tunnel
from hpcgpu.deploy.network.scheduler_file import connect_first, security
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host.addresses import local_address, reachable_addresses
from hpcgpu.host.relay import Mux

RESET = struct.pack("ii", 1, 0)
ALL = ("0.0.0.0", "::")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def tunnel() -> AsyncIterator[SimpleNamespace]:
    """Make a port that leads to an echo through two ends, and what connects them."""
    near, far = socket.socketpair()
    target = await asyncio.start_server(echo, "127.0.0.1", 0)
    port = target.sockets[0].getsockname()[1]
    here = Mux(*await asyncio.open_connection(sock=near))
    reader, writer = await asyncio.open_connection(sock=far)
    there = Mux(reader, writer, lambda: asyncio.open_connection("127.0.0.1", port))
    server = await asyncio.start_server(here.carry, "127.0.0.1", 0)
    entrance = server.sockets[0].getsockname()[:2]
    running = [asyncio.create_task(here.run()), asyncio.create_task(there.run())]
    try:
        yield SimpleNamespace(connect=lambda: asyncio.open_connection(*entrance), running=running, far=writer)
    finally:
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        server.close()
        target.close()


async def asked(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], data: bytes) -> bytes:
    reader, writer = connection
    writer.write(data)
    return await reader.readexactly(len(data))


@pytest.mark.parametrize("turns", range(12))
def test_tunnel_cancelled_while_it_opens_leaves_nothing(turns: int) -> None:
    async def main() -> None:
        opening = asyncio.create_task(Tunnel.open((sys.executable, "-m", "hpcgpu.host.relay", "1")))
        [await asyncio.sleep(0) for _ in range(turns)]
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).close()

    with leaks.nothing_left():
        asyncio.run(main())


async def test_tunnel_whose_relay_fails_tells_its_error() -> None:
    failing = await Tunnel.open(("sh", "-c", "head -c 1000000 /dev/zero >&2; echo refused >&2; exit 3"))
    assert failing._carrying
    await asyncio.wait([failing._carrying])
    assert (await failing.failure()).endswith("refused")
    await failing.close()


async def test_a_connection_that_is_reset_leaves_the_others_alone() -> None:
    async with tunnel() as through:
        first, second = await through.connect(), await through.connect()
        assert await asked(first, b"one") == b"one"
        assert await asked(second, b"two") == b"two"
        first[1].write(bytes(8 << 20))  # more than fits into the buffers
        await first[0].readexactly(1)  # of what comes back; nobody reads the rest
        first[1].transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        first[1].transport.abort()
        for _ in range(20):
            assert await asked(second, b"three") == b"three"
        assert not any(task.done() for task in through.running)


@pytest.mark.parametrize("end", ["closed", "cancelled"])
async def test_when_the_tunnel_ends_all_its_connections_have_ended(end: str) -> None:
    """Their users would wait for an answer for ever."""
    async with tunnel() as through:
        connections = [await through.connect() for _ in range(3)]
        for connection in connections:
            assert await asked(connection, b"one") == b"one"
        if end == "closed":
            through.far.close()
        else:
            through.running[0].cancel()
        assert [await reader.read() for reader, _ in connections] == [b"", b"", b""]


async def test_silent_neighbours_leave_room_in_a_tunnel() -> None:
    async with tunnel() as through:
        silent = [await through.connect() for _ in range(65)]
        assert await asked(await through.connect(), b"one") == b"one"
        assert await silent[0][0].read() == b""  # the one that has waited longest
        assert not silent[-1][0].at_eof()
        for _, other in silent:
            other.close()


async def test_late_data_of_an_ended_connection_opens_no_other() -> None:
    """What a scheduler has refused comes in pieces that are on their way."""
    near, far = socket.socketpair()
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as target:
        port = target.sockets[0].getsockname()[1]
        there = Mux(*await asyncio.open_connection(sock=far), lambda: asyncio.open_connection("127.0.0.1", port))
        running = asyncio.create_task(there.run())
        reader, writer = await asyncio.open_connection(sock=near)
        for frame, end in ((b"\0\0\0\0\0\0\0\1a", 0), (b"\0\0\0\0\0\0\0\1b\0\0\0\1\0\0\0\1c", 1)):
            writer.write(frame)
            assert await reader.readexactly(8) == bytes((0, 0, 0, end, 0, 0, 0, 0))
        writer.close()
        await running


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with both families on one network, and a bridge that is down."""
    stats = {name: SimpleNamespace(isup=name != "br0") for name in ("lo", "ib0", "eth0", "br0")}
    found = {"lo": ["127.0.0.1", "::1"], "eth0": ["fd00::2", "10.0.0.2", "fe80::1%eth0"]}
    found |= {"ib0": ["10.1.0.2"], "br0": ["172.17.0.1"]}
    family = {True: socket.AF_INET6, False: socket.AF_INET}
    facts = {n: [SimpleNamespace(family=family[":" in a], address=a) for a in found[n]] for n in found}
    monkeypatch.setattr(psutil, "net_if_stats", lambda: stats)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: facts)


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(
    ("bound", "interface", "addresses"),
    [
        (ALL, None, {"10.0.0.2", "10.1.0.2", "fd00::2"}),
        (("0.0.0.0",), None, {"10.0.0.2", "10.1.0.2"}),
        (("::",), None, {"fd00::2"}),
        (ALL, "ib0", {"10.1.0.2"}),
        (ALL, "eth0", {"10.0.0.2", "fd00::2"}),
    ],
)
def test_a_nodes_addresses_are_those_on_which_somebody_listens(
    bound: tuple[str, ...], interface: str | None, addresses: set[str]
) -> None:
    found = reachable_addresses(bound, interface)
    assert set(found) == addresses
    assert [":" in a for a in found] == sorted(":" in a for a in found)  # IPv4 first


@pytest.mark.usefixtures("node")
def test_missing_interface_or_address_is_an_error() -> None:
    missing = "interface='hsn0': this node has no such interface with an address; it has: eth0, ib0, lo"
    with pytest.raises(ConfigError, match=missing):
        reachable_addresses(ALL, "hsn0")
    with pytest.raises(LaunchError, match="no interface of this node has an address"):
        reachable_addresses(("::",), "ib0")
    # a run on one node listens on loopback, unless an interface is named
    assert (local_address(None), local_address("lo")) == ("127.0.0.1", "127.0.0.1")
    assert (local_address("eth0"), local_address("ib0")) == ("10.0.0.2", "10.1.0.2")
    with pytest.raises(ConfigError, match=missing):
        local_address("hsn0")


async def test_workers_reach_a_scheduler_by_each_of_its_addresses() -> None:
    loopback, joined = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}, {}
    async with Scheduler(host="", port=0, protocol="tcp", dashboard_address="127.0.0.1:0") as scheduler:
        for bound in compat.bound_hosts(scheduler):
            reached = await connect_first([f"tcp://{loopback[bound]}:{scheduler.port}"], security(None), 10.0)
            async with Worker(reached.address, host=reached.own_host, dashboard_address="127.0.0.1:0") as worker:
                joined[bound] = get_address_host(worker.address)
    assert joined == {"0.0.0.0": "127.0.0.1"} | ({"::": "::1"} if socket.has_dualstack_ipv6() else {})

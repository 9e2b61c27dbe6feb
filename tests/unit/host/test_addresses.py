"""What a scheduler publishes is what answers."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import psutil
import pytest
from distributed import Scheduler, Worker
from distributed.comm.addressing import get_address_host

from hpcgpu.deploy import compat
from hpcgpu.deploy.network.scheduler_file import connect_first, security
from hpcgpu.errors import LaunchError
from hpcgpu.host.addresses import local_address, reachable_addresses

ALL = ("0.0.0.0", "::")


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
    with pytest.raises(LaunchError, match="no interface 'hsn0' on this node; there are: eth0, ib0, lo"):
        reachable_addresses(ALL, "hsn0")
    with pytest.raises(LaunchError, match="no interface of this node has an address"):
        reachable_addresses(("::",), "ib0")
    # a run on one node listens on loopback, unless an interface is named
    assert (local_address(None), local_address("lo")) == ("127.0.0.1", "127.0.0.1")
    assert (local_address("eth0"), local_address("ib0")) == ("10.0.0.2", "10.1.0.2")
    with pytest.raises(LaunchError, match="no interface 'hsn0' on this node; there are: eth0, ib0, lo"):
        local_address("hsn0")


def test_workers_reach_a_scheduler_by_each_of_its_addresses() -> None:
    async def join() -> dict[str, str]:
        async with Scheduler(host="", port=0, protocol="tcp", dashboard_address="127.0.0.1:0") as scheduler:
            loopback = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}
            joined = {}
            for bound in compat.bound_hosts(scheduler):
                reached = await connect_first([f"tcp://{loopback[bound]}:{scheduler.port}"], security(None), 10.0)
                async with Worker(reached.address, host=reached.own_host, dashboard_address="127.0.0.1:0") as worker:
                    joined[bound] = get_address_host(worker.address)
            return joined

    own = {"0.0.0.0": "127.0.0.1"} | ({"::": "::1"} if socket.has_dualstack_ipv6() else {})
    assert asyncio.run(join()) == own

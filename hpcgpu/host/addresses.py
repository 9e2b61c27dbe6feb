"""The IP addresses and interfaces of this machine.

Apart from its topology: psutil takes 20 CPU ms, which a rank that only binds itself need not spend.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from hpcgpu.errors import LaunchError

_LOOPBACK = "127.0.0.1"
_FAMILIES = {"0.0.0.0": socket.AF_INET, "::": socket.AF_INET6}


def reachable_addresses(bound: Sequence[str], interface: str | None = None) -> tuple[str, ...]:
    """Return this node's addresses that other nodes can reach, IPv4 first; raise LaunchError without any.

    ``bound`` are the addresses that a socket listens on (0.0.0.0 and :: mean all of their family); loopback and
    link-local addresses are left out, and with ``interface`` those of other interfaces.
    """
    addresses_of = _addresses_of(interface, [_FAMILIES[host] for host in bound])
    parsed = [ipaddress.ip_address(address) for addresses in addresses_of.values() for address in addresses]
    out = [str(a) for a in parsed if not (a.is_loopback or a.is_link_local or a.is_multicast)]
    if not out:
        have = ", ".join(sorted(addresses_of))
        raise LaunchError(f"no interface of this node has an address that others can reach ({have})")
    return tuple(sorted(out, key=lambda a: ":" in a))


def local_address(interface: str | None) -> str:
    """Return the address for a run on one node: loopback, or the interface's, IPv4 first; LaunchError if none."""
    if interface is None:
        return loopback()
    out = [a for a in _addresses_of(interface)[interface] if not ipaddress.ip_address(a).is_link_local]
    if not out:
        raise LaunchError(f"the interface {interface!r} has no IP address")
    return min(out, key=lambda a: ":" in a)


def loopback() -> str:
    """Return the address of this node's loopback; raise LaunchError if it has no IPv4 address."""
    with socket.socket() as sock:
        try:
            sock.bind((_LOOPBACK, 0))
        except OSError as e:
            raise LaunchError(
                f"this node's loopback has no address {_LOOPBACK}, at which scheduler and dashboard listen ({e}); "
                f"as root: ip link set lo up; ip addr add {_LOOPBACK}/8 dev lo"
            ) from e
    return _LOOPBACK


def usable_interfaces() -> frozenset[str]:
    """Return the interfaces of this node that are up and have an IP address."""
    return frozenset(name for name, addresses in _addresses_of(None).items() if addresses)


def _addresses_of(
    interface: str | None, families: Sequence[socket.AddressFamily] = tuple(_FAMILIES.values())
) -> dict[str, list[str]]:
    """Return the addresses of each interface that is up, or of this one; raise LaunchError if it is not there."""
    up = {name for name, facts in psutil.net_if_stats().items() if facts.isup}
    out = {
        name: [a.address for a in entries if a.family in families]
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }
    if interface is None:
        return out
    if interface not in out:
        raise LaunchError(f"there is no interface {interface!r} on this node; there are: {', '.join(sorted(out))}")
    return {interface: out[interface]}

"""Connections: the protocol for which a process prepares, TLS, copies within a node, the scheduler's file."""

from __future__ import annotations

import importlib.util
import sys

from hpcgpu.errors import LaunchError


def is_ucx_installed() -> bool:
    """Return whether this Python has UCX's connections."""
    return importlib.util.find_spec("distributed_ucxx") is not None


def ucx_missing() -> str:
    """Return the advice if it has none; the caller puts the option or address before it."""
    return (
        f"needs distributed-ucxx, which {sys.executable} has not: pip install 'hpcgpu[ucx]'; or leave protocol out, "
        "which gives tls"
    )


def exposed(protocol: str) -> str:
    """Return a warning about a protocol without encryption; "" for others."""
    if protocol in ("tls", "wss", "inproc"):
        return ""
    return (
        f"protocol {protocol} of the scheduler is not encrypted: everybody who reaches its port, or a worker's, can "
        "run code as you"
    )


def prepare(address: str) -> None:
    """Adapt the connections that an address needs, before the first is made; raise LaunchError without UCX."""
    if not address.startswith(("ucx:", "ucxx:")):
        from hpcgpu.deploy.network import node_copies

        node_copies.adopt()
        return
    if not is_ucx_installed():
        raise LaunchError(f"{address} {ucx_missing()}")
    from hpcgpu.deploy.network import ucx

    ucx.adopt()

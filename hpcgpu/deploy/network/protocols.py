"""Preparing a process for the protocol that it will speak."""

from __future__ import annotations

import importlib.util
import sys

from hpcgpu.errors import LaunchError


def is_ucx_installed() -> bool:
    """Tell whether this Python has UCX's connections."""
    return importlib.util.find_spec("distributed_ucxx") is not None


def ucx_missing() -> str:
    """Return what to do if it has not; the caller names the option or address before it."""
    return (
        f"needs distributed-ucxx, which {sys.executable} has not: pip install 'hpcgpu[ucx]'; or leave protocol out, "
        "which gives tls"
    )


def exposed(protocol: str) -> str:
    """Return what to say of a protocol that is not encrypted; empty: it is."""
    if protocol in ("tls", "wss", "inproc"):
        return ""
    return (
        f"protocol {protocol} of the scheduler is not encrypted: everybody who reaches its port, or a worker's, can "
        "run code as you"
    )


def prepare(address: str) -> None:
    """Make connections of an address's protocol behave as this package expects; called before the first is made.

    Raises
    ------
    LaunchError
        The protocol is UCX, which is not installed.

    """
    if not address.startswith(("ucx:", "ucxx:")):
        return
    if not is_ucx_installed():
        raise LaunchError(f"{address} {ucx_missing()}")
    from hpcgpu.deploy.network import ucx

    ucx.adopt()

"""The protocol of a cluster's connections: what it needs, and a warning about one without encryption."""

from __future__ import annotations

import importlib.util
import sys

from hpcgpu.errors import HpcGpuError, LaunchError


def require_ucx(user: str, error: type[HpcGpuError] = LaunchError) -> None:
    """Raise an error unless this Python has UCX's connections, which an option or address needs."""
    if importlib.util.find_spec("distributed_ucxx") is None:
        raise error(
            f"{user} needs distributed-ucxx, which {sys.executable} has not: pip install '.[ucx]' in a clone "
            "of hpcgpu; or leave protocol out, which gives tls"
        )


def exposed(protocol: str) -> str:
    """Return a warning about a protocol without encryption; "" for others."""
    if protocol in ("tls", "wss", "inproc"):
        return ""
    return (
        f"protocol {protocol} of the scheduler is not encrypted: everybody who reaches its port, or a worker's, can "
        "run code as you"
    )


def prepare(address: str, *, node_copies: bool = True) -> None:
    """Adapt the connections that an address needs, before the first is made; raise LaunchError without UCX."""
    if not address.startswith(("ucx:", "ucxx:")):
        from hpcgpu.deploy.network.node_copies import adopt, this_process

        adopt()
        this_process.allowed &= node_copies  # a process of two clusters does what both allow
        return
    require_ucx(address)
    from hpcgpu.deploy.network import ucx

    ucx.adopt()

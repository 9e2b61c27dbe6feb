"""Connections: the protocol for which a process prepares, TLS, copies within a node, the scheduler's file."""

from hpcgpu.deploy.network.protocol import exposed, prepare, require_ucx

__all__ = ["exposed", "prepare", "require_ucx"]

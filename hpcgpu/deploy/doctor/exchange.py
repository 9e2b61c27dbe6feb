"""Exchange files between the login node and the doctor's nodes, in a private folder in the shared home."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hpcgpu.errors import HpcGpuError
from hpcgpu.host import private
from hpcgpu.host.knocking import Endpoint
from hpcgpu.plan.doctor.facts import Launcher, NodeFacts
from hpcgpu.plan.doctor.nodes import NOT_SHARED

ORDER, LAUNCHER, KNOCKED, CERTIFICATE = "order", "launcher", "knocked", "certificate"
_LISTENS, _NODE = "listens-", "node-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The nodes' task."""

    token: str  # a secret of the trial
    nodes: int
    run: str  # a run document


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """A listening node."""

    host: str
    where: tuple[Endpoint, ...]
    no_ucx: str = ""  # why UCX does not listen; "": it does


def write(folder: Path, name: str, value: object) -> None:
    """Write facts into the trial's folder, atomically."""
    private.write(folder / name, msgspec.json.encode(value).decode())


def write_listening(folder: Path, value: Listening) -> None:
    """Write the addresses at which this node listens."""
    write(folder, f"{_LISTENS}{value.host}", value)


def write_node(folder: Path, value: NodeFacts) -> None:
    """Write this node's facts."""
    write(folder, f"{_NODE}{value.host}", value)


def read_order(folder: Path) -> Order:
    """Return the nodes' task; raise HpcGpuError if the folder is not here, because the home is not shared."""
    try:
        return msgspec.json.decode(private.read(folder / ORDER), type=Order)
    except FileNotFoundError as e:
        raise HpcGpuError(f"{os.uname().nodename} has no {folder}: {NOT_SHARED}, or the doctor has ended") from e


def read_listening(folder: Path) -> tuple[Listening, ...]:
    """Return the nodes that listen."""
    found = sorted(folder.glob(f"{_LISTENS}*"))
    return tuple(msgspec.json.decode(private.read(path), type=Listening) for path in found)


def read_nodes(folder: Path) -> tuple[NodeFacts, ...]:
    """Return the facts of the nodes that have answered."""
    found = sorted(folder.glob(f"{_NODE}*"))
    return tuple(msgspec.json.decode(private.read(path), type=NodeFacts) for path in found)


def read_launcher(folder: Path) -> Launcher | None:
    """Return the launcher of the ranks; None: the job has not come so far."""
    path = folder / LAUNCHER
    return msgspec.json.decode(private.read(path), type=Launcher) if path.exists() else None

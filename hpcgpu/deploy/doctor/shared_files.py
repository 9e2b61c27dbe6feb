"""The files that the login node and the doctor's nodes write for each other, in a private folder in the shared home."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from hpcgpu.deploy.doctor.connect import Endpoint
from hpcgpu.errors import HpcGpuError
from hpcgpu.host import private
from hpcgpu.plan.doctor.facts import Launcher, NodeFacts
from hpcgpu.plan.doctor.nodes import NOT_SHARED

ORDER, LAUNCHER, CONNECTED = "order", "launcher", "connected"
LISTENS, NODE = "listens-", "node-"  # with the node's name
Content = TypeVar("Content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The nodes' task."""

    token: str  # a secret of this job
    nodes: int
    run: str  # a run document


def write(folder: Path, name: str, value: object) -> None:
    """Write facts into the job's folder, atomically."""
    private.write(folder / name, msgspec.json.encode(value).decode())


def read_order(folder: Path) -> Order:
    """Read the nodes' task; raise HpcGpuError if the folder is missing, because the home is not shared."""
    try:
        return msgspec.json.decode(private.read(folder / ORDER), type=Order)
    except FileNotFoundError as e:
        raise HpcGpuError(f"{os.uname().nodename} has no {folder}: {NOT_SHARED}, or the doctor has ended") from e


def read_listening(folder: Path) -> dict[str, tuple[Endpoint, ...]]:
    """Read the endpoints of the nodes that listen, by host."""
    paths = sorted(folder.glob(f"{LISTENS}*"))
    return {
        p.name.removeprefix(LISTENS): msgspec.json.decode(private.read(p), type=tuple[Endpoint, ...]) for p in paths
    }


def read_nodes(folder: Path) -> tuple[NodeFacts, ...]:
    """Read the facts of the nodes that have answered."""
    return _read_all(folder, NODE, NodeFacts)


def read_launcher(folder: Path) -> Launcher | None:
    """Read the launcher of the ranks; None before the job has written it."""
    return next(iter(_read_all(folder, LAUNCHER, Launcher)), None)


def _read_all(folder: Path, prefix: str, kind: type[Content]) -> tuple[Content, ...]:
    return tuple(msgspec.json.decode(private.read(path), type=kind) for path in sorted(folder.glob(f"{prefix}*")))

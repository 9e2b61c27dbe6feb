"""The scheduler file, by which a cluster object outside finds the scheduler, and single requests to that scheduler.

It is in a private folder of the run, on the shared file system.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from distributed.core import rpc

from hpcgpu.deploy.network.connect_first import connect_first
from hpcgpu.deploy.network.tls import Certificate, secret, security
from hpcgpu.errors import HpcGpuError, LaunchError, TrustError
from hpcgpu.host import private

_NONCE = "nonce"
_FILE = "scheduler"
_PROGRESS = "progress"
_LIFE = "life"
_ANSWER_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerFile:
    """The file's content. Rank 0 writes it when the workers are there, without workers when the scheduler is."""

    addresses: tuple[str, ...]
    node: str
    job_id: str = ""
    restart_count: int = 0  # the number of the job's life: a requeued job keeps its id
    cert: str = ""
    key: str = field(default="", repr=False)
    # written to the folder by the submitting object: another run's file has another one
    nonce: str = field(default="", repr=False)
    dashboard_port: int = 0
    dashboard_secret: str = field(default="", repr=False)

    @property
    def certificate(self) -> Certificate | None:
        """The cluster's certificate; None without TLS."""
        return Certificate(self.cert, self.key) if self.cert else None


def make_folder(home: Path) -> Path:
    """Make a new run's folder below ``home``, with a nonce; raise HpcGpuError if it is not writable or not private."""
    try:
        private.make_folder(home)
        folder = private.make_folder(home / secrets.token_hex(8))
        private.write(folder / _NONCE, secret())
    except OSError as e:
        raise HpcGpuError(
            f"a cluster's files cannot be written to {home}: {e.strerror}. They need a home folder (HOME) that can be "
            "written, has room, and is there on the nodes, too"
        ) from e
    return folder


def publish(folder: Path, content: SchedulerFile) -> None:
    """Write the file with the folder's nonce; called by rank 0."""
    # Its restart_count is at least one more than that of the life before: PBS reruns a job under its id, and no
    # variable shows it.
    life = folder / _LIFE
    count = max(content.restart_count, int(life.read_text()) + 1 if life.exists() else 0)
    private.write(life, str(count))
    facts = asdict(content) | {"nonce": private.read(folder / _NONCE), "restart_count": count}
    private.write(folder / _FILE, json.dumps(facts))


def retract(folder: Path, *, forever: bool) -> None:
    """Remove secrets at the end of the job: a client that was killed cannot do it."""
    # forever: the client is gone. Otherwise the nonce stays: a requeued job publishes again.
    for name in (_FILE, _NONCE) if forever else (_FILE,):
        (folder / name).unlink(missing_ok=True)


def report_progress(folder: Path, workers: int) -> None:
    """Write how many workers have registered, for a client that waits for the file; called by rank 0."""
    private.write(folder / _PROGRESS, str(workers))


def read_progress(folder: Path) -> int:
    """Return how many workers have registered; 0 before rank 0 has written it."""
    try:
        return int((folder / _PROGRESS).read_text())
    except FileNotFoundError:
        return 0


def read(folder: Path) -> SchedulerFile | None:
    """Return the file's content; None if there is no file yet.

    Raises OSError if the folder is gone, HpcGpuError if others may change the file, TrustError if another run or
    another version of hpcgpu has written it (with the path to the wrong value).
    """
    # a listing makes NFS ask the server; its cache may answer for a single name
    if _FILE not in {p.name for p in folder.iterdir()}:
        return None
    try:
        content = _parse(private.read(folder / _FILE))
    except ValueError as e:
        raise TrustError(f"{folder / _FILE} is damaged, or of another version of hpcgpu: {e}") from e
    if content.nonce != private.read(folder / _NONCE):
        raise TrustError(f"{folder / _FILE} was not written by the scheduler of this run: its nonce is another one")
    return content


def _parse(text: str) -> SchedulerFile:
    import msgspec  # 10 to 30 ms, which the scheduler need not pay: it only writes the file

    facts = json.loads(text)
    try:
        content = msgspec.convert(facts, SchedulerFile)
    except msgspec.MsgspecError as e:  # a ValueError from msgspec 0.22 on
        raise ValueError(str(e)) from e
    if more := facts.keys() - {field.name for field in fields(SchedulerFile)}:
        raise ValueError(f"holds more than this hpcgpu reads - at `$.{min(more)}`")
    return content


async def say_goodbye(folder: Path) -> bool:
    """Have the scheduler end its run; return False if it cannot be reached from here."""
    return await _call(folder, lambda scheduler: scheduler.hpcgpu_lease(goodbye=True)) is not None


async def worker_names(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the registered workers; None if the scheduler cannot be reached from here."""
    facts = await _call(folder, lambda scheduler: scheduler.identity())
    return None if facts is None else tuple(str(worker["name"]) for worker in facts["workers"].values())


async def _call(folder: Path, question: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return the scheduler's answer; None without a scheduler or an answer."""
    content = await asyncio.to_thread(read, folder)
    if content is None:
        return None
    trust = security(content.certificate)
    try:
        address = (await connect_first(content.addresses, trust, _ANSWER_S, "client")).address
        async with rpc(address, connection_args=trust.get_connection_args("client")) as scheduler:
            return await asyncio.wait_for(question(scheduler), _ANSWER_S)
    except (OSError, TimeoutError, LaunchError):
        return None

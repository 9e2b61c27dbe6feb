"""Send one RPC to the scheduler of another process's run."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from distributed.core import rpc

from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.network.connect_first import connect_first
from hpcgpu.deploy.network.tls import security
from hpcgpu.errors import LaunchError

_ANSWER_S = 3.0


async def say_goodbye(folder: Path) -> bool:
    """Have the scheduler end its run; return False if it cannot be reached from here."""
    return await _call(folder, lambda scheduler: scheduler.hpcgpu_lease(goodbye=True)) is not None


async def worker_names(folder: Path) -> tuple[str, ...] | None:
    """Return the names of the registered workers; None if the scheduler cannot be reached from here."""
    known = await _call(folder, lambda scheduler: scheduler.identity())
    return None if known is None else tuple(str(worker["name"]) for worker in known["workers"].values())


async def _call(folder: Path, question: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return the scheduler's answer; None without a scheduler or an answer."""
    content = await asyncio.to_thread(scheduler_file.read, folder)
    if content is None:
        return None
    trust = security(content.certificate)
    try:
        address = (await connect_first(content.addresses, trust, _ANSWER_S, "client")).address
        async with rpc(address, connection_args=trust.get_connection_args("client")) as scheduler:
            return await asyncio.wait_for(question(scheduler), _ANSWER_S)
    except (OSError, TimeoutError, LaunchError):
        return None

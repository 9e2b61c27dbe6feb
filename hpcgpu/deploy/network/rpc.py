"""One-shot RPCs to the scheduler of another process's run."""

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
    """Have the scheduler end its run; False when it cannot be reached from here."""
    return await _call(folder, lambda scheduler: scheduler.hpcgpu_lease(goodbye=True)) is not None


async def count_workers(folder: Path) -> int | None:
    """Return how many workers the scheduler has; None when it cannot be reached from here."""
    cores = await _call(folder, lambda scheduler: scheduler.ncores())
    return None if cores is None else len(cores)


async def _call(folder: Path, question: Callable[[Any], Awaitable[Any]]) -> Any:  # noqa: ANN401
    """Return the scheduler's answer; None when there is no scheduler yet, or it does not answer."""
    content = scheduler_file.read(folder)
    if content is None:
        return None
    trust = security(content.certificate)
    try:
        address = (await connect_first(content.addresses, trust, _ANSWER_S, "client")).address
        async with rpc(address, connection_args=trust.get_connection_args("client")) as scheduler:
            return await asyncio.wait_for(question(scheduler), _ANSWER_S)
    except (OSError, TimeoutError, LaunchError):
        return None

"""The cluster object's side of the lease: signs of life to the scheduler, and a goodbye."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

# Several signs fit into the shortest grace that makes sense; each is one small message.
_SIGNS_PER_GRACE = 6
_LONGEST_S = 5.0


class Holder:
    """Renews the lease in the background until it is given up.

    Parameters
    ----------
    scheduler : rpc of distributed
        Connection pool to the scheduler.
    grace_s : float
        How long the scheduler waits for a sign.
    lost : callable
        Called with the reason, once, when the scheduler has not answered for ``grace_s``.

    """

    def __init__(self, scheduler: Any, grace_s: float, lost: Callable[[str], Awaitable[None]]) -> None:  # noqa: ANN401
        self._scheduler, self._grace_s, self._lost = scheduler, grace_s, lost
        self._task = asyncio.create_task(self._renew())

    async def goodbye(self) -> None:
        """Give the lease up: the job ends at once."""
        self._task.cancel()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(5):
                await self._scheduler.hpcgpu_lease(goodbye=True)

    async def _renew(self) -> None:
        every_s = min(self._grace_s / _SIGNS_PER_GRACE, _LONGEST_S)
        loop = asyncio.get_running_loop()
        heard, reason = loop.time(), ""
        while loop.time() - heard < self._grace_s:
            try:
                async with asyncio.timeout(self._grace_s):
                    await self._scheduler.hpcgpu_lease()
                heard = loop.time()
            except (OSError, TimeoutError) as e:
                reason = str(e) or type(e).__name__
            await asyncio.sleep(every_s)
        await self._lost(reason)

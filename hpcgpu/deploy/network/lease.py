"""The cluster object's side of the lease: signs of life to the scheduler, and a goodbye."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcgpu.deploy.network.lease_file import is_detached, renew
from hpcgpu.host import log

# Several signs fit into the shortest grace that makes sense; each is one small message.
_SIGNS_PER_GRACE = 6
_LONGEST_S = 5.0
_ANSWER_S = 5.0


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
    is_given_up : callable
        True once somebody has detached the run: a sign of life would take the lease again.

    """

    def __init__(
        self,
        scheduler: Any,  # noqa: ANN401
        grace_s: float,
        lost: Callable[[str], None],
        is_given_up: Callable[[], bool],
    ) -> None:
        self._scheduler, self._grace_s = scheduler, grace_s
        self._lost, self._is_given_up = lost, is_given_up
        self._task = asyncio.create_task(self._renew())

    def stop(self) -> None:
        """Give no more signs: others may."""
        self._task.cancel()

    async def goodbye(self) -> None:
        """Give the lease up: the job ends at once."""
        self.stop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await self._scheduler.hpcgpu_lease(goodbye=True)

    async def detach(self) -> None:
        """Give the lease up on purpose: the job runs on, and nobody needs to be heard from.

        Raises
        ------
        OSError, TimeoutError
            The scheduler has not heard it.

        """
        async with asyncio.timeout(_ANSWER_S):
            await self._scheduler.hpcgpu_lease(detach=True)
        self.stop()

    async def _renew(self) -> None:
        every_s = interval_s(self._grace_s)
        loop = asyncio.get_running_loop()
        heard, reason = loop.time(), ""
        while loop.time() - heard < self._grace_s:
            try:
                if not await asyncio.to_thread(self._is_given_up):
                    async with asyncio.timeout(self._grace_s):
                        await self._scheduler.hpcgpu_lease()
                heard = loop.time()
            except (OSError, TimeoutError) as e:
                reason = str(e) or type(e).__name__
            await asyncio.sleep(every_s)
        self._lost(reason)


def interval_s(grace_s: float) -> float:
    """Return how often a sign of life is due."""
    return min(grace_s / _SIGNS_PER_GRACE, _LONGEST_S)


async def keep_touched(folder: Path, grace_s: float) -> None:
    """Renew the lease that the client took before the submission, until it is gone."""
    while True:
        try:
            if not await asyncio.to_thread(is_detached, folder):
                await asyncio.to_thread(renew, folder)
        except FileNotFoundError:
            return
        except OSError as e:  # a file server that is away for a moment
            log.say(f"the lease in {folder} could not be renewed: {e}")
        await asyncio.sleep(interval_s(grace_s))

"""The cluster object's side of the lease: signs of life to the scheduler, and a goodbye."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcgpu.deploy.network.lease_file import is_detached, renew
from hpcgpu.host import log
from hpcgpu.model.backoff import Backoff
from hpcgpu.supervise import tasks
from hpcgpu.supervise.rounds import reason_of

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
        self._heard_s, self._reason = asyncio.get_running_loop().time(), ""
        every = Backoff(longest_s=interval_s(grace_s))
        self._renewing = tasks.keep(self._renew, "the signs of life to the scheduler", backoff=every)

    def stop(self) -> None:
        """Give no more signs: others may."""
        self._renewing.cancel()

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

    async def _renew(self) -> bool:
        """Give a sign, and wait until the next is due; return whether there have been none for too long."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._heard_s >= self._grace_s:
            self._lost(self._reason)
            return True
        try:
            if not await asyncio.to_thread(self._is_given_up):
                async with asyncio.timeout(self._grace_s):
                    await self._scheduler.hpcgpu_lease()
            self._heard_s = loop.time()
        except Exception as e:
            self._reason = str(e) or reason_of(e)
            if not isinstance(e, (OSError, TimeoutError)):
                raise
        await asyncio.sleep(interval_s(self._grace_s))
        return False


def interval_s(grace_s: float) -> float:
    """Return how often a sign of life is due."""
    return min(grace_s / _SIGNS_PER_GRACE, _LONGEST_S)


def keep_touched(folder: Path, grace_s: float) -> tasks.Loop:
    """Renew the lease that the client took before the submission, until it is gone."""
    every_s = interval_s(grace_s)

    async def touch() -> bool:
        try:
            if not await asyncio.to_thread(is_detached, folder):
                await asyncio.to_thread(renew, folder)
        except FileNotFoundError:
            return True
        except OSError as e:  # a file server that is away for a moment
            log.say(f"the lease in {folder} could not be renewed: {e}")
        await asyncio.sleep(every_s)
        return False

    return tasks.keep(touch, f"the signs of life in {folder}", backoff=Backoff(longest_s=every_s))

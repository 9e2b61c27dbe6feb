"""The client's side of the lease: signs of life to the scheduler, and before that by a file in the run's folder.

The client touches the file until there is a scheduler. A job may start hours after its client and the guard have died:
it checks the file first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hpcgpu import supervise
from hpcgpu.host import private
from hpcgpu.model.waits import Backoff
from hpcgpu.supervise import reason_of

_LEASE = "lease"
_DETACHED = "detached"
# Signs of life within the grace; each is one small message.
_SIGNS_PER_GRACE = 6
_LONGEST_S = 5.0
_ANSWER_S = 5.0


class LeaseHolder:
    """Renews the lease in the background until it is given up; ``scheduler`` is distributed's rpc.

    ``lost`` is called once, with the reason, if the scheduler has not answered for ``grace_s``. ``is_given_up`` returns
    whether the run was detached: a sign of life would take the lease again.
    """

    def __init__(
        self, scheduler: Any, grace_s: float, lost: Callable[[str], None], is_given_up: Callable[[], bool]
    ) -> None:
        self._scheduler, self._grace_s = scheduler, grace_s
        self._lost, self._is_given_up = lost, is_given_up
        self._heard_s, self._reason = asyncio.get_running_loop().time(), ""
        every = Backoff(longest_s=interval_s(grace_s))
        self._renewing = supervise.Loop(self._renew, "the loop that gives the scheduler signs of life", backoff=every)

    def stop(self) -> None:
        """Stop the signs of life; other holders may go on."""
        self._renewing.cancel()

    async def goodbye(self) -> None:
        """Give the lease up: the job ends at once."""
        self.stop()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(_ANSWER_S):
                await self._scheduler.hpcgpu_lease(goodbye=True)

    async def detach(self) -> None:
        """Give the lease up on purpose: the job goes on without a client; OSError or TimeoutError without an answer."""
        async with asyncio.timeout(_ANSWER_S):
            await self._scheduler.hpcgpu_lease(detach=True)
        self.stop()

    async def _renew(self) -> bool:
        """Send a sign, wait until the next is due; return whether the scheduler has been silent for too long."""
        loop = asyncio.get_running_loop()
        if loop.time() - self._heard_s >= self._grace_s:
            self._lost(self._reason)
            return True
        try:
            if not await supervise.to_thread(self._is_given_up):
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
    """Return the interval of signs of life."""
    return min(grace_s / _SIGNS_PER_GRACE, _LONGEST_S)


def keep_touched(folder: Path, grace_s: float) -> supervise.Loop:
    """Renew the lease that the client took before the submission, until its file is gone."""
    every_s = interval_s(grace_s)

    async def touch() -> bool:
        if not await supervise.to_thread(_is_kept, folder):
            return True
        await asyncio.sleep(every_s)  # a failure, as of a file server that is away for a moment, is logged and retried
        return False

    return supervise.Loop(touch, f"the loop that gives signs of life in {folder}", backoff=Backoff(longest_s=every_s))


def touch(folder: Path) -> None:
    """Take the lease, before the client submits; raise FileNotFoundError if the folder is gone."""
    (folder / _LEASE).touch(mode=0o600)


def renew(folder: Path) -> None:
    """Renew the lease, every few seconds; make no file, but raise FileNotFoundError if lease or folder is gone."""
    os.utime(folder / _LEASE)


def _is_kept(folder: Path) -> bool:
    """Renew the lease, unless it was given up; return False if its file is gone, as when the run has ended."""
    with contextlib.suppress(FileNotFoundError):
        if not is_detached(folder):
            renew(folder)
        return True
    return False


def detach(folder: Path) -> None:
    """Give the lease up on purpose: jobs of this run need no client."""
    (folder / _DETACHED).touch(mode=0o600)


def is_detached(folder: Path) -> bool:
    """Return whether the client has given the lease up on purpose."""
    return bool(private.mode_of(folder / _DETACHED))


def is_held(folder: Path, grace_s: float) -> bool:
    """Return whether a job of this run has a client; its rank 0 calls this before it starts anything.

    True if the client has touched the lease within ``grace_s`` seconds, or has detached. True also without a lease
    file: then the folder's maker uses none, and the scheduler's lease has to do.
    """
    if is_detached(folder):
        return True
    try:
        # the file server dates both: clocks of nodes differ; NFS's cache may answer a plain stat(), open() asks it
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".now-") as now, (folder / _LEASE).open() as lease:
            os.utime(now.fileno())
            return os.fstat(now.fileno()).st_mtime - os.fstat(lease.fileno()).st_mtime <= grace_s
    except FileNotFoundError:
        return bool(private.mode_of(folder))


def take_up(folder: Path) -> None:
    """Take the lease of a run that was detached: it ends with its new client."""
    touch(folder)
    (folder / _DETACHED).unlink(missing_ok=True)

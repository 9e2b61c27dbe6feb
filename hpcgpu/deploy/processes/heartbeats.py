"""Workers without heartbeats whose connections are open: a frozen node, a suspended job, a task that holds the GIL.

A node's kernel acknowledges for stopped processes, so that no connection breaks. distributed gives such a worker up
after 5 minutes (worker-ttl, 2026.8.0). The batch system may know more, and earlier: it is asked about their jobs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import time
from typing import Any

from distributed import Scheduler

from hpcgpu.supervise import tasks

# A worker sends a heartbeat each 0.5 s, one of a thousand each 6 s (distributed 2026.8.0).
_SILENT_S = 20.0
_LOOK_S = 5.0


def silent_workers(scheduler: Scheduler) -> list[str]:
    """Return the addresses of workers that have not been heard from for long (``hpcgpu_silent``)."""
    now = time()
    return [address for address, worker in scheduler.workers.items() if now - worker.last_seen > _SILENT_S]


class HeartbeatMonitor:
    """Asks the scheduler which workers are silent, until it is stopped.

    Parameters
    ----------
    scheduler : callable
        Returns the connection to the present scheduler.
    changed : callable
        Called when a worker has fallen silent or is heard again.
    every_s : float
        Seconds between two questions.

    Attributes
    ----------
    silent : frozenset of str
        The workers' addresses.

    """

    def __init__(self, scheduler: Callable[[], Any], changed: Callable[[], None], every_s: float = _LOOK_S) -> None:
        self.silent = frozenset[str]()
        self._scheduler, self._changed, self._every_s = scheduler, changed, every_s
        self._listening = tasks.keep(self._listen, "the look for workers that have fallen silent")

    async def _listen(self) -> None:
        await asyncio.sleep(self._every_s)
        try:
            found = frozenset(await self._scheduler().hpcgpu_silent())
        except OSError:
            return  # the cluster object looks for its scheduler
        if found != self.silent:
            self.silent = found
            self._changed()

    def stop(self) -> None:
        """Ask no more."""
        self._listening.cancel()

"""The summary of a cluster: the use of its run, while it runs and after its end."""

from __future__ import annotations

import asyncio
from typing import Any

from hpcgpu.errors import JobError
from hpcgpu.plan.views.summary import Summary
from hpcgpu.supervise.failure_log import reason_of

# The scheduler waits 1 s at most for the workers' last heartbeats.
_ANSWER_S = 3.0


class LastSummary:
    """The newest summary from the scheduler. The event loop's thread asks; any thread may read."""

    def __init__(self, kind: str) -> None:
        self._kind = kind  # name of the cluster's class, for errors
        self._last: Summary | str = "it has not been started"

    async def ask(self, scheduler: Any) -> None:
        """Ask the scheduler (distributed's rpc, or None); an error is kept as the reason and ends nothing else."""
        if scheduler is None:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                self._last = Summary.read(await scheduler.hpcgpu_summary())
        except Exception as e:  # of a connection that is gone, or of a scheduler that closes
            if not isinstance(self._last, Summary):
                self._last = f"its scheduler does not answer: {reason_of(e)}"

    def get(self) -> Summary:
        """Return the newest summary; raise JobError, with the reason, if there is none."""
        if isinstance(self._last, str):
            raise JobError(f"this {self._kind} has no summary: {self._last}")
        return self._last

"""A cluster that says what it has used, while it runs and after its end."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed.deploy.cluster import Cluster

from hpcgpu.errors import JobError
from hpcgpu.plan.views.summary import Summary
from hpcgpu.supervise.rounds import reason_of

# The scheduler waits 1 s at most for the workers' last heartbeats.
_ANSWER_S = 3.0


class SummarisedCluster(Cluster):
    """distributed's interface to a cluster, and the use that its run made of the GPUs."""

    scheduler_comm: Any  # distributed's
    _last_summary: Summary | str = "it has not been started"

    def summary(self) -> Any:  # noqa: ANN401 - a coroutine of an asynchronous cluster
        """Return what was used: GPU hours, busy share, bytes moved and peaks by tier, restarts; and what to ask for.

        It answers after :meth:`close`, too, with the figures of then.

        Returns
        -------
        hpcgpu.plan.views.summary.Summary
            It prints as a few lines, ``.as_dict()`` and ``.as_json()`` have the figures; an awaitable of it where the
            cluster is asynchronous.

        Raises
        ------
        JobError
            There is none: the scheduler was never reached, or is lost.

        """
        return self.sync(self._summary) if self.asynchronous or self._scheduler_answers else self._remembered()

    @property
    def _scheduler_answers(self) -> bool:
        return bool(self.status.name == "running" and self.scheduler_comm is not None)

    async def _summary(self) -> Summary:
        if self._scheduler_answers:
            await self._remember_summary()
        return self._remembered()

    async def _remember_summary(self) -> None:
        """Ask once more before the end; what cannot be had ends nothing else."""
        if self.scheduler_comm is None:
            return
        try:
            async with asyncio.timeout(_ANSWER_S):
                self._last_summary = Summary.read(await self.scheduler_comm.hpcgpu_summary())
        except Exception as e:  # of a connection that is gone, or of a scheduler that closes
            if not isinstance(self._last_summary, Summary):
                self._last_summary = f"its scheduler does not answer: {reason_of(e)}"

    def _remembered(self) -> Summary:
        if isinstance(self._last_summary, str):
            raise JobError(f"this {type(self).__name__} has no summary: {self._last_summary}")
        return self._last_summary

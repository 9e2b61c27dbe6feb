"""Adaptivity for jobs that wait in a queue: distributed's target, in whole jobs, and slow to give up what it has."""

from __future__ import annotations

from typing import Any

from distributed.deploy.adaptive import Adaptive

from hpcgpu.model.backoff import Backoff
from hpcgpu.supervise.rounds import Rounds

# distributed looks each second and gives up after three: a job that waited an hour for its nodes would be lost.
INTERVAL = "5s"
WAIT_COUNT = 12


class JobAdaptive(Adaptive):
    """Wants as many workers as the scheduler has work for, between ``minimum`` and ``maximum``.

    More are asked for at once; fewer only after the scheduler has wanted fewer ``wait_count`` times in a row.
    Which jobs go, and that young pending ones stay, is decided by plan.reconcile.
    """

    def __init__(self, cluster: Any, interval: str = INTERVAL, wait_count: int = WAIT_COUNT, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(cluster, interval=interval, wait_count=wait_count, **kwargs)
        self._fewer = 0
        every_s = self.interval or 0.0
        self._rounds = Rounds("the look for how many workers there is work for", Backoff(every_s, every_s))

    async def adapt(self) -> None:
        """Look once; called by distributed in intervals, whatever is raised: it would say it each time."""
        try:
            await self._adapt()
        except Exception as e:
            self._rounds.failed(e)
        else:
            self._rounds.went_well()

    async def _adapt(self) -> None:
        target, wanted = await self.safe_target(), self.cluster.wanted_workers
        self._fewer = self._fewer + 1 if target < wanted else 0
        if target > wanted or self._fewer >= self.wait_count:
            self._fewer = 0
            await self.cluster.adapt_to(target)

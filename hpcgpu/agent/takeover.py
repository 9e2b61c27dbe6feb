"""The leader after the first: the workers of a dead leader's node start again under the same names."""

from __future__ import annotations

import asyncio
import time

from hpcgpu.agent.follower import Estate
from hpcgpu.agent.leader import Leader, Post, scheduler_rpc, worker_names
from hpcgpu.errors import LaunchError
from hpcgpu.host import log

_ASK_S = 0.05


class Heir(Leader):
    """Does what the node's first leader did, for the workers that it had."""

    def __init__(self, post: Post, estate: Estate, rank: int) -> None:
        super().__init__(post)
        self._estate, self._rank = estate, rank

    async def start_workers(self) -> None:
        """Start the workers when the scheduler has noticed the death of those before."""
        names = {spec.name for _, spec in self.post.workers}
        await self._wait_for(names)
        await super().start_workers()
        count, after_s = len(names), time.monotonic() - self._estate.since_s
        log.say(
            f"{self.post.node}: the leader died; rank {self._rank} leads, and {count} "
            f"worker{'s are' if count != 1 else ' is'} back after {after_s:.1f} s"
        )

    async def _wait_for(self, names: set[str]) -> None:
        """Wait until nobody has these names: a worker whose name is taken is refused (distributed 2026.8.0)."""
        deadline_s = self.post.run.settings.death_timeout_s
        taken = names
        try:
            async with asyncio.timeout(deadline_s), scheduler_rpc(self.post.scheduler, deadline_s) as scheduler:
                while taken := names & await worker_names(scheduler):
                    await asyncio.sleep(_ASK_S)
        except TimeoutError:
            raise LaunchError(
                f"{self.post.node}: the leader died, but within {deadline_s:g} s the scheduler did not lose its "
                f"workers {', '.join(sorted(taken))}"
            ) from None

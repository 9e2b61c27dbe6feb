"""The registered workers of a cluster object, as its jobs see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcgpu import supervise
from hpcgpu.plan.jobs import End, read_member_name

_LOOK_S = 5.0


@dataclass(frozen=True, slots=True)
class JobWorkers:
    """The registered workers of one job."""

    addresses: tuple[str, ...] = ()
    restarts: int = 0  # of their job, as their names show
    silent: bool = False  # no recent heartbeat of any of them


NO_WORKERS = JobWorkers()


@dataclass(slots=True, kw_only=True)
class SchedulerView:
    """The scheduler and workers of a cluster object, for its jobs. Any thread may call :meth:`present`."""

    scheduler: Callable[[], Any]  # return the connection pool to the present scheduler
    workers: Callable[[], Mapping[str, Any]]  # return the registered workers by address, with the scheduler's facts
    searching: Callable[[], bool]  # whether the scheduler does not answer, and is searched
    changed: Callable[[], object]  # called when there are new facts
    say: Callable[[str], None]  # takes a line for the user
    end: Callable[[], End | None]  # return how the cluster object has ended, if it has
    silent: frozenset[str] = frozenset()  # addresses of workers without a recent heartbeat
    _listening: supervise.Loop | None = field(default=None, init=False)

    def present(self, head: str, *, elastic: bool) -> Mapping[str, JobWorkers]:
        """Return the registered workers by their job's id.

        ``head``: the job with the scheduler, whose workers are gone with it; "": it has none. ``elastic``: other jobs
        come and go, whose workers' names contain their job's id.
        """
        jobs: dict[str, JobWorkers] = {}
        of_head: list[str] = []
        silent = self.silent
        for address, facts in list(self.workers().items()):
            name = read_member_name(str(facts["name"])) if elastic else None
            if name is None:
                of_head.append(address)
                continue
            job_id, restarts, _ = name
            before = jobs.get(job_id, NO_WORKERS)
            is_silent = address in silent and (before.silent or not before.addresses)
            jobs[job_id] = JobWorkers((*before.addresses, address), max(before.restarts, restarts), is_silent)
        if head and of_head and not self.searching():
            jobs[head] = JobWorkers(tuple(of_head))
        return jobs

    async def retire(self, addresses: Sequence[str]) -> None:
        """Make workers hand their data to others and leave."""
        await self.scheduler().hpcgpu_retire(workers=list(addresses))

    async def remove(self, addresses: Sequence[str]) -> None:
        """Make the scheduler forget workers that are gone."""
        for address in addresses:
            await self.scheduler().unregister(address=address, expected=True, stimulus_id="hpcgpu-job-is-gone")

    def watch_heartbeats(self, changed: Callable[[], None], every_s: float = _LOOK_S) -> None:
        """Ask the scheduler which workers are silent, until :meth:`stop`; call ``changed`` when that changes."""

        async def listen() -> None:
            await asyncio.sleep(every_s)
            try:
                silent = frozenset(await self.scheduler().hpcgpu_silent())
            except OSError:
                return  # the cluster object searches its scheduler
            if silent != self.silent:
                self.silent = silent
                changed()

        self._listening = supervise.Loop(listen, "the search for workers that have fallen silent")

    def stop(self) -> None:
        """Stop asking."""
        if self._listening:
            self._listening.cancel()

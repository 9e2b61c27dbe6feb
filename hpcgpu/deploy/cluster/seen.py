"""The workers of a cluster by their jobs, as its scheduler knows them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcgpu.deploy.jobs.job_table import Present
from hpcgpu.plan.jobs.phase import End
from hpcgpu.plan.jobs.worker_names import read_member_name


@dataclass(slots=True, kw_only=True)
class Seen:
    """A cluster's scheduler and workers, for its jobs. Any thread may call :meth:`present`.

    Attributes
    ----------
    scheduler : callable
        Returns the connection pool to the scheduler of now.
    workers : callable
        Returns the registered workers by address, with what the scheduler says of each.
    searching : callable
        Tells whether the scheduler does not answer, and is looked for.
    changed : callable
        Called when more is known than before.
    say : callable
        Takes a line for the user.
    end : callable
        Returns how the cluster object has ended; None while it has not.
    silent : callable
        Returns the addresses of workers that have not been heard from for a while.

    """

    scheduler: Callable[[], Any]
    workers: Callable[[], Mapping[str, Any]]
    searching: Callable[[], bool]
    changed: Callable[[], None]
    say: Callable[[str], None]
    end: Callable[[], End | None]
    silent: Callable[[], Collection[str]] = frozenset

    def present(self, head: str, *, elastic: bool) -> dict[str, Present]:
        """Return the registered workers by their job.

        Parameters
        ----------
        head : str
            The job with the scheduler, whose workers are gone with it; empty: it has no workers.
        elastic : bool
            Whether other jobs come and go, whose workers' names tell their job.

        """
        found: dict[str, Present] = {}
        first: list[str] = []
        silent = self.silent()
        for address, facts in list(self.workers().items()):
            name = read_member_name(str(facts["name"])) if elastic else None
            if name is None:
                first.append(address)
                continue
            before = found.get(name.job_id, Present())
            restarts = max(before.restarts, name.restart_count)
            is_silent = address in silent and (before.silent or not before.addresses)
            found[name.job_id] = Present((*before.addresses, address), restarts, is_silent)
        if head and first and not self.searching():
            found[head] = Present(tuple(first))
        return found

    async def retire(self, addresses: Sequence[str]) -> None:
        """Have workers hand their data to others and leave."""
        await self.scheduler().hpcgpu_retire(workers=list(addresses))

    async def remove(self, addresses: Sequence[str]) -> None:
        """Have the scheduler forget workers that are gone."""
        for address in addresses:
            await self.scheduler().unregister(address=address, expected=True, stimulus_id="hpcgpu-job-is-gone")

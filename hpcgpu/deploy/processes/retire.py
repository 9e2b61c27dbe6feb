"""Workers leave with their data, in the seconds that a job has left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from distributed import Scheduler

_LOOK_S = 0.1


async def retire(scheduler: Scheduler, workers: Sequence[str]) -> list[str]:
    """Retire workers (``hpcgpu_retire``): no new tasks, sole replicas moved elsewhere, then they close.

    What distributed's ``retire_workers`` does, but it asks only every 2 s whether the data has been moved
    (its active memory manager, 2026.8.0), and a batch system may leave a cancelled job 5.

    Parameters
    ----------
    scheduler : Scheduler
        Given by the handler.
    workers : sequence of str
        Addresses.

    Returns
    -------
    list of str
        Those that are not in the cluster any more; the others hold data that nobody can take.

    """
    leaving = asyncio.create_task(scheduler.retire_workers(workers=list(workers), close_workers=True, remove=True))
    pushed = False
    while not (await asyncio.wait([leaving], timeout=_LOOK_S))[0]:
        amm = scheduler.extensions.get("amm")
        # once only: each of its runs before the data has arrived asks for it again
        if not pushed and amm and amm.running and _is_copied(scheduler, workers):
            pushed = True
            amm.run_once()
    await leaving
    return [address for address in workers if address not in scheduler.workers]


def _is_copied(scheduler: Scheduler, workers: Sequence[str]) -> bool:
    going = {scheduler.workers[address] for address in workers if address in scheduler.workers}
    return all(set(ts.who_has or ()) - going for ws in going for ts in ws.has_what)

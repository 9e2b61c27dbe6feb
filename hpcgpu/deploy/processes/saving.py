"""The end of workers while a checkpoint is written: what it lacks is written first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from distributed import Scheduler

from hpcgpu.deploy.processes.removals import PacedScheduler

logger = logging.getLogger("distributed.hpcgpu")
_SAVE_S, _ANSWER_S = 30.0, 0.5  # a cancelled job saves for 4 s, and may be killed after 5
_LOOK_S = 0.1


class SavingScheduler(PacedScheduler):
    """A Scheduler whose workers write what checkpoints lack before they retire."""

    async def retire_workers(self, workers: Sequence[str] | None = None, **options: Any) -> Any:
        """Retire workers, which first write what checkpoints lack; called by clients, and by distributed."""
        say_all(await save(self, _SAVE_S, workers))
        return await super().retire_workers(workers, **options)


def say_all(texts: Sequence[str]) -> None:
    """Log what workers could not write."""
    for text in texts:
        logger.warning("%s", text)


def has_checkpoints(scheduler: Scheduler) -> bool:
    """Return whether the workers write a checkpoint."""
    return any(name.startswith("hpcgpu-checkpoint ") for name in scheduler.worker_plugins)


async def save(scheduler: Scheduler, limit_s: float, workers: Sequence[str] | None = None) -> list[str]:
    """Have workers, or all, write what checkpoints lack (``hpcgpu_save``); return what they could not write in time."""
    if not has_checkpoints(scheduler):
        return []
    names = {address: worker.name for address, worker in scheduler.workers.items()}
    message = {"op": "hpcgpu_save", "limit_s": limit_s}

    async def save_one(address: str) -> list[str]:
        try:
            async with asyncio.timeout(limit_s + _ANSWER_S):
                answers = await scheduler.broadcast(msg=message, workers=[address], on_error="return")
        except TimeoutError:
            return [f"worker {names[address]} has not answered whether it has saved all"]
        texts = answers[address]
        return [f"worker {names[address]}: {e}" for e in ([texts] if isinstance(texts, Exception) else texts)]

    here = [address for address in names if workers is None or address in workers]
    return [text for texts in await asyncio.gather(*map(save_one, here)) for text in texts]


async def retire(scheduler: Scheduler, workers: Sequence[str], save_s: float = _SAVE_S) -> list[str]:
    """Retire workers by address (``hpcgpu_retire``); return those that have left: the others keep their data.

    Before, they write what checkpoints lack, for ``save_s`` at most.
    """
    say_all(await save(scheduler, save_s, workers))
    retired = Scheduler.retire_workers(scheduler, workers=list(workers), close_workers=True, remove=True)
    leaving = asyncio.create_task(retired)
    pushed = False
    # distributed's retire_workers checks only every 2 s whether the data has been moved (its active memory manager,
    # 2026.8.0). A batch system may leave a cancelled job 5 s.
    while not (await asyncio.wait([leaving], timeout=_LOOK_S))[0]:
        amm = scheduler.extensions.get("amm")
        # only once: until the data has arrived, each run requests it again
        if not pushed and amm and amm.running:
            going = {scheduler.workers[address] for address in workers if address in scheduler.workers}
            if all(set(task.who_has or ()) - going for worker in going for task in worker.has_what):
                pushed = True
                amm.run_once()
    await leaving
    return [address for address in workers if address not in scheduler.workers]

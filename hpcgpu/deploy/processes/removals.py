"""The removal of workers that die together: in parts, between which the scheduler's loop goes on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from distributed import Scheduler
from distributed.core import CommClosedError

from hpcgpu import supervise

# The loop has others to serve. One of 4,000 takes it 2 ms (distributed 2026.8.0), and a message to one up to 0.5 ms.
_HOLD_S, _AT_ONCE = 0.01, 32


class PacedScheduler(Scheduler):
    """A Scheduler that removes workers, and tells the others of it, a few in each turn of its loop."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._begin_s: float | None = None  # of this turn's removals
        self._restarts = 0
        self._next = asyncio.Semaphore(_AT_ONCE)  # they look each turn whether they may go on; all others wait
        self._gone: list[dict[str, Any]] = []  # messages that not all workers have
        super().__init__(*args, **options)

    async def remove_worker(self, address: str, *, stimulus_id: str, **options: Any) -> Any:
        """Remove a worker, in a later turn if this one has removed enough; called by distributed."""
        if not self._may_go_on():
            self.handle_worker_status_change("closed", address, stimulus_id)  # it gets no task meanwhile
            async with self._next:
                while not self._may_go_on():
                    await asyncio.sleep(0)
        return await super().remove_worker(address, stimulus_id=stimulus_id, **options)

    def _may_go_on(self) -> bool:
        def end() -> None:
            self._begin_s = None

        if first := self._begin_s is None:
            self._begin_s = time.monotonic()
            asyncio.get_running_loop().call_soon(end)
        return first or self._restarts > 0 or time.monotonic() < self._begin_s + _HOLD_S

    async def restart_workers(self, *args: Any, **options: Any) -> Any:
        """Restart workers; called by clients, and by distributed."""
        self._restarts += 1  # it takes those that are not removed yet for new ones
        try:
            async with self._next:  # which those get first that wait already
                pass
            return await super().restart_workers(*args, **options)
        finally:
            self._restarts -= 1

    def worker_send(self, worker: str, msg: dict[str, Any]) -> None:
        """Send a message; tell all workers of those that were removed by one message to each; called by distributed.

        distributed makes and queues a message for each pair of one that is removed and one that stays (remove_worker).
        Each connection keeps those that it has sent.
        """
        if msg["op"] != "remove-worker":
            super().worker_send(worker, msg)
        elif not self._gone or self._gone[-1]["worker"] != msg["worker"]:
            self._gone.append(msg)
            if len(self._gone) == 1:
                self._telling = supervise.start(self._tell, "news of removed workers", self._forget)

    def _forget(self, _: BaseException) -> None:
        self._gone.clear()  # the next removal starts it again

    async def _tell(self) -> None:
        while self._gone:
            await asyncio.sleep(0)
            messages = tuple(self._gone)
            for number, (worker, comm) in enumerate(tuple(self.stream_comms.items()), 1):
                try:
                    comm.send(*messages)
                except CommClosedError:
                    if worker in self.stream_comms:
                        super().worker_send(worker, messages[0])  # which removes it
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            del self._gone[: len(messages)]

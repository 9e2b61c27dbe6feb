"""A worker's heartbeats by the stream that it has to its scheduler, both ends: without a connection of their own.

distributed's Worker (2026.8.0) asks by another connection, which it keeps. That took a quarter of a join's CPU time,
more than a third of a worker's memory in the scheduler, and half of its descriptors (docs/explanation/scale.md).
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from distributed import Scheduler, Worker
from distributed.batched import BatchedSend
from distributed.comm import CommClosedError

_OP = "hpcgpu_heartbeat"
# A stream sends the order to close up to 2 ms later (distributed 2026.8.0, BatchedSend). One that ended before made a
# worker that was retired one that had lost its scheduler: its job failed.
_TOLD_S = 1.0
_NOTHING: deque[Any] = deque(maxlen=0)


def _forget_what_was_sent() -> None:
    """Keep no messages that this process has sent: distributed keeps each stream's last 1,000, which it does not read.

    They were 320 KiB of answers to heartbeats for each worker, and with tasks as many as there are.
    """
    BatchedSend.recent_message_log = property(lambda _: _NOTHING, lambda *_: None)


class StreamHeartbeats:
    """Sends a worker's heartbeats by its stream, to a scheduler that answers them there."""

    def __init__(self, worker: Worker) -> None:
        _forget_what_was_sent()
        self._worker = worker
        self._answers: deque[asyncio.Future[dict[str, Any]]] = deque()  # tasks may send heartbeats, too
        worker.scheduler.heartbeat_worker = self._ask
        worker.stream_handlers[_OP] = self._take

    async def _ask(self, address: str, **facts: Any) -> dict[str, Any]:
        """Return the scheduler's answer; a worker whose stream ends closes, and cancels this."""
        self._answers.append(asked := asyncio.get_running_loop().create_future())
        self._worker.batched_send({"op": _OP, **facts})
        return await asked

    def _take(self, **answer: Any) -> None:
        """Answer the oldest: the stream keeps their order."""
        if not (asked := self._answers.popleft()).done():
            asked.set_result(answer)


def answer_by_stream(scheduler: Scheduler) -> None:
    """Have a scheduler take heartbeats by workers' streams, too, and answer them there."""
    _forget_what_was_sent()

    async def answer(worker: str, **facts: Any) -> None:
        if worker not in scheduler.stream_comms:  # removed: it closes when it is told to, or without a connection
            await asyncio.sleep(_TOLD_S)
            raise CommClosedError(f"heartbeat from unregistered worker {worker}")
        facts = scheduler.heartbeat_worker(address=worker, resolve_address=False, **facts)
        scheduler.worker_send(worker, {"op": _OP, **facts})

    scheduler.stream_handlers[_OP] = answer

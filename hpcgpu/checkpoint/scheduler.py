"""The scheduler's part: a chunk that is on disk, and was lost with its worker, is read and not computed."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dask._task_spec import Task
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcgpu import supervise
from hpcgpu.checkpoint import values
from hpcgpu.checkpoint.segments import Chunk, Index
from hpcgpu.checkpoint.writer import SYNCED
from hpcgpu.errors import CheckpointError

# What this process has read of folders, to find lost chunks.
_INDEXES: dict[str, Index] = {}
_LOCK = threading.Lock()


class LostChunks(SchedulerPlugin):
    """Has workers read chunks that others wrote and lost, whatever their folders."""

    name = "hpcgpu-checkpoint"
    idempotent = True

    def __init__(self) -> None:
        self._synced: dict[Any, tuple[str, Chunk]] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Hear from workers what they have synced; called by distributed."""
        self._scheduler = scheduler
        scheduler.stream_handlers[SYNCED] = self._take

    def _take(self, folder: str, chunks: Sequence[tuple[Any, str, tuple[Any, ...]]], worker: str) -> None:
        self._synced |= {key: (folder, Chunk(run, part)) for key, run, part in chunks if key in self._scheduler.tasks}

    def forget(self, run: str) -> None:
        """Have chunks of a run computed again, as they are not in the folder any more."""
        self._synced = {key: place for key, place in self._synced.items() if place[1].run != run}

    def transition(self, key: Any, start: str, finish: str, **_: object) -> None:
        """Give a task that lost its value another one, which reads it; called by distributed before it waits again."""
        if key not in self._synced or finish not in ("released", "forgotten"):
            return
        folder, chunk = self._synced.pop(key)
        ts = self._scheduler.tasks[key]
        if finish == "forgotten" or not (ts.who_wants or ts.waiters):
            return
        ts.run_spec = Task(key, reread, folder, tuple(chunk))
        for dependency in ts.dependencies:
            dependency.dependents.discard(ts)
        unused = [each.key for each in ts.dependencies if not each.dependents and not each.who_wants]
        ts.dependencies.clear()
        if unused:
            drop = supervise.log_errors(self._drop, "forgetting what made lost chunks", supervise.only_log)
            self._scheduler.loop.add_callback(drop, unused)

    def _drop(self, keys: Sequence[Any]) -> None:
        """Forget tasks of which only read ones were made."""
        tasks = [ts for key in keys if (ts := self._scheduler.tasks.get(key))]
        unused = {ts.key: "forgotten" for ts in tasks if not ts.dependents and not ts.who_wants}
        self._scheduler.transitions(unused, stimulus_id="hpcgpu-checkpoint")


def forget(run: str, dask_scheduler: Scheduler) -> None:
    """Have chunks of a run computed again when they are lost; called by the client."""
    if plugin := dask_scheduler.plugins.get(LostChunks.name):
        plugin.forget(run)


def reread(folder: str, chunk: tuple[Any, ...]) -> Any:
    """Read a chunk, wherever it is in the folder; a task."""
    of = Chunk(*chunk)
    with _LOCK:
        index = _INDEXES.setdefault(folder, Index(Path(folder)))
        if of not in index.chunks:
            index.refresh()
        place = index.chunks.get(of) or index.unsure.get(of)
    if place is None:
        raise CheckpointError(f"{folder} has no part {list(of.part)} any more: start the script again to compute it")
    return values.load(folder, chunk, place)

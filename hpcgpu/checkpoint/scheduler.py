"""The scheduler's part: finished chunks stay until they are on disk, and are not computed again then."""

from __future__ import annotations

import functools
import itertools
import math
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
from hpcgpu.checkpoint.writer import NEWS, SYNCED, TAKEN
from hpcgpu.errors import CheckpointError

# What this process has read of folders, to find lost chunks.
_INDEXES: dict[str, Index] = {}
_LOCK = threading.Lock()


class FinishedChunks(SchedulerPlugin):
    """Keeps chunks until workers have written them; has workers read those that others lost. Of all folders."""

    name = "hpcgpu-checkpoint"
    idempotent = True

    def __init__(self) -> None:
        self._synced: dict[Any, tuple[str, Chunk]] = {}
        # folder, address of the worker that is to write it, number of its arrival
        self._kept: dict[tuple[Any, Chunk], tuple[str, str, int]] = {}

    async def start(self, scheduler: Scheduler) -> None:
        """Hear from workers about finished chunks; called by distributed."""
        self._scheduler = scheduler
        self._numbers = itertools.count()  # here: it cannot be pickled (Python 3.14)
        scheduler.stream_handlers[NEWS] = self._hear

    def _hear(self, folder: str, state: str, chunks: Sequence[tuple[Any, str, tuple[Any, ...]]], worker: str) -> None:
        of_runs: dict[str, list[Any]] = {}
        for key, run, part in chunks:
            if key in self._scheduler.tasks:
                of_runs.setdefault(run, []).append(key)
                chunk = Chunk(run, part)
                if state == TAKEN:
                    self._kept[key, chunk] = folder, worker, next(self._numbers)
                else:
                    self._kept.pop((key, chunk), None)
                if state == SYNCED:
                    self._synced[key] = folder, chunk
        for run, keys in of_runs.items():  # a client of its own, as distributed's published datasets have
            if state == TAKEN:
                self._scheduler.client_desires_keys(keys, f"{self.name} {run}")
            elif f"{self.name} {run}" in self._scheduler.clients:
                self._scheduler.client_releases_keys(keys, f"{self.name} {run}")
        if state == SYNCED:
            call = functools.partial(self.offer, folder)
            self._offering = supervise.start(call, "the search for lost chunks", supervise.only_log)

    async def offer(self, folder: str, before: float = math.inf) -> tuple[int, int]:
        """Have chunks whose writers have lost them written by workers that have them.

        Return how many are kept that came before a number, and the next number.
        """
        offers: dict[str, list[Any]] = {}
        count = 0
        for (key, chunk), (place, writer, number) in self._kept.items():
            task = self._scheduler.tasks.get(key)
            owners = [worker.address for worker in task.who_has or ()] if task else []
            count += place == folder and bool(owners) and number < before
            if place == folder and owners and writer not in owners:
                offers.setdefault(owners[0], []).append((key, *chunk))
        for address, chunks in offers.items():
            message = {"op": "hpcgpu_write", "folder": folder, "chunks": chunks}
            await self._scheduler.broadcast(msg=message, workers=[address])
            for key, run, part in chunks:
                if kept := self._kept.get((key, Chunk(run, part))):
                    self._kept[key, Chunk(run, part)] = folder, address, kept[2]
        return count, next(self._numbers)

    def forget(self, run: str) -> None:
        """Have chunks of a run computed again, as they are not in the folder any more."""
        self._synced = {key: place for key, place in self._synced.items() if place[1].run != run}
        self._kept = {key: place for key, place in self._kept.items() if key[1].run != run}
        if client := self._scheduler.clients.get(f"{self.name} {run}"):
            self._scheduler.client_releases_keys([task.key for task in client.wants_what], client.client_key)
            del self._scheduler.clients[client.client_key]

    def restart(self, scheduler: Scheduler) -> None:
        """Forget what is kept, as the scheduler has; called by distributed."""
        self._kept.clear()

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
    if plugin := dask_scheduler.plugins.get(FinishedChunks.name):
        plugin.forget(run)


async def offer(folder: str, before: float, dask_scheduler: Scheduler) -> tuple[int, int]:
    """Have lost chunks written by others; return how many are kept, and a number; called by the client."""
    plugin = dask_scheduler.plugins.get(FinishedChunks.name)
    return await plugin.offer(folder, before) if plugin else (0, 0)


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

"""Detect tasks that wait in vain, and tell cluster objects.

All workers have paused, because memory and disk are full, or no worker is left. distributed lets such tasks wait
forever and tells the client nothing (2026.8.0).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

from distributed import Scheduler, Status
from distributed.protocol import Serialized, serialize
from distributed.scheduler import WorkerStatusPlugin

from hpcgpu import supervise
from hpcgpu.deploy import compat
from hpcgpu.deploy.processes.control import Control
from hpcgpu.errors import JobError
from hpcgpu.spill.distributed.trouble import TROUBLE
from hpcgpu.units import format_bytes

logger = logging.getLogger("distributed.hpcgpu")

_LOOKS = 12
_SAMPLE = 1000  # of tasks that no worker can run, those that wait longest
# If the workers' memory shrinks by a larger fraction between two checks, the store still writes to disk.
_LESS = 0.01


class StallDetector:
    """Checks whether tasks make progress, and fails the futures that wait when none has for ``patience_s``."""

    def __init__(
        self,
        scheduler: Scheduler,
        control: Control,  # for rank 0
        patience_s: float,
        none_come: Callable[[], bool] = lambda: False,  # asked while there are no workers: will none come?
    ) -> None:
        self._scheduler, self._control = scheduler, control
        self._patience_s, self._none_come = patience_s, none_come
        self._since_s: float | None = None  # without progress; the workers' memory of then
        self._memory_bytes = 0
        self.reason = ""  # as last reported
        self._lacking: set[str] = set()  # resources of which clients have been warned
        self._sent: tuple[list[Any], Any] = [], {}  # workers, and their facts for cluster objects: 50 CPU ms of 4,000
        self._loop = supervise.Loop(self._look, "the look for tasks that wait in vain")

    def close(self) -> None:
        """Stop checking."""
        self._loop.cancel()

    async def _look(self) -> None:
        await asyncio.sleep(self._patience_s / _LOOKS)
        memory_bytes = sum(w.metrics.get("memory", 0) for w in self._scheduler.workers.values())
        now_s = time.monotonic()
        self._warn_of_resources(now_s - self._patience_s)
        if not self._is_stuck():
            self._since_s = None
            if self.reason:
                self._report("", "")
        elif self._since_s is None or memory_bytes < self._memory_bytes * (1 - _LESS):
            self._since_s, self._memory_bytes = now_s, memory_bytes
        elif not self.reason and now_s - self._since_s >= self._patience_s:
            self._tell()

    def _warn_of_resources(self, before_s: float) -> None:
        """Warn clients once of each resource for which tasks have waited since then: a worker with it may yet come."""
        workers, offered = self._scheduler.workers, self._scheduler.resources
        for task, since_s in islice(self._scheduler.unrunnable.items(), _SAMPLE if workers else 0):
            for name, amount in (task.resource_restrictions or {}).items() if since_s < before_s else ():
                if name not in self._lacking and max(offered.get(name, {}).values(), default=0) < amount:
                    self._lacking.add(name)
                    most = ", ".join(f"{n}={max(of.values()):g}" for n, of in sorted(offered.items()) if of)
                    text = f"tasks such as {task.key!r} wait for a worker with the resource {name}={amount:g}; the "
                    text += f"workers have {most or 'none'}. They wait until one with it joins: is the name misspelt?"
                    logger.warning(text)
                    self._scheduler.log_event("warn", text)

    def _is_stuck(self) -> bool:
        workers = self._scheduler.workers.values()
        idle = all(w.status is Status.paused and not w.executing for w in workers) if workers else self._none_come()
        tasks_ = self._scheduler.tasks.values()
        return idle and any(t.state not in ("memory", "erred", "released", "forgotten") for t in tasks_)

    def _tell(self) -> None:
        short = "no worker is left, and none comes"
        reason = (
            f"{short}: tasks have waited for {self._patience_s:g} s in vain. Start another cluster, or do not retire "
            "workers that are needed"
        )
        if self._scheduler.workers:
            short = "all workers have paused"
            reason = (
                f"{short} for {self._patience_s:g} s, because their memory is full: {_shown(self._scheduler)}. "
                "Release unused data, or take more workers, memory (memory_limit), or room in local_directory"
            )
        self._scheduler.log_event("hpcgpu", {"action": "stalled", "reason": reason})
        compat.fail_futures(self._scheduler, JobError(reason), waiting=True)
        self._report(short, reason)

    def _report(self, short: str, reason: str) -> None:
        """Tell rank 0 and all cluster objects the reason of a stall; empty: tasks progress again."""
        self.reason = reason
        self._control.send("stalled", why=short, text=reason)
        for plugin in self._scheduler.plugins.values():
            if isinstance(plugin, ObjectStatusPlugin):
                plugin.bcomm.send(["stalled", reason])

    def subscribe(self, comm: Any) -> dict[str, Any]:
        """Handle ``subscribe_worker_status`` as distributed's scheduler does, for any number of cluster objects."""
        ObjectStatusPlugin(self._scheduler, comm)
        workers = [(worker.server_id, worker.status) for worker in self._scheduler.workers.values()]
        if workers != self._sent[0]:
            facts = self._scheduler.identity()["workers"]
            for worker in facts.values():
                del worker["metrics"], worker["last_seen"]
            self._sent = workers, Serialized(*serialize(facts, serializers=["pickle"]))
        return {**self._scheduler.identity(n_workers=0), "workers": self._sent[1], "stalled": self.reason}


def _shown(scheduler: Scheduler) -> str:
    out = []
    for worker in sorted(scheduler.workers.values(), key=lambda w: str(w.name)):
        spilled = worker.metrics.get("spilled_bytes", {}).get("disk", 0)
        trouble = f" ({worker.metrics[TROUBLE]})" if worker.metrics.get(TROUBLE) else ""
        used, limit = format_bytes(worker.metrics.get("memory", 0)), worker.memory_limit
        most = f" of {format_bytes(limit)}" if limit else ""
        out.append(f"{worker.name} has {used}{most}, {format_bytes(spilled)} spilled{trouble}")
    more = f", and {len(out) - 4} more" if len(out) > 4 else ""
    return "; ".join(out[:4]) + more


class ObjectStatusPlugin(WorkerStatusPlugin):
    """Tells one cluster object which workers are registered."""

    def __init__(self, scheduler: Scheduler, comm: Any) -> None:  # distributed has no types
        # distributed's plugins for it all have one name: a second object would replace the first (2026.8.0)
        self.name = f"{WorkerStatusPlugin.name}-{id(comm)}"
        super().__init__(scheduler, comm)

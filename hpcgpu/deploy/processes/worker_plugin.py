"""The worker plugin that connects the spill store to distributed: real values in tasks, no copies on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Collection
from typing import Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from hpcgpu.deploy import compat
from hpcgpu.deploy.processes import outgoing, stalls
from hpcgpu.deploy.processes.distributed.worker import Unspill
from hpcgpu.errors import SpillError
from hpcgpu.host import cgroup
from hpcgpu.model import WorkerSpec
from hpcgpu.spill.store.dask import register
from hpcgpu.spill.store.transfer import Handle, keep_packed
from hpcgpu.supervise import tasks

logger = logging.getLogger("distributed.worker.memory")
# More than distributed's nanny leaves (terminate, 0.95), but of the cgroup, which other processes fill as well.
_LEFT = 0.1
_HAND_OVER_S = 10.0
_SOON, _RUNNING = ("ready", "constrained"), ("executing", "long-running")
_LOST = "hpcgpu-spilled-data-lost"


class SpillPlugin(WorkerPlugin):
    """The worker's own plugin: it knows the worker's spec, and closes the store at the end."""

    name = "hpcgpu"

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._leaving = False
        self._lost: set[Any] = set()

    def setup(self, worker: Worker) -> None:
        """Connect the store; called by distributed when the worker starts."""
        self.worker = worker
        register()
        keep_packed()
        compat.measure_device_shards()
        outgoing.read_in_threads(worker, self._readable)
        worker.data.on_fault = self._on_fault
        worker.data.above_target = functools.partial(compat.above_target, worker)
        # a new dict: on a worker that runs, a heartbeat may wait in the middle of the old one
        worker.metrics = {**worker.metrics, stalls.TROUBLE: lambda _: "; ".join(worker.data.trouble)}
        worker.data.host_is_short = lambda: cgroup.memory_left() < _LEFT

    def transition(self, key: Any, start: str, finish: str, **_: object) -> None:
        """Tell the store which keys a task needs; called by distributed when it gets ready, runs, and is over."""
        if finish in _SOON or finish in _RUNNING:
            task = self.worker.state.tasks[key]
            needs = [d.key for d in task.dependencies]
            self.worker.data.expect(key, needs, task.priority, running=finish in _RUNNING)
            if finish == "executing" and type(task.run_spec) is not Unspill:
                task.run_spec = Unspill(task.run_spec, self.worker.data)
        elif start in _SOON or start in _RUNNING:
            self.worker.data.expect_no_more(key)

    def teardown(self, worker: Worker) -> None:
        """Close the store, with its keys in it; called by distributed when the worker closes."""
        self._lost.update(worker.data)  # peers still ask
        worker.data.close()

    def _on_fault(self, error: SpillError) -> None:
        """Close the worker: other workers compute the lost values again. Otherwise a failing read would hang."""
        if not self._leaving:
            self._leaving = True
            logger.error("%s; the worker hands over what else it has, closes, and is started anew", str(error))
            self.worker.loop.add_callback(tasks.log_errors(self._begin_to_leave, "the worker's end", tasks.only_log))

    def _begin_to_leave(self) -> None:
        self._ending = tasks.start(self._leave, "the worker's end", tasks.only_log)

    async def _leave(self) -> None:
        """Take no more tasks, copy sole replicas to other workers for a while, then close."""
        # an unreadable value cannot be copied either: the retirement would wait for it without end
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                await self.worker.close_gracefully(restart=True, reason=_LOST)
        except TimeoutError:
            logger.warning("not all that the worker has was handed over within %g s", _HAND_OVER_S)
        except Exception:  # a device's library may raise anything
            logger.exception("what the worker has could not be handed over")
        await self.worker.close(nanny=False, reason=_LOST)

    async def _readable(self, keys: Collection[Any]) -> list[Any]:
        """Return those of the keys whose values can be read; only a worker that leaves reads them for that.

        One unreadable value would keep back all others of the same request. To read all that the worker has before
        the first request could take longer than it may hand over.
        """
        if self._leaving:
            await asyncio.to_thread(self._find_lost, [k for k in keys if k not in self._lost])
        return [k for k in keys if k not in self._lost]

    def _find_lost(self, keys: Collection[Any]) -> None:
        """Note each of the keys whose value cannot be read back."""
        for key in keys:
            with self.worker.data.handing_out_handles(), contextlib.suppress(KeyError):
                try:
                    value = self.worker.data[key]
                    if type(value) is Handle:
                        value.packed()
                except SpillError:
                    self._lost.add(key)

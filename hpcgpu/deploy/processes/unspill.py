"""What connects the spill store to distributed's worker: real values in tasks, no copies on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

from distributed import Worker
from distributed.diagnostics.plugin import WorkerPlugin

from hpcgpu.deploy import compat
from hpcgpu.errors import SpillError
from hpcgpu.host import cgroup
from hpcgpu.model import WorkerSpec
from hpcgpu.spill import GpuSpillBuffer, proxy_dask
from hpcgpu.spill.dask import register
from hpcgpu.spill.handle import Handle, keep_packed

logger = logging.getLogger("distributed.worker.memory")
# above what distributed's nanny leaves (terminate, 0.95), though of the cgroup, which other processes fill as well
_LEFT = 0.1
_HAND_OVER_S = 10.0
_SOON, _RUNNING = ("ready", "constrained"), ("executing", "long-running")
_LOST = "hpcgpu-spilled-data-lost"


class Unspill:
    """A task whose arguments are brought up in the thread in which it runs."""

    def __init__(self, spec: Any, store: GpuSpillBuffer) -> None:  # noqa: ANN401 - distributed has no types
        self.spec, self.store = spec, store

    def __call__(self, data: Mapping[Any, Any]) -> Any:  # noqa: ANN401
        """Called by distributed in place of the task."""
        if self.spec.is_coro:
            return self._call_coroutine(data)
        with self.store.using(data):
            return self.spec(_resolved(data))

    async def _call_coroutine(self, data: Mapping[Any, Any]) -> Any:  # noqa: ANN401
        with self.store.using(data):
            return await self.spec(await asyncio.to_thread(_resolved, data))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.spec, name)

    def __repr__(self) -> str:
        return repr(self.spec)


def _resolved(data: Mapping[Any, Any]) -> dict[Any, Any]:
    return {k: v.resolve() if type(v) is Handle else v for k, v in data.items()}


class Unspilling(WorkerPlugin):
    """The worker's own plugin: it knows the worker's spec, and closes the store at the end."""

    name = "hpcgpu"

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._leaving = False
        self._lost: set[Any] = set()

    def setup(self, worker: Worker) -> None:
        """Called by distributed when the worker starts."""
        self.worker = worker
        register()
        if worker.data.jit_unspill:
            proxy_dask.register()
        keep_packed()
        compat.read_with_handles(worker, worker.data.handing_out_handles, self._lost)
        worker.data.on_fault = self._on_fault
        worker.data.moves.host_is_short = lambda: cgroup.memory_left() < _LEFT

    def transition(self, key: Any, start: str, finish: str, **_: object) -> None:  # noqa: ANN401
        """Called by distributed when a task gets ready, before it runs, and when it is over."""
        if finish in _SOON or finish in _RUNNING:
            task = self.worker.state.tasks[key]
            needs = [d.key for d in task.dependencies]
            self.worker.data.expect(key, needs, task.priority, running=finish in _RUNNING)
            if finish == "executing" and type(task.run_spec) is not Unspill:
                task.run_spec = Unspill(task.run_spec, self.worker.data)
        elif start in _SOON or start in _RUNNING:
            self.worker.data.expect_no_more(key)

    def teardown(self, worker: Worker) -> None:
        """Called by distributed when the worker closes: nobody else closes the store."""
        worker.data.close()

    def _on_fault(self, error: SpillError) -> None:
        """Close the worker: what it has lost is computed again elsewhere, where a failing read would hang."""
        if not self._leaving:
            self._leaving = True
            logger.error("%s; the worker hands over what else it has, closes, and is started anew", error)
            self.worker.loop.add_callback(self._leave)

    async def _leave(self) -> None:
        """Take no more tasks, copy sole replicas to other workers for a while, then close."""
        # what cannot be read cannot be copied either: the retirement would wait for it without end
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HAND_OVER_S):
                await asyncio.to_thread(self._find_lost)
                await self.worker.close_gracefully(restart=True, reason=_LOST)
        await self.worker.close(nanny=False, reason=_LOST)

    def _find_lost(self) -> None:
        """Note every key whose value cannot be read back."""
        for key in list(self.worker.data):
            with self.worker.data.handing_out_handles(), contextlib.suppress(KeyError):
                value = self.worker.data[key]
                try:
                    if type(value) is Handle:
                        value.packed()
                except SpillError:
                    self._lost.add(key)

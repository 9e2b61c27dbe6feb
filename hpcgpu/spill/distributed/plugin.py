"""The worker plugin that connects the spill store to distributed: real values in tasks, no copies on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import numpy as np
from distributed import Worker
from distributed.comm.inproc import InProc
from distributed.core import Status
from distributed.diagnostics.plugin import WorkerPlugin
from distributed.protocol import deserialize, serialize, to_serialize

from hpcgpu import supervise
from hpcgpu.errors import SpillError
from hpcgpu.host import host_memory
from hpcgpu.model import CpuSet, WorkerSpec
from hpcgpu.spill.distributed.shuffles import adapt_shuffles
from hpcgpu.spill.distributed.trouble import TROUBLE
from hpcgpu.spill.distributed.worker import Unspill
from hpcgpu.spill.proxies import unproxy
from hpcgpu.spill.storage.pinned import is_pinned
from hpcgpu.spill.store.handles import Handle, Packed, arrive, keep_packed, reading
from hpcgpu.spill.store.messages import register
from hpcgpu.spill.values.unit import ABSENT

logger = logging.getLogger("distributed.worker.memory")
# More than distributed's nanny leaves (terminate, 0.95), but of the cgroup, which other processes fill as well.
_LEFT = 0.1
_HAND_OVER_S = 10.0
_TRIM_S = 1.0  # the interval at which the heap is trimmed while memory is short
_SOON, _RUNNING = ("ready", "constrained"), ("executing", "long-running")
_LOST = "hpcgpu-spilled-data-lost"


class SpillPlugin(WorkerPlugin):
    """The plugin of a worker with the store: tasks get real values, and no copy is made on the event loop.

    It closes the store at the worker's end. A worker that cannot read a value back hands over the others and closes.
    """

    name = "hpcgpu"

    def __init__(self, spec: WorkerSpec | None = None, node: Any = None) -> None:
        self.spec, self._node = spec, node  # the worker's plan, and its part in copies within the node, by hpcgpu
        self.copy_obstacle = node and node.obstacle  # why large values of this node come by the connection
        self._leaving = False
        self._lost: set[Any] = set()
        self._trimmed_s = -math.inf

    def setup(self, worker: Worker) -> None:
        """Connect the store; called by distributed when the worker starts."""
        self.worker = worker
        register()
        keep_packed()
        adapt_shuffles()
        read_in_threads(worker, self._readable)
        if self._node:
            self._node.allocate, self._node.is_page_locked = worker.data.disk.slabs.empty, is_pinned
        worker.data.on_fault = self._on_fault
        worker.data.above_target = self._above_target
        # a new dict: on a worker that runs, a heartbeat may wait in the middle of the old one
        worker.metrics = {**worker.metrics, TROUBLE: lambda _: "; ".join(worker.data.trouble)}
        gpu_nodes = self.spec.gpu_memory_nodes if self.spec else CpuSet()
        worker.data.host_is_short = lambda: host_memory.memory_left(gpu_nodes) < _LEFT

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

    def _above_target(self) -> int:
        """Return the bytes of the process above its target, without what the heap only keeps; for the spill thread."""
        manager, process_bytes = self.worker.memory_manager, self.worker.monitor.get_process_memory
        target = (manager.memory_limit or 0) * (manager.memory_target_fraction or manager.memory_spill_fraction)
        above = process_bytes() - target
        if above > 0 and time.monotonic() - self._trimmed_s >= _TRIM_S:
            self._trimmed_s = time.monotonic()
            host_memory.trim_heap()
            above = process_bytes() - target
        return int(above)

    def _on_fault(self, error: SpillError) -> None:
        """Close the worker: other workers compute the lost values again. Otherwise a failing read would hang."""
        if not self._leaving:
            self._leaving = True
            logger.error("%s; the worker hands over its other data, closes, and is restarted", str(error))

            def begin() -> None:
                # at once: until the scheduler hears of the end, the tasks that are ready here would fail
                self.worker.status = Status.paused
                self._ending = supervise.start(self._leave, "the worker's end", supervise.only_log)

            self.worker.loop.add_callback(supervise.log_errors(begin, "the worker's end", supervise.only_log))

    async def _leave(self) -> None:
        """Take no more tasks, copy sole replicas to other workers for a while, then close."""
        try:
            async with asyncio.timeout(_HAND_OVER_S):  # an unreadable value cannot be copied, and would be waited for
                await self.worker.close_gracefully(restart=True, reason=_LOST)
        except TimeoutError:
            logger.warning("the worker's data was not handed over completely within %g s", _HAND_OVER_S)
        except Exception:  # a device's library may raise anything
            logger.exception("the worker's data could not be handed over")
        await self.worker.close(nanny=False, reason=_LOST)

    async def _readable(self, keys: Collection[Any]) -> list[Any]:
        """Return the keys whose values can be read, as one unreadable value would keep back all others of a request."""
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


class _Call:
    """A value in a message, as the call that makes it where it arrives. Immutable."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call

    def __repr__(self) -> str:
        return f"<a stored value of type {type(self).__name__}>"


@functools.lru_cache(256)
def _call_for(kind: str) -> type[_Call]:
    """Return a class with the name of a value's: distributed names it when pickling fails (serialize.py, 2026.8.0)."""
    return type(kind, (_Call,), {})


class _Connection:
    """A connection to which ``get_data`` writes one message with values: a thread reads those that are handles.

    distributed pickles messages below 10 MB on the event loop, and inproc pickles nothing (comm/utils.py,
    comm/inproc.py; 2026.8.0).
    """

    def __init__(self, comm: Any, to_worker: bool) -> None:
        self._comm, self._to_worker = comm, to_worker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    async def write(self, message: dict[str, Any], **options: Any) -> Any:
        """Write the message, when its values have been read."""
        data = message["data"]
        if handles := {key: each.data for key, each in data.items() if type(each.data) is Handle}:
            data |= await asyncio.to_thread(self._read, handles)
        return await self._comm.write(message, **options)

    def _read(self, handles: dict[Any, Handle]) -> dict[Any, Any]:
        with reading(None):  # pickling may run user code
            return {key: to_serialize(self._sent(handle)) for key, handle in handles.items()}

    def _sent(self, handle: Handle) -> Any:
        if isinstance(self._comm, InProc):
            return unproxy(handle.resolve())
        if self._to_worker:
            return self._packed(arrive, handle.packed())
        if handle.entry.value is ABSENT:
            return self._packed(Packed.unpack, handle.packed())
        # a client may have neither this package nor a device: what is up goes as without it
        header, frames = serialize(unproxy(handle.resolve()), on_error="raise")
        return _Call(deserialize, header, [np.frombuffer(frame, np.uint8) for frame in frames])

    @staticmethod
    def _packed(function: Callable[[Packed], Any], packed: Packed) -> _Call:
        return _call_for(packed.kind.__name__)(function, packed)


def read_in_threads(worker: Worker, readable: Callable[[Collection[Any]], Awaitable[Collection[Any]]]) -> None:
    """Let the event loop of a worker with the store read handles, for a task, and for keys that are ``readable``."""
    execute, get_data, context = worker.execute, worker.handlers["get_data"], worker.data.handing_out_handles

    @functools.wraps(execute)
    async def execute_with_handles(*args: Any, **kwargs: Any) -> Any:
        with context(to_worker=False):  # perhaps to a process of a user's executor
            return await execute(*args, **kwargs)

    @functools.wraps(get_data)
    async def get_data_with_handles(comm: Any, keys: Any = (), who: str | None = None, **kwargs: Any) -> Any:
        # UCX itself reads from the device. who is the address of the worker that asks, and None for clients, also when
        # they gather (distributed 2026.8.0: worker.py:1246, 1965; client.py:2467).
        present = await readable(keys)
        with context(to_worker=who is not None, leaving=not comm.peer_address.startswith("ucx")):
            return await get_data(_Connection(comm, who is not None), keys=present, who=who, **kwargs)

    worker.execute = execute_with_handles
    worker.handlers["get_data"] = get_data_with_handles
    if worker.data.jit_unspill:
        for name in ("actor_attribute", "actor_execute", "run"):
            worker.handlers[name] = _answering(worker.handlers[name])


def _answering(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler in whose answers are objects, which a thread brings up, in place of proxies."""

    @functools.wraps(handler)
    async def answer(*args: Any, **kwargs: Any) -> Any:
        reply = handler(*args, **kwargs)
        reply = await reply if inspect.isawaitable(reply) else reply
        if reply and "result" in reply:
            reply["result"] = to_serialize(await asyncio.to_thread(unproxy, reply["result"].data))
        return reply

    return answer

"""Values that a worker sends out of its store: real ones, or their bytes. Threads read them, not the event loop.

distributed pickles messages below 10 MB on the event loop, and inproc pickles nothing (comm/utils.py, comm/inproc.py;
2026.8.0).
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import numpy as np
from distributed import Worker
from distributed.comm.inproc import InProc
from distributed.protocol import deserialize, serialize, to_serialize

from hpcgpu.spill.proxies.proxy import unproxy
from hpcgpu.spill.store.transfer import Handle, Packed, arrive, reading
from hpcgpu.spill.values.unit import ABSENT


class _Call:
    """A value in a message, as the call that makes it where it arrives. Immutable."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


class _Connection:
    """A connection to which ``get_data`` writes one message with values: a thread reads those that are handles."""

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
            return _Call(arrive, handle.packed())
        if handle.entry.value is ABSENT:
            return _Call(Packed.unpack, handle.packed())
        # a client may have neither this package nor a device: what is up goes as without it
        header, frames = serialize(unproxy(handle.resolve()), on_error="raise")
        return _Call(deserialize, header, [np.frombuffer(frame, np.uint8) for frame in frames])


def read_in_threads(worker: Worker, readable: Callable[[Collection[Any]], Awaitable[Collection[Any]]]) -> None:
    """Let the event loop of a worker with the store read handles: before a task, and for a peer or a client.

    Of the keys that these ask for, only those that ``readable`` returns are sent. UCX itself reads from the device.

    ``who`` is the address of the worker that asks, and None for clients, also when they gather (distributed 2026.8.0:
    worker.py:1246, 1965; client.py:2467).
    """
    execute, get_data, context = worker.execute, worker.handlers["get_data"], worker.data.handing_out_handles

    @functools.wraps(execute)
    async def execute_with_handles(*args: Any, **kwargs: Any) -> Any:
        with context(to_worker=False):  # perhaps to a process of a user's executor
            return await execute(*args, **kwargs)

    @functools.wraps(get_data)
    async def get_data_with_handles(comm: Any, keys: Any = (), who: str | None = None, **kwargs: Any) -> Any:
        there = await readable(keys)
        with context(to_worker=who is not None, leaving=not comm.peer_address.startswith("ucx")):
            return await get_data(_Connection(comm, who is not None), keys=there, who=who, **kwargs)

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

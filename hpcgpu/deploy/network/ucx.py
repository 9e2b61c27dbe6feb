"""Adapt connections of ``ucx://`` to distributed and this package, over those of distributed-ucxx.

Imported only for ``protocol="ucx"``. The names that begin with an underscore were read in ucxx and distributed-ucxx
0.52.0, and are the same in 0.48.0.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

from distributed.comm.core import CommClosedError
from distributed.comm.registry import backends
from distributed_ucxx import ucxx as theirs
from distributed_ucxx.ucxx import UCXX, UCXXBackend, UCXXConnector, UCXXListener

from hpcgpu import supervise
from hpcgpu.spill.store import messages

# The peer of a connection that is closed may be dead, or stopped.
_CLOSE_S = 1.0
# A message that UCX does not signal must not wait for the next one: ucxx, too, checks every second.
_LOOK_S = 1.0
# ucxx sets it on import. In a process without CUDA, UCX then warns that it does not know the variable.
_CUDAS = "UCX_MEMTYPE_CACHE"
_wait_for_device = theirs.synchronize_stream
_MESSAGES = ("tag_send", "tag_recv", "stream_send", "stream_recv")


class Progress:
    """UCX's work on one event loop, which sleeps until something comes; ucxx makes one for each loop.

    ucxx 0.52.0 polls each awaited message in every turn of the event loop (``wait_yield``): each process of a cluster
    keeps a core busy at rest. Its ``BlockingMode`` does not arm UCX's descriptor again. Here the descriptor wakes the
    tasks that await messages.

    ucxx frees the buffer of a message that is awaited no more, though UCX may still write to it: other memory is
    overwritten, and the process may crash. Here such buffers are kept until UCX has finished with them.
    """

    _kept: ClassVar[list[tuple[Any, Any]]] = []  # requests that nobody awaits any more, with their buffers

    def __init__(self, worker: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._worker, self._loop = worker, loop
        self._awaited: dict[asyncio.Future[None], Any] = {}
        self._turning = False
        self._look: asyncio.TimerHandle | None = None
        self._work = supervise.log_errors(self._turn, "UCX's work on an event loop", self._fail)
        worker.init_blocking_progress_mode()
        loop.add_reader(worker.epoll_file_descriptor, self._work)
        self.soon()

    async def until_completed(self, request: Any, buffer: object) -> None:  # UCXRequest
        """Wait for a message to be received or sent; ``buffer`` holds it."""
        if not request.completed:
            done: asyncio.Future[None] = self._loop.create_future()
            self._awaited[done] = request
            self.soon()
            try:
                await done
            except BaseException:
                self._kept.append((request, buffer))
                raise
            finally:
                self._awaited.pop(done, None)
        request.check_error()

    def soon(self) -> None:
        """Let UCX work before this loop sleeps, after a new request."""
        if not self._turning:
            self._turning = True
            self._loop.call_soon(self._work)

    def _turn(self) -> None:
        self._turning = False
        self._worker.progress()
        for done, request in list(self._awaited.items()):
            if request.completed and not done.done():
                done.set_result(None)
        self._kept[:] = [kept for kept in self._kept if not kept[0].completed]
        if not self._worker.arm():  # something has come meanwhile
            self.soon()
        if self._look:
            self._look.cancel()
        self._look = self._loop.call_later(_LOOK_S, self._work) if self._awaited or self._kept else None

    def _fail(self, error: BaseException) -> None:
        """Raise the error in the tasks that await a message: their connections end."""
        for done in self._awaited:
            if not done.done():
                done.set_exception(error)


class _Endpoint:
    """ucxx's endpoint, of which messages are awaited by :class:`Progress`."""

    def __init__(self, endpoint: Any, progress: Progress) -> None:
        self._endpoint, self._progress = endpoint, progress

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._begin, name) if name in _MESSAGES else getattr(self._endpoint, name)

    def _begin(self, name: str, buffer: object, *how: object) -> Any:  # with ucxx's method wait
        request = getattr(self._endpoint, name)(buffer, *how)
        return SimpleNamespace(wait=functools.partial(self._progress.until_completed, request, buffer))

    def close_blocking(self, **limits: int) -> None:
        self._endpoint.close_blocking(**limits)
        self._progress.soon()  # tasks that await its messages hear that none will come


class _Ordered:
    """ucxx's Endpoint; before the first device memory of a message moves, a thread waits for the device's work.

    distributed-ucxx 0.52 waits in the event loop, both ways: no heartbeat is sent while a long kernel runs.
    """

    def __init__(self, endpoint: Any) -> None:
        self._endpoint = endpoint
        self.is_settled = {"send": False, "recv": False}  # for the message under way

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)

    async def send(self, buffer: Any) -> None:
        await self._settle("send", buffer)
        await self._endpoint.send(buffer)

    async def recv(self, buffer: Any) -> None:  # work of those who had its memory before may not have ended
        await self._settle("recv", buffer)
        await self._endpoint.recv(buffer)

    async def send_multi(self, buffers: Sequence[Any]) -> None:
        for buffer in buffers:
            await self._settle("send", buffer)
        await self._endpoint.send_multi(buffers)

    async def _settle(self, way: str, buffer: Any) -> None:
        if not self.is_settled[way] and hasattr(buffer, "__cuda_array_interface__"):
            self.is_settled[way] = True
            await supervise.to_thread(_wait_for_device)


class UcxComm(UCXX):
    """A connection whose reader can be cancelled, and whose end does not wait for a peer that is gone."""

    def __init__(self, ep: Any, *args: Any, **kwargs: Any) -> None:  # as there
        super().__init__(ep, *args, **kwargs)
        ep._ep = _awaited_here(ep._ep)
        self._ordered = _Ordered(ep)

    @property
    def ep(self) -> Any:
        """Ucxx's Endpoint; raises CommClosedError if the connection is closed."""
        return self._ordered if super().ep else None

    async def write(self, *args: Any, **kwargs: Any) -> int:
        """Write a message."""
        self._ordered.is_settled["send"] = False
        return int(await super().write(*args, **kwargs))

    async def read(self, deserializers: Any = None) -> Any:
        """Read a message; a cancellation stays one: else its task would go on, and its waiters wait for ever."""
        self._ordered.is_settled["recv"] = False
        try:
            return await super().read(deserializers)
        except CommClosedError as e:  # of distributed-ucxx for a cancellation, too (except BaseException)
            if isinstance(reason := e.__context__, asyncio.CancelledError):
                raise reason from None
            raise

    async def close(self) -> None:
        """Say goodbye, and close within _CLOSE_S; distributed-ucxx has no limit."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await super().close()
        except TimeoutError:
            self.abort()


def _awaited_here(endpoint: Any) -> Any:  # UCXEndpoint
    progress = _prepare().get(asyncio.get_running_loop())
    return _Endpoint(endpoint, progress) if isinstance(progress, Progress) else endpoint  # as UCXPY_PROGRESS_MODE says


@functools.cache
def _prepare() -> dict[asyncio.AbstractEventLoop, Any]:
    """Make ucxx use :class:`Progress` on event loops from now on; return those that it has made."""
    os.environ.setdefault("UCX_LOG_FILE", "stderr")  # else its warnings stand among a script's results on stdout
    users = _CUDAS in os.environ
    from ucxx._lib_async import application_context, listener  # not before a fork, and UCX's variables

    if not users and not Path("/dev/nvidiactl").exists():
        os.environ.pop(_CUDAS, None)
    application_context.BlockingMode = Progress
    exchange = application_context.exchange_peer_info

    async def exchange_peer_info(endpoint: Any, **how: Any) -> Any:
        return await exchange(endpoint=_awaited_here(endpoint), **how)

    application_context.exchange_peer_info = listener.exchange_peer_info = exchange_peer_info
    tasks: dict[asyncio.AbstractEventLoop, Any] = application_context.ProgressTasks
    return tasks


class _Backend(UCXXBackend):
    def get_connector(self) -> UCXXConnector:
        _prepare()
        return super().get_connector()

    def get_listener(self, *args: Any, **kwargs: Any) -> UCXXListener:
        _prepare()
        return super().get_listener(*args, **kwargs)


def adopt() -> None:
    """Use this module for connections that the process makes from now on."""
    UCXXConnector.comm_class = UCXXListener.comm_class = UcxComm
    theirs.synchronize_stream = lambda *_: None
    messages.register()
    if not isinstance(backends.get("ucx"), _Backend):
        backends["ucx"] = _Backend()

"""Every private name of distributed that hpcgpu uses, as read in version 2026.8.0."""

from __future__ import annotations

import asyncio
import contextlib
import dis
import hmac
import inspect
import logging
import re
import ssl
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import dask
import distributed
import psutil
import tornado.tcpserver
from distributed import Client, Nanny, Scheduler, Worker
from distributed.comm.core import CommClosedError
from distributed.comm.registry import backends
from distributed.comm.tcp import BaseTCPListener, TCPListener, TLSListener
from distributed.core import error_message
from distributed.deploy.cluster import Cluster
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.worker_memory import NannyMemoryManager
from tornado.iostream import SSLIOStream, StreamClosedError
from tornado.web import ErrorHandler, RedirectHandler, RequestHandler

from hpcgpu.errors import HpcGpuError
from hpcgpu.host import nvml
from hpcgpu.model.waits import Backoff
from hpcgpu.supervise import FailureLog, log_errors, only_log

_LOWEST = "2025.4"  # as in pyproject.toml, whose bound an environment may not keep
if [int(n) for n in re.findall(r"\d+", distributed.__version__)[:2]] < [int(n) for n in _LOWEST.split(".")]:
    raise HpcGpuError(
        f"hpcgpu needs distributed {_LOWEST} or newer; this is {distributed.__version__}, {distributed.__path__[0]}: "
        f"pip install 'distributed>={_LOWEST}'"
    )
# distributed logs a traceback for the search for a scheduler that end_clients() ends, and for the answer to a worker's
# end (Nanny._on_worker_exit) that the end of its leader overtakes. Neither is an error.
for _name in ("distributed.client", "distributed.nanny"):
    logging.getLogger(_name).addFilter(lambda line: asyncio.CancelledError not in (line.exc_info or ()))
_LOOK_S = 0.1  # distributed.worker.memory.monitor-interval, left at its default


def spare_nvml(always: bool = False) -> None:
    """Keep this process's monitors from an NVML that fails: init_once raises NVMLError_LibRmVersionMismatch."""
    if always or nvml.read().trouble:
        dask.config.set({"distributed.diagnostics.nvml": False})


def _was_closed(error: BaseException) -> bool:
    """Return whether one side has closed the connection, and nothing wrong was said on it: so they end with a run."""
    while error.__cause__:
        error = error.__cause__
    error = getattr(error, "real_error", None) or error
    return isinstance(error, StreamClosedError | ConnectionError | ssl.SSLZeroReturnError | ssl.SSLEOFError)


class _Limited(BaseTCPListener):
    """A listener that reports its handshakes, TLS's and Dask's; distributed sets them no limit (_handle_stream)."""

    handshakes: ClassVar[Any]  # deploy.processes.handshakes.HandshakeDeadline
    certificates: ClassVar[dict[str, Any]] = {}  # of peers, which all have one: a dict of 1 KiB for each connection

    def _handle_stream(self, stream: Any, address: Any) -> Any:
        # here, at once: the coroutine begins only after up to 128 connections have been accepted
        self.handshakes.begin(stream, f"{self.prefix}{address[0]}")
        return super()._handle_stream(stream, address)

    async def on_connection(self, comm: Any, handshake_overrides: dict[str, Any] | None = None) -> None:
        stream = comm.stream
        try:
            await super().on_connection(comm, handshake_overrides)
        except Exception as e:  # whatever the peer sent: it was no handshake
            self.end(stream, e)
            comm.abort()
            raise CommClosedError(str(e)) from e
        self.handshakes.done(stream)
        if certificate := comm.extra_info.get("peercert"):
            comm.extra_info["peercert"] = self.certificates.setdefault(repr(certificate), certificate)

    def end(self, stream: Any, why: Exception) -> None:
        """Take note of one that has ended."""
        if _was_closed(why):
            self.handshakes.done(stream)
        else:
            self.handshakes.fail(stream, getattr(why, "real_error", None) or why)


class _TcpListener(_Limited, TCPListener):
    """Of ``tcp://``."""


class _TlsListener(_Limited, TLSListener):
    """Of ``tls://``; distributed's own logs a line for each handshake that fails."""

    async def _prepare_stream(self, stream: Any, address: Any) -> Any:
        try:
            await stream.wait_for_handshake()
        except OSError as e:
            self.end(stream, e)
            return None
        return stream


class _AcceptedStream(SSLIOStream):
    """A stream that a server has accepted, with the TLS context of its socket.

    Without one tornado (6.6) makes a context of all certificate authorities of the system, which it does not use: 35
    CPU ms on the event loop, at the first connection of each process.
    """

    def __init__(self, sock: ssl.SSLSocket, **kwargs: Any) -> None:
        super().__init__(sock, ssl_options=sock.context, **kwargs)


def limit_handshakes(handshakes: Any) -> None:
    """Make the listeners that this process opens from now on report their handshakes."""
    _Limited.handshakes = handshakes
    for scheme, listener in (("tcp", _TcpListener), ("tls", _TlsListener)):
        backends[scheme]._listener_class = listener
    tornado.tcpserver.SSLIOStream = _AcceptedStream  # type: ignore[attr-defined] # of a package with a stub


def guard_http(
    scheduler: Scheduler, secret: str, load: Callable[[], None], page: type[RequestHandler], refusal: str
) -> None:
    """Refuse, by ``page``, paths that do not begin with the secret; load the dashboard at the first that does."""
    app, server = scheduler.http_application, scheduler.http_server
    inner, handle_stream = app.find_handler, server.handle_stream
    loaded = False

    # A connection without such a request counts as one without a handshake. distributed's own http_prefix is no secret:
    # "/" redirects to it and /sitemap.json lists it. With it pages name each other from the root, and are lost behind a
    # proxy that puts a path before them (jupyter-server-proxy); without it by relative links. So the secret is taken
    # off the path here. Importing bokeh costs 0.3 CPU s: only a cluster whose dashboard is looked at pays it.
    def handle(stream: Any, address: Any) -> None:
        _Limited.handshakes.begin(stream, f"http://{address[0]}")
        handle_stream(stream, address)

    def find_handler(request: Any, **kwargs: Any) -> Any:
        nonlocal loaded
        first, slash, rest = request.path.removeprefix("/").partition("/")
        if not secret or not hmac.compare_digest(first.encode(), secret.encode()):
            return app.get_handler_delegate(request, page, {"text": refusal})
        _Limited.handshakes.done(request.connection.stream)
        if not loaded:
            loaded = True
            load()
        if not rest:
            url = "status" if slash else f"{secret}/status"
            return app.get_handler_delegate(request, RedirectHandler, {"url": url, "permanent": False})
        if rest == "sitemap.json":  # distributed's (2026.8.0) raises KeyError at bokeh's static files without a path
            return app.get_handler_delegate(request, ErrorHandler, {"status_code": 404})
        request.path = f"/{rest}"
        return inner(request, **kwargs)

    app.find_handler, server.handle_stream = find_handler, handle


class MemoryManager(NannyMemoryManager):
    """The nanny's memory monitor without simulated device memory, which only the kernel takes for host memory."""

    def __init__(self, nanny: Nanny, *, memory_limit: int, simulated_bytes: Callable[[], int]) -> None:
        self._simulated_bytes = simulated_bytes
        self._failures = FailureLog("the look at a worker's memory", Backoff(_LOOK_S, _LOOK_S))
        super().__init__(nanny, memory_limit=memory_limit)

    def memory_monitor(self, nanny: Nanny) -> None:
        """Terminate the worker only if its memory without the simulated part is over the limit; log an error once."""
        try:
            process = nanny.process and nanny.process.process
            with contextlib.suppress(psutil.Error):
                used = psutil.Process(process.pid).memory_info().rss - self._simulated_bytes() if process else 0
                if used > self.memory_limit * self.memory_terminate_fraction:
                    super().memory_monitor(nanny)
        except Exception as e:
            self._failures.failed(e)
        else:
            self._failures.went_well()


def exclude_simulated(worker: Worker, simulated_bytes: Callable[[], int]) -> None:
    """Let the worker's own memory monitor leave simulated device memory out."""
    measured = worker.monitor.get_process_memory
    worker.monitor.get_process_memory = lambda: max(0, measured() - simulated_bytes())


def on_worker_exit(nanny: Nanny, code: int) -> None:
    """Tell the nanny that its worker ended; it unregisters and restarts as its state says."""
    nanny._on_worker_exit_sync(code)


class _SharedVersions(SchedulerPlugin):
    """Lets workers with the same versions share the packages and the host of one: 10,000 are usually one."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[str, Any]] = {}  # by versions and address

    def add_worker(self, scheduler: Scheduler, worker: str) -> None:
        """Share the versions of a new worker; distributed compares them afterwards (Scheduler.add_worker)."""
        state = scheduler.workers[worker]
        same = self._workers.setdefault(repr(state.versions), {})
        same[worker] = state
        if state.versions:
            first = next(iter(same.values())).versions
            state.versions.update(first)  # frames of its registration hold it as long as the worker lives, and metrics
            state.versions = first
        metrics, state.metrics = state.metrics, dict(state.metrics)  # until its first heartbeat
        metrics.clear()

    def remove_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Forget a worker; distributed calls this in the turn in which it does."""
        for same in self._workers.values():
            same.pop(worker, None)
        self._workers = {versions: same for versions, same in self._workers.items() if same}

    def one_of_each(self) -> list[tuple[str, Any]]:
        """Return the address and state of a worker for each set of versions."""
        return [next(iter(same.items())) for same in self._workers.values()]


def share_versions(scheduler: Scheduler) -> None:
    """Let a scheduler compare each set of versions once at a join, not those of each worker."""
    shared, workers = _SharedVersions(), scheduler.workers
    # distributed makes a dict of all workers' versions at each join of a worker or client, and looks up 12 packages of
    # each: 21 of the 24 CPU s of 2,000 joins, and four times as much for twice as many. These functions have no other
    # use for the items of scheduler.workers; one that asks for any items a second time gets all, and is only slow.
    codes = [inspect.unwrap(of).__code__ for of in (Scheduler.add_worker, Scheduler.add_client)]
    comparing = [code for code in codes if [each.argval for each in dis.get_instructions(code)].count("items") == 1]

    def items() -> Any:
        return shared.one_of_each() if sys._getframe(1).f_code in comparing else type(workers).items(workers)

    workers.items = items
    scheduler.add_plugin(shared, name="hpcgpu-versions")


def fail_futures(scheduler: Scheduler, error: BaseException, *, waiting: bool = False) -> None:
    """End every future that a client holds with this error; if ``waiting``, only those whose tasks have not ended."""
    facts = error_message(error)
    for task in list(scheduler.tasks.values()):
        if task.who_wants and not (waiting and task.state in ("memory", "erred")):
            message = {"op": "task-erred", "key": task.key, "exception": facts["exception"], "traceback": None}
            scheduler.report(message, ts=task)


def end_clients(cluster: Cluster, reason: str) -> None:
    """Close the clients of a cluster without a scheduler, and end their futures with the reason."""

    # A client looks for its scheduler for 30 s; what is submitted meanwhile ends then, and what a moment later never.
    async def end(client: Client) -> None:
        client._handle_report_task.cancel()
        for step in (asyncio.wait([client._handle_report_task]), client._close(fast=True)):
            await step
            while client.futures:
                client.futures.popitem()[1].cancel(reason=reason)
        if client.loop is cluster.loop and not client._asynchronous:
            client._loop_runner.stop()  # else its thread stays: Client.close() does not stop it for a closed client

    for client in [each for each in Client._instances if each.cluster is cluster]:
        client.loop.add_callback(end, client)


def end_thread(cluster: Cluster, is_over: Callable[[], bool]) -> None:
    """End the thread of a synchronous cluster's event loop, and its clients if the cluster ``is_over`` by then.

    Their scheduler is gone, so they close themselves, and Client.close() does nothing any more: they kept the thread.
    """

    def end(*_: object) -> None:
        ours = [each for each in Client._instances if each.cluster is cluster and not each._asynchronous]
        for client in [each for each in ours if is_over() and each.loop is cluster.loop]:
            if not cluster.asynchronous:
                client.close()
            if client.status == "closed":
                client._loop_runner.stop()
        with contextlib.suppress(RuntimeError):  # on that thread, which cannot wait for its own end
            cluster._loop_runner.stop()

    if not cluster.asynchronous:
        end()
    elif not cluster._loop_runner._asynchronous and (caller := asyncio.current_task()):  # of Client.shutdown()
        caller.add_done_callback(log_errors(end, "the end of an event loop", only_log))


def bound_hosts(scheduler: Scheduler) -> list[str]:
    """Return the hosts at which a scheduler listens; ``0.0.0.0`` and ``::`` are a family's all. Empty for UCX."""
    (listener,) = scheduler.listeners
    server = getattr(listener, "tcp_server", None)
    return [sock.getsockname()[0] for sock in server._sockets.values()] if server else []


def original_local_directory(nanny: Nanny) -> str | None:
    """Return the ``local_directory`` that the nanny was given, in which it has made its own folder."""
    return nanny._original_local_dir

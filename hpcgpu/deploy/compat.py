"""Every private name of distributed that we touch, with the version in which it was read (2026.8.0)."""

from __future__ import annotations

import functools
import hmac
import time
from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any

import psutil
from distributed import Nanny, Scheduler, Worker
from distributed.core import error_message
from distributed.http.routing import RoutingApplication
from distributed.worker_memory import NannyMemoryManager
from tornado.web import ErrorHandler


def guard_http(scheduler: Scheduler, secret: str) -> None:
    """Refuse every request whose path does not begin with the secret; load the dashboard at the first that does.

    distributed's own ``http_prefix`` is no secret: ``/`` redirects to it and ``/sitemap.json`` lists it.
    Importing bokeh costs the scheduler 0.3 CPU s, which only those pay who look.
    """
    app = scheduler.http_application
    inner = app.find_handler
    loaded = False

    def find_handler(request: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        nonlocal loaded
        first = request.path.lstrip("/").split("/")[0]
        if not secret or not hmac.compare_digest(first.encode(), secret.encode()):
            return app.get_handler_delegate(request, ErrorHandler, {"status_code": 404})
        if not loaded:
            loaded = True
            _load_dashboard(scheduler, f"/{secret}")
        return inner(request, **kwargs)

    app.find_handler = find_handler


def _load_dashboard(scheduler: Scheduler, prefix: str) -> None:
    try:
        import distributed.dashboard.scheduler as dashboard
    except ImportError:
        return  # distributed's own page at /info stays
    dashboard.connect(scheduler.http_application, scheduler.http_server, scheduler, prefix=prefix)


class SilentWorker(Worker):
    """A Worker without an HTTP server: nothing listens beyond what the cluster needs."""

    def start_http_server(self, routes: list[Any], dashboard_address: object, *_: object, **__: object) -> None:
        """Keep the application (Worker.start_unsafe wants one), open no socket."""
        self.http_application = RoutingApplication(routes)
        self.http_server = _NoServer()


class _NoServer:
    """What Worker looks at of its HTTP server."""

    port = 0
    address = ""

    def stop(self) -> None:
        """Nothing to stop."""


class MemoryManager(NannyMemoryManager):
    """The nanny's memory monitor, without simulated device memory, which is host memory to the kernel only."""

    def __init__(self, nanny: Nanny, *, memory_limit: int, simulated_bytes: Callable[[], int]) -> None:
        self._simulated_bytes = simulated_bytes
        super().__init__(nanny, memory_limit=memory_limit)

    def memory_monitor(self, nanny: Nanny) -> None:
        """Terminate the worker only when its memory is over the limit without what is simulated."""
        process = nanny.process and nanny.process.process
        if process is None:
            return
        try:
            used = psutil.Process(process.pid).memory_info().rss - self._simulated_bytes()
        except psutil.Error:
            return
        if used > self.memory_limit * self.memory_terminate_fraction:
            super().memory_monitor(nanny)


def exclude_simulated(worker: Worker, simulated_bytes: Callable[[], int]) -> None:
    """Let the worker's own memory monitor leave simulated device memory out."""
    measured = worker.monitor.get_process_memory
    worker.monitor.get_process_memory = lambda: max(0, measured() - simulated_bytes())


def read_with_handles(
    worker: Worker, context: Callable[..., AbstractContextManager[None]], lost: Container[Any]
) -> None:
    """Let the worker's event loop read its data in this context: before a task, and for a peer.

    Keys in ``lost`` are not sent: one value that cannot be read would keep all that are asked for with it.

    ``who`` is the address of a worker that asks for its own store, and None for clients and what they gather
    (distributed 2026.8.0: worker.py:1246, 1965; client.py:2467).
    """
    execute, get_data = worker.execute, worker.handlers["get_data"]

    @functools.wraps(execute)
    async def execute_with_handles(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        with context():
            return await execute(*args, **kwargs)

    @functools.wraps(get_data)
    async def get_data_with_handles(comm: Any, keys: Any = (), who: str | None = None, **kwargs: Any) -> Any:  # noqa: ANN401
        readable = [k for k in keys if k not in lost]
        with context(to_worker=who is not None):
            return await get_data(comm, keys=readable, who=who, **kwargs)

    worker.execute = execute_with_handles
    worker.handlers["get_data"] = get_data_with_handles


def on_worker_exit(nanny: Nanny, code: int) -> None:
    """Tell the nanny that its worker ended; it unregisters and restarts as its state says."""
    nanny._on_worker_exit_sync(code)


def fail_futures(scheduler: Scheduler, error: BaseException) -> None:
    """Let every future that a client waits for end with this error.

    A client that only loses its connection says "Client lost the connection to the scheduler", and not why.
    """
    facts = error_message(error)
    for task in list(scheduler.tasks.values()):
        if task.who_wants:
            message = {"op": "task-erred", "key": task.key, "exception": facts["exception"], "traceback": None}
            scheduler.report(message, ts=task)


def bound_hosts(scheduler: Scheduler) -> list[str]:
    """Return where a scheduler listens; ``0.0.0.0`` and ``::`` are all addresses of a family. Empty for UCX."""
    (listener,) = scheduler.listeners
    server = getattr(listener, "tcp_server", None)
    return [sock.getsockname()[0] for sock in server._sockets.values()] if server else []


def forgive_silence(scheduler: Scheduler) -> None:
    """Let no worker count as silent for the time in which the scheduler could not have heard it (worker-ttl)."""
    for worker in scheduler.workers.values():
        worker.last_seen = time.time()


def original_local_directory(nanny: Nanny) -> str | None:
    """Return the ``local_directory`` given to the nanny, before it made a folder in it."""
    directory: str | None = nanny._original_local_dir
    return directory

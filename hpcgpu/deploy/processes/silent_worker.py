"""distributed's Worker without an HTTP server, and without log lines about its own end."""

from __future__ import annotations

import asyncio
from typing import Any

from distributed import Worker
from distributed.http.routing import RoutingApplication


class SilentWorker(Worker):
    """A Worker that opens no socket for HTTP, and that closes without interrupting a heartbeat.

    distributed (2026.8.0, ``Worker.close``) closes its connections while a heartbeat waits for the scheduler's answer,
    and logs a traceback for it, "Failed to communicate with scheduler during heartbeat".
    """

    _beat: asyncio.Task[Any] | None = None

    def start_http_server(self, routes: list[Any], dashboard_address: object, *_: object, **__: object) -> None:
        """Make the application (Worker.start_unsafe needs one), but open no socket."""
        self.http_application = RoutingApplication(routes)
        self.http_server = _NoServer()

    async def heartbeat(self) -> None:
        """Send a heartbeat; it ends without a log line when the worker closes."""
        self._beat = asyncio.current_task()  # of tornado's PeriodicCallback, which is stopped before it is cancelled
        try:
            await super().heartbeat()
        finally:
            self._beat = None

    async def close(self, *args: Any, **kwargs: Any) -> str | None:
        """Close as distributed does, after cancelling a heartbeat under way, unless it is the caller."""
        self.periodic_callbacks["heartbeat"].stop()
        # The heartbeat task itself may close the worker. Later callers must not cancel it.
        beat, self._beat = self._beat, None
        if beat not in (None, asyncio.current_task()):
            beat.cancel()
            await asyncio.wait([beat])
        return await super().close(*args, **kwargs)


class _NoServer:
    """The members of an HTTP server that Worker uses."""

    port = 0
    address = ""

    def stop(self) -> None:
        """Do nothing."""

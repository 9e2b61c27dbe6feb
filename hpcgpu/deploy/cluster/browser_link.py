"""The dashboard's link of one cluster object: a port of this machine, and a file with the address."""

from __future__ import annotations

import functools
import os
import socket
from pathlib import Path
from typing import Any

from hpcgpu.deploy.network.dashboard import HANDLER, Forwarder, far_hint, link
from hpcgpu.host import private
from hpcgpu.supervise import tasks


class BrowserLink:
    """Lead browsers of this machine to the dashboard. Not thread-safe: for the thread of the event loop.

    Each object that is attached to the run has a file of its own in the run's folder, for people who see only a log.
    """

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._folder, self._port, self._secret = folder, port, ""
        self._scheduler: Any = None
        self._forwarder: Forwarder | None = None

    @property
    def url(self) -> str:
        """The address for the user's browser, with a secret; "" without a dashboard."""
        return link(self._forwarder.port, self._secret, os.environ) if self._forwarder else ""

    @property
    def lines(self) -> tuple[str, str]:
        """The way to the dashboard, which exists: for people, and for logs, without the secret."""
        assert self._forwarder
        hint = far_hint(self._forwarder.port, os.environ, socket.gethostname())
        return f"dashboard: {self.url}{hint}", f"dashboard: cat {self._file}{hint}"

    async def lead_to(self, scheduler: Any, secret: str) -> bool:
        """Lead to the dashboard of this scheduler (distributed's rpc); return whether it is another one than before.

        ``secret``: the first part of the dashboard's paths; "": it has none.
        """
        is_new, self._scheduler, self._secret = secret != self._secret, scheduler, secret
        if not secret or not is_new:
            return False
        self._forwarder = self._forwarder or await Forwarder.open(self._connect, lambda: self._secret, self._port)
        await tasks.to_thread(functools.partial(private.write, self._file, f"{self.url}\n"))
        return True

    async def close(self) -> None:
        """Close the port and remove the file."""
        if self._forwarder:
            self._forwarder.close()
            await tasks.to_thread(functools.partial(self._file.unlink, missing_ok=True))
            self._forwarder = None

    @property
    def _file(self) -> Path:
        assert self._forwarder
        return self._folder / f"dashboard-{self._forwarder.port}"

    async def _connect(self) -> Any:  # distributed's comm
        comm = await self._scheduler.live_comm()
        await comm.write({"op": HANDLER, "reply": False})
        return comm

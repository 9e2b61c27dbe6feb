"""The way from a user's browser to the dashboard: a port of this machine's loopback, and Dask's own connections.

The dashboard listens on the loopback of the scheduler's node. This process has a connection to the scheduler that both
sides have authenticated; more of them carry what a browser sends, byte by byte: HTTP and websockets alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, Self

import dask
from distributed.core import CommClosedError
from distributed.utils import format_dashboard_link

from hpcgpu import supervise
from hpcgpu.errors import message_of
from hpcgpu.host import log, private
from hpcgpu.host.relay import Mux, Newcomers, ssh_command
from hpcgpu.host.run import ended

# The scheduler's handler; hpcgpu.deploy.processes.dashboard_http serves it.
HANDLER = "hpcgpu_dashboard"
_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_ENDING_S = 5.0
_NEXT_PORTS = 100
# A Jupyter server that has it makes clusters in its own process, and proxies to host and port of their links (7.0).
_EXTENSION = "dask_labextension"
_DASKS_TEMPLATE = "{scheme}://{host}:{port}/status"
# People come here by the link of distributed's Client, which has no secret.
NO_SECRET = (
    "The dashboard's address begins with a secret. It is missing here, or belongs to another cluster.\n"
    "The owner of the cluster finds the whole address in cluster.dashboard_link (Python),\n"
    'or in the file that the log of the run names: "dashboard: its address is in FILE".\n'
)
_NOT_FOUND = (
    "HTTP/1.1 404 Not Found\r\nContent-Type: text/plain; charset=utf-8\r\n"
    f"Content-Length: {len(NO_SECRET)}\r\nConnection: close\r\n\r\n{NO_SECRET}"
).encode()
_NO_WAY = b"HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n"


class Forwarder:
    """A port of this machine's loopback that leads to the dashboard.

    ``connect`` returns a connection to the scheduler's :data:`HANDLER`, or raises OSError if there is no scheduler now.
    ``secret`` returns the first part of the dashboard's paths; requests without it get no connection.
    """

    def __init__(self, connect: Callable[[], Awaitable[Any]], secret: Callable[[], str]) -> None:
        self._connect, self._secret = connect, secret
        self._carrying: set[asyncio.Task[Any]] = set()
        self._newcomers = Newcomers()

    async def listen(self, port: int = 0) -> Self:
        """Listen on ``port`` of loopback; if it is taken, on the next free port, which is logged."""
        for number in (*range(port, min(port + _NEXT_PORTS, 1 << 16)), 0) if port else (0,):
            with contextlib.suppress(OSError):
                self._server = await asyncio.start_server(self._serve, _HOST, number)
                self.port: int = self._server.sockets[0].getsockname()[1]
                if number != port:
                    log.say(f"port {port} of this machine is taken: the link to the dashboard has port {self.port}")
                return self
        raise OSError(f"no port of {_HOST} is free")

    def close(self) -> None:
        """Stop listening, and end all connections."""
        self._server.close()
        for task in tuple(self._carrying):
            task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._carrying.add(task)
        try:
            if first := await self._newcomers.first(writer, reader.readuntil(b"\n")):
                await self._answer(first, reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # the browser has gone, or this end closes: no reader is left
        finally:
            writer.close()
            self._carrying.discard(task)

    async def _answer(self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry a browser's connection if its first request has the secret; the scheduler checks later requests."""
        parts = first.split()
        prefix = parts[1].lstrip(b"/").partition(b"/")[0].partition(b"?")[0] if len(parts) > 1 else b""
        if not hmac.compare_digest(prefix, self._secret().encode()):
            if not _is_of_extension(writer):
                writer.write(_NOT_FOUND)
                await writer.drain()
                return
            first = first.replace(b" /", f" /{self._secret()}/".encode(), 1)
        try:
            comm = await self._connect()
            await comm.write(first)
        except OSError as e:
            writer.write(_NO_WAY + f"The scheduler does not answer: {message_of(e)}\n".encode())
            await writer.drain()
            return
        await carry(comm, reader, writer)


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
        return f"dashboard: {self.url}{self.hint}", f"dashboard: its address is in {self._file}{self.hint}"

    @property
    def hint(self) -> str:
        """How a browser on another machine reaches the address, in parentheses; "" where it need not."""
        return far_hint(self.url, os.environ, socket.gethostname())

    async def lead_to(self, scheduler: Any, secret: str) -> bool:
        """Lead to the dashboard of this scheduler (distributed's rpc); return whether it is another one than before.

        ``secret``: the first part of the dashboard's paths; "": it has none.
        """
        is_new, self._scheduler, self._secret = secret != self._secret, scheduler, secret
        if not secret or not is_new:
            return False
        self._forwarder = self._forwarder or await Forwarder(self._connect, lambda: self._secret).listen(self._port)
        await supervise.to_thread(private.write, self._file, f"{self.url}\n")
        return True

    async def close(self) -> None:
        """Close the port and remove the file."""
        if self._forwarder:
            self._forwarder.close()
            await supervise.to_thread(self._file.unlink, missing_ok=True)
            self._forwarder = None

    @property
    def _file(self) -> Path:
        assert self._forwarder
        return self._folder / f"dashboard-{self._forwarder.port}"

    async def _connect(self) -> Any:  # distributed's comm
        comm = await self._scheduler.live_comm()
        await comm.write({"op": HANDLER, "reply": False})
        return comm


async def carry(comm: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes both ways until one end closes, then close both; an empty message is the end of the comm."""

    async def send() -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await comm.write(data)
        with contextlib.suppress(OSError):
            await comm.write(b"")

    sending = supervise.start(send, "a browser's connection", supervise.only_log)
    try:
        with contextlib.suppress(CommClosedError):
            while data := await comm.read():
                writer.write(data)
                await writer.drain()
    finally:
        sending.cancel()
        writer.close()
        comm.abort()


def _is_of_extension(writer: asyncio.StreamWriter) -> bool:
    """Return whether this very process has made a connection, a Jupyter server's with the extension.

    Its proxy drops the secret with the path of a link, and asks for the token or cookie of the server's user.
    """
    ends = (writer.get_extra_info("peername"), writer.get_extra_info("sockname"))
    for fd in Path("/proc/self/fd").iterdir() if _EXTENSION in sys.modules else ():
        if fd.is_socket():  # of another file, fromfd would leave its copy open
            with contextlib.suppress(OSError), socket.fromfd(int(fd.name), socket.AF_INET, socket.SOCK_STREAM) as mine:
                if (mine.getsockname(), mine.getpeername()) == ends:
                    return True
    return False


def link(port: int, secret: str, environ: Mapping[str, str]) -> str:
    """Return the dashboard's address for the user's browser, at a port of this machine's loopback.

    Dask's template ``distributed.dashboard.link`` is taken if the user has set it. In a notebook whose server is
    reached by a path, as behind JupyterHub or Open OnDemand, it is a path of jupyter-server-proxy on that server.
    """
    is_taken_apart = _EXTENSION in sys.modules
    if dask.config.get("distributed.dashboard.link") != _DASKS_TEMPLATE and not is_taken_apart:
        # "{port}/status" of any template becomes PORT/SECRET/status
        return str(format_dashboard_link(_HOST, f"{port}/{secret}"))
    base = "" if is_taken_apart else environ.get("JUPYTERHUB_SERVICE_PREFIX") or _jupyter_path(environ)
    start = f"http://{_HOST}:{port}" if base in ("", "/") else f"{base.rstrip('/')}/proxy/{port}"
    return f"{start}/{secret}/status"


def far_hint(url: str, environ: Mapping[str, str], host: str) -> str:
    """Return how a browser on another machine reaches the dashboard; "" behind a proxy, or on the user's machine."""
    port = url.removeprefix(f"http://{_HOST}:").partition("/")[0]  # of a proxy's address, no number
    if not port.isdecimal() or not (command := ssh_command(int(port), environ, host)):
        return ""
    # a click in VS Code's terminal forwards the port; one in a cell's output does not (its backLayerWebView)
    panel = f"; in VS Code, add port {port} to its panel Ports" if any(n.startswith("VSCODE_") for n in environ) else ""
    return f" (if your browser is on another machine, there: {command}{panel})"


def _jupyter_path(environ: Mapping[str, str]) -> str:
    """Return the path of this kernel's Jupyter server; "" without a server.

    The server writes it into a file (jupyter_server 2.21: jpserver-PID.json); a kernel knows the server's pid. Open
    OnDemand has servers at /node/HOST/PORT/.
    """
    pid = environ.get("JPY_PARENT_PID", "")
    if not pid:
        return ""
    try:
        from jupyter_core.paths import jupyter_runtime_dir

        facts = json.loads((Path(jupyter_runtime_dir()) / f"jpserver-{pid}.json").read_text())
        return os.fspath(facts["base_url"])
    except (ImportError, OSError, ValueError, KeyError, TypeError):
        return ""  # the kernel of something else: VS Code, a console


class Tunnel:
    """A loopback port of this machine that leads to a port of a node, through the stdin and stdout of a relay there.

    Any process that reaches the port still needs the cluster's certificate.
    """

    def __init__(self, argv: tuple[str, ...]) -> None:
        pipe = subprocess.PIPE
        self._error = FileIO(os.memfd_create("stderr"), "r+")  # a full pipe would stop the relay
        self._process = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=self._error, bufsize=0)
        self._server: asyncio.Server | None = None
        self._carrying: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, argv: tuple[str, ...]) -> Self:
        """Start the relay by its command, and listen."""
        tunnel = cls(argv)
        try:
            await tunnel._listen()
        except BaseException:  # also if we are cancelled
            await tunnel.close()
            raise
        return tunnel

    async def _listen(self) -> None:
        assert self._process.stdout
        assert self._process.stdin
        mux = await Mux.over(self._process.stdout, self._process.stdin)
        # however it ends, it closes all connections: their users look for the scheduler again
        self._carrying = supervise.start(mux.run, "the tunnel to the scheduler's node", supervise.only_log)
        self._server = await asyncio.start_server(mux.carry, _HOST, 0)
        self.address = f"{_HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def failure(self) -> str:
        """Return the relay's error once it has ended; "" while it runs."""
        if self._carrying and self._carrying.done():  # its pipe is closed: it is ending, but may not have ended yet
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended(self._process), _ENDING_S)
        if (code := self._process.poll()) is None:
            return ""
        self._error.seek(0)
        return self._error.readall().decode(errors="replace").strip() or f"it ended with exit code {code}"

    async def close(self) -> None:
        """End the relay and stop listening."""
        if self._server:
            self._server.close()
        self._process.terminate()
        await ended(self._process)
        self._error.close()
        if self._carrying:
            self._carrying.cancel()

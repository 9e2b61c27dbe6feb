"""Let the doctor's machines meet: by files in a folder of the shared home, and by connections to each other."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from hpcgpu.deploy.doctor import probes
from hpcgpu.errors import HpcGpuError
from hpcgpu.host import private
from hpcgpu.plan.doctor.facts import Launcher, Link, NodeFacts
from hpcgpu.plan.doctor.nodes import NOT_SHARED

# Files in the folder of the job.
ORDER, LAUNCHER, CONNECTED = "order", "launcher", "connected"
LISTENS, NODE = "listens-", "node-"  # with the node's name
Content = TypeVar("Content")
CONNECT_S, _ALL_S = 3.0, 30.0
TRIES = 3  # the fastest of them counts: the other machine may be at work


class Endpoint(NamedTuple):
    """An address at which a machine listens."""

    interface: str
    address: str
    port: int


class Listener:
    """Listens on all addresses of this machine until :meth:`close`, and sends its time to peers that know the token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._sockets: list[socket.socket] = []
        self.endpoints = tuple(endpoint for place in probes.interfaces() for endpoint in self._listen(*place))

    def _listen(self, interface: str, address: str) -> tuple[Endpoint, ...]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sock = socket.create_server((address, 0), family=family)
        except OSError:  # an address that is not valid yet, or no longer (IPv6: tentative)
            return ()
        self._sockets.append(sock)
        threading.Thread(target=self._serve, args=(sock,), daemon=True).start()
        return (Endpoint(interface, address, int(sock.getsockname()[1])),)

    def _serve(self, sock: socket.socket) -> None:
        while True:
            try:
                connection, _ = sock.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CONNECT_S)
                if hmac.compare_digest(connection.recv(len(self._token), socket.MSG_WAITALL), self._token):
                    connection.sendall(f"{time.time():.6f}\n".encode())

    def close(self) -> None:
        """Stop listening."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes accept
            sock.close()


def connect_all(host: str, endpoints: tuple[Endpoint, ...], token: str) -> tuple[Link, ...]:
    """Connect to a machine at each of its addresses, at once."""
    looks = {place.address: partial(connect, host, place, token) for place in endpoints}
    links, errors = probes.gather(looks, _ALL_S)
    return tuple(links.get(p.address) or _link(host, p, error=errors[p.address]) for p in endpoints)


def connect(host: str, endpoint: Endpoint, token: str) -> Link:
    """Connect up to TRIES times to a machine's Listener; return the failed attempt, or else the fastest."""
    links: list[Link] = []
    while len(links) < TRIES and not (links and links[-1].error):
        links.append(_connect(host, endpoint, token))
    return links[-1] if links[-1].error else min(links, key=lambda link: link.took_s)


def _connect(host: str, endpoint: Endpoint, token: str) -> Link:
    began_s, before_s = time.perf_counter(), time.time()
    try:
        with socket.create_connection(endpoint[1:], timeout=CONNECT_S) as sock, sock.makefile() as answers:
            sock.sendall(token.encode())
            line = answers.readline()
    except OSError as error:
        return _link(host, endpoint, error=str(error.strerror or error))
    took_s = time.perf_counter() - began_s
    try:
        return _link(host, endpoint, took_s=took_s, clock_s=float(line) - before_s - took_s / 2)
    except ValueError:
        return _link(host, endpoint, error="another program listens there")


def _link(host: str, endpoint: Endpoint, *, took_s: float = 0.0, clock_s: float = 0.0, error: str = "") -> Link:
    return Link(
        source=os.uname().nodename,
        target=host,
        interface=endpoint.interface,
        address=endpoint.address,
        took_s=took_s,
        clock_s=clock_s,
        error=error,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The nodes' task."""

    token: str  # a secret of this job
    nodes: int
    run: str  # a run document


def write(folder: Path, name: str, value: object) -> None:
    """Write facts into the job's folder, atomically."""
    private.write(folder / name, msgspec.json.encode(value).decode())


def read_order(folder: Path) -> Order:
    """Read the nodes' task; raise HpcGpuError if the folder is missing, because the home is not shared."""
    try:
        return msgspec.json.decode(private.read(folder / ORDER), type=Order)
    except FileNotFoundError as e:
        raise HpcGpuError(f"{os.uname().nodename} has no {folder}: {NOT_SHARED}, or the doctor has ended") from e


def read_listening(folder: Path) -> dict[str, tuple[Endpoint, ...]]:
    """Read the endpoints of the nodes that listen, by host."""
    paths = sorted(folder.glob(f"{LISTENS}*"))
    return {
        p.name.removeprefix(LISTENS): msgspec.json.decode(private.read(p), type=tuple[Endpoint, ...]) for p in paths
    }


def read_nodes(folder: Path) -> tuple[NodeFacts, ...]:
    """Read the facts of the nodes that have answered."""
    return _read_all(folder, NODE, NodeFacts)


def read_launcher(folder: Path) -> Launcher | None:
    """Read the launcher of the ranks; None before the job has written it."""
    return next(iter(_read_all(folder, LAUNCHER, Launcher)), None)


def _read_all(folder: Path, prefix: str, kind: type[Content]) -> tuple[Content, ...]:
    return tuple(msgspec.json.decode(private.read(path), type=kind) for path in sorted(folder.glob(f"{prefix}*")))

"""The doctor's connections between machines: a Listener at each address of one, and :func:`connect` to the others."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from functools import partial
from typing import NamedTuple

from hpcgpu.deploy.doctor import probes
from hpcgpu.plan.doctor.facts import Link

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

"""The doctor's connections between machines: a Listener at each address of one, :func:`knock` on the others.

Each address has a port for plain TCP, and one for TLS if there is a certificate.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hpcgpu.host import probes

CONNECT_S = 3.0
TRIES = 3  # the fastest of them counts: the other machine may be at work
_OTHER = "another program listens there"


class Endpoint(NamedTuple):
    """An address at which a machine listens."""

    interface: str
    address: str
    port: int
    protocol: str = "tcp"  # tcp, tls or ucx


class Answer(NamedTuple):
    """The result of one connection attempt."""

    took_s: float = 0.0  # until the answer came
    clock_s: float = 0.0  # the other machine's clock minus this one's
    error: str = ""  # "": it answered


class Listener:
    """Listens on all addresses of this machine until :meth:`close`, and sends its time to peers that know the token.

    Serves in threads. ``certificate`` has certificate and key for mutual TLS; without it there is plain TCP only.
    """

    def __init__(self, token: str, certificate: Path | None = None) -> None:
        self._token = token.encode()
        self._tls = _context(certificate, ssl.PROTOCOL_TLS_SERVER) if certificate else None
        self._sockets: list[socket.socket] = []
        self.where = tuple(
            endpoint
            for interface, address in probes.interfaces()
            for protocol in (("tcp", "tls") if certificate else ("tcp",))
            for endpoint in self._listen(interface, address, protocol)
        )

    def _listen(self, interface: str, address: str, protocol: str) -> tuple[Endpoint, ...]:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            sock = socket.create_server((address, 0), family=family)
        except OSError:  # an address that is not valid yet, or no longer (IPv6: tentative)
            return ()
        self._sockets.append(sock)
        tls = self._tls if protocol == "tls" else None
        threading.Thread(target=self._serve, args=(sock, tls), daemon=True).start()
        return (Endpoint(interface, address, int(sock.getsockname()[1]), protocol),)

    def _serve(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        while True:
            try:
                connection, _ = sock.accept()
            except OSError:  # closed
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(CONNECT_S)
                self._answer(tls.wrap_socket(connection, server_side=True) if tls else connection)

    def _answer(self, connection: socket.socket) -> None:
        data = b""
        with connection:
            while len(data) < len(self._token) and (more := connection.recv(len(self._token) - len(data))):
                data += more  # TLS has no MSG_WAITALL
            if hmac.compare_digest(data, self._token):
                connection.sendall(f"{time.time():.6f}\n".encode())

    def close(self) -> None:
        """Stop listening."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes accept
            sock.close()


def _context(certificate: Path, way: int) -> ssl.SSLContext:
    """Return a TLS context like a cluster's: both sides show the same certificate and accept no other."""
    context = ssl.SSLContext(way)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate)
    context.load_verify_locations(certificate)
    return context


def knock(endpoint: Endpoint, token: str, certificate: Path | None = None) -> Answer:
    """Connect to another machine's :class:`Listener`; an endpoint of TLS needs the certificate."""
    tls = _context(certificate, ssl.PROTOCOL_TLS_CLIENT) if certificate and endpoint.protocol == "tls" else None
    began_s, before_s = time.perf_counter(), time.time()
    try:
        plain = socket.create_connection(endpoint[1:3], timeout=CONNECT_S)
        with plain, tls.wrap_socket(plain) if tls else plain as sock:
            sock.sendall(token.encode())
            with sock.makefile() as answers:
                line = answers.readline()
    except OSError as error:
        return Answer(error=str(error.strerror or error))
    return read_answer(line, time.perf_counter() - began_s, before_s)


def probe_often(endpoint: Endpoint, token: str, certificate: Path | None = None) -> Answer:
    """Connect up to TRIES times; return the failed attempt, or else the fastest."""
    answers = [knock(endpoint, token, certificate)]
    while len(answers) < TRIES and not answers[-1].error:
        answers.append(knock(endpoint, token, certificate))
    return best_of(answers)


def best_of(answers: Sequence[Answer]) -> Answer:
    """Return the failed answer, or else the fastest."""
    return next((a for a in answers if a.error), min(answers, key=lambda a: a.took_s))


def read_answer(line: str, took_s: float, before_s: float) -> Answer:
    """Parse the time that the other machine sent; ``before_s`` is this machine's time at the request."""
    try:
        return Answer(took_s, float(line) - before_s - took_s / 2)
    except ValueError:
        return Answer(error=_OTHER)

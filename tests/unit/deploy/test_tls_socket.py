"""What one broken TLS connection leaves in OpenSSL's queue of errors does not reach another one."""

from __future__ import annotations

import ctypes
import errno
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.network.scheduler_file import Certificate, security

_ERR_LIB_SYS = 2  # openssl/err.h


@pytest.fixture
def crypto() -> ctypes.CDLL:
    """Return the libcrypto of this Python's ssl."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "/libcrypto" in line}
    if not paths:
        pytest.skip("this Python has its OpenSSL inside")
    return ctypes.CDLL(sorted(paths)[0])


def leave_error(crypto: ctypes.CDLL) -> None:
    """Do what OpenSSL does when an alert cannot be sent."""
    crypto.ERR_new()
    crypto.ERR_set_error(_ERR_LIB_SYS, errno.EPIPE, None)


@pytest.fixture
def pair() -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Two ends of a connection between members of a cluster, as tornado has them: non-blocking."""
    trust = security(Certificate.make())
    ends = socket.socketpair()
    listen = trust.get_listen_args("scheduler")["ssl_context"]
    connect = trust.get_connection_args("worker")["ssl_context"]
    server = listen.wrap_socket(ends[0], server_side=True, do_handshake_on_connect=False)
    client = connect.wrap_socket(ends[1], do_handshake_on_connect=False)
    accepting = threading.Thread(target=server.do_handshake)
    accepting.start()
    client.do_handshake()
    accepting.join()
    for end in (server, client):
        end.setblocking(False)
    yield server, client
    server.close()
    client.close()


def test_a_peer_that_goes_leaves_nothing(crypto: ctypes.CDLL, pair: tuple[ssl.SSLSocket, ssl.SSLSocket]) -> None:
    server, client = pair
    assert isinstance(server, scheduler_file.TlsSocket)
    assert isinstance(client, scheduler_file.TlsSocket)
    client.send(b"last words")
    assert server.recv(100) == b"last words"
    with pytest.raises(ssl.SSLWantReadError):
        server.recv(1)
    client.close()
    try:
        assert server.recv(1) == b""
    except OSError as e:  # OpenSSL 3.4 and later
        assert e.errno in (errno.EPIPE, errno.ECONNRESET)
    assert crypto.ERR_peek_error() == 0


def test_what_others_leave_is_not_ours_for_long(crypto: ctypes.CDLL, pair: tuple[ssl.SSLSocket, ssl.SSLSocket]) -> None:
    """An error that something else in this thread left fails one call, not all that follow."""
    server, client = pair
    leave_error(crypto)
    with pytest.raises(OSError):  # noqa: PT011 - SSLError or BrokenPipeError, by the version
        server.recv(1)
    assert crypto.ERR_peek_error() == 0
    with pytest.raises(ssl.SSLWantReadError):
        server.recv(1)
    client.send(b"x")
    assert server.recv(1) == b"x"

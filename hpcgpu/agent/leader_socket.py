"""The socket of a node's leader, at which its other ranks wait: they start nothing, and end with it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator

from hpcgpu.host import log

_NAME_BYTES = 107  # of sockaddr_un, without the last NUL (unix(7))
_GOODBYE = b"end"
_DISMISS_S = 2.0


@contextlib.contextmanager
def socket_address(path: str) -> Iterator[str]:
    """Yield an address of ``path`` for bind or connect; raise FileNotFoundError if its folder does not exist."""
    if len(os.fsencode(path)) <= _NAME_BYTES:
        yield path
        return
    folder, name = os.path.split(path)
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


class LeaderSocket:
    """The socket to which a node's other ranks connect: a unix socket in a folder of mode 0700."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with socket_address(path) as address:
            self._sock.bind(address)
        self._sock.listen(1024)  # the kernel connects the ranks; the leader accepts them at its end only

    def dismiss(self, count: int, limit_s: float = _DISMISS_S) -> None:
        """Let ``count`` ranks end with exit code 0; ranks that do not come within ``limit_s`` are dead."""
        end_s = time.monotonic() + limit_s
        for _ in range(count):
            self._sock.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                return
            with sock, contextlib.suppress(OSError):
                sock.send(_GOODBYE)

    def close(self) -> None:
        """End the connections of ranks that wait."""
        self._sock.close()


def follow(rank: int, path: str) -> int:
    """Wait for the end of the leader at the socket ``path``; return the exit code."""
    with (
        contextlib.suppress(ConnectionError, FileNotFoundError),  # the leader is dead, or its folder is gone
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock,
    ):
        with socket_address(path) as address:
            sock.connect(address)
        if sock.recv(len(_GOODBYE)) == _GOODBYE:
            return 0
    log.say(f"rank {rank}: the leader of this node ended without a goodbye")
    return os.EX_SOFTWARE

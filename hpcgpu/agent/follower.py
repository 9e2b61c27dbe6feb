"""A rank that is not its node's leader: it hands its output to the leader, and waits for the end."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from hpcgpu.errors import LaunchError

_GOODBYE = b"end"
_MESSAGE_BYTES = 64


@dataclass(slots=True)
class Guest:
    """A follower, as its leader has it."""

    rank: int
    sock: socket.socket
    stdout: int
    stderr: int


class Door:
    """Where the followers of a node come to their leader: a unix socket in a folder of mode 0700."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "door")
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.bind(self.path)
        self._sock.listen(1024)

    def receive(self, count: int, deadline_s: float) -> tuple[Guest, ...]:
        """Wait for ``count`` followers.

        Raises
        ------
        LaunchError
            Somebody did not come within ``deadline_s`` seconds.

        """
        self._sock.settimeout(deadline_s)
        out: list[Guest] = []
        while len(out) < count:
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                raise LaunchError(
                    f"{count - len(out)} of this node's {count + 1} ranks met the others but did not come to their "
                    f"leader within {deadline_s:g} s"
                ) from None
            data, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 2)
            out.append(Guest(json.loads(data), sock, *fds))
        return tuple(out)

    def close(self) -> None:
        """Take no more followers."""
        self._sock.close()


def dismiss(guests: tuple[Guest, ...]) -> None:
    """Let the followers end with exit code 0."""
    for guest in guests:
        try:
            guest.sock.send(_GOODBYE)
        except OSError:
            continue  # it is gone already


def follow(rank: int, path: str) -> int:
    """Go to the leader at ``path`` and wait until it says goodbye; return the exit code."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    socket.send_fds(sock, [json.dumps(rank).encode()], [sys.stdout.fileno(), sys.stderr.fileno()])
    # the worker holds what it needs: who waits for the end of this rank's output shall not wait for this process
    if sock.recv(_MESSAGE_BYTES) == _GOODBYE:
        return 0
    print(f"hpcgpu: rank {rank}: the leader of this node ended without a goodbye", file=sys.stderr, flush=True)
    return os.EX_SOFTWARE

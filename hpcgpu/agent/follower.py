"""Follow the node's leader: hand it this rank's output, wait, and take over if it dies.

The successor of a dead leader is not elected. Each rank of the node listens on a unix socket of its own in the run's
folder before it connects to its leader, and the kernel refuses a connection exactly when the rank is dead. If the
leader dies, a follower connects to the sockets of the ranks before it, in their order. If one accepts, that rank leads,
or dies, too, which its followers see. If all refuse, all are dead, for good, and this rank leads. So two leaders never
live at once, whichever ranks die, and whenever. Every rank holds the folder's lock, so the folder outlives the leader;
it is removed in an orderly end only.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from hpcgpu.errors import LaunchError
from hpcgpu.host import log, unix_socket

_MESSAGE_BYTES = 256
_LOOK_S = 0.1


class FollowerConnection(NamedTuple):
    """A leader's connection to one follower, with the follower's output descriptors."""

    rank: int
    sock: socket.socket
    stdout: int
    stderr: int

    def tell(self, op: str, **fields: object) -> None:
        """Send a message to the follower; its death is noticed by the reader."""
        with contextlib.suppress(OSError):
            self.sock.send(_encode(op, **fields))


class LeaderSocket:
    """The socket to which a node's followers connect: a unix socket in a folder of mode 0700."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with unix_socket.address(path) as address:
            self._sock.bind(address)
        self._sock.listen(1024)

    def receive(
        self, ranks: Iterable[int], deadline_s: float, alive: Callable[[int], bool] = lambda _: True
    ) -> tuple[FollowerConnection, ...]:
        """Wait for the followers ``ranks`` that are ``alive``; raise LaunchError after ``deadline_s`` without one."""
        end = time.monotonic() + deadline_s
        waiting = set(ranks)
        out: list[FollowerConnection] = []
        self._sock.settimeout(_LOOK_S)
        while waiting:
            try:
                sock, _ = self._sock.accept()
            except TimeoutError:
                waiting = {r for r in waiting if alive(r)}
                if waiting and time.monotonic() > end:
                    raise LaunchError(
                        f"the ranks {sorted(waiting)} of this node met the others but did not come to their leader "
                        f"within {deadline_s:g} s"
                    ) from None
                continue
            data, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 2)
            if data:  # else the peer is dead, or checked whether this rank lives
                out.append(FollowerConnection(json.loads(data), sock, *fds))
                waiting.discard(out[-1].rank)
        return tuple(out)

    def close(self) -> None:
        """Accept no more followers."""
        self._sock.close()


class FailoverState(NamedTuple):
    """The state for leading a node whose ranks before this one are all dead."""

    folder: str  # of the run, on the node
    lock: int  # a descriptor that holds the folder's lock
    leader_socket: LeaderSocket
    successors: tuple[int, ...]  # the ranks after this one, dead or alive
    lost: frozenset[int]  # ranks that died as followers: their workers were retired
    since_s: float  # when the leader's death was noticed, on the monotonic clock

    def receive(self, deadline_s: float) -> tuple[FollowerConnection, ...]:
        """Wait for the followers that live."""
        return self.leader_socket.receive(
            self.successors, deadline_s, lambda rank: _answers(_socket_path(self.folder, rank))
        )


def welcome(followers: Iterable[FollowerConnection], lock: int) -> None:
    """Give the followers the folder's lock, once all are there: from now on any of them can lead."""
    for follower in followers:
        with contextlib.suppress(OSError):
            socket.send_fds(follower.sock, [_encode("welcome")], [lock])


def dismiss(followers: Iterable[FollowerConnection]) -> None:
    """Let the followers end with exit code 0."""
    for follower in followers:
        follower.tell("end")


def follow(rank: int, ranks: Sequence[int], path: str) -> int | FailoverState:
    """Follow the leader, and its successors if it dies; return the exit code, or the state for leading in their place.

    ``ranks`` are the node's, ascending; the first leads, at the socket ``path``. Rank 0, whose child is the scheduler,
    has no successor.
    """
    return _Follower(rank, ranks, path).follow()


class _Follower:
    def __init__(self, rank: int, ranks: Sequence[int], path: str) -> None:
        self._rank, self._path = rank, path
        index = ranks.index(rank)
        self._before = tuple(ranks[1:index]) if ranks[0] else ()
        self._successors = tuple(ranks[index + 1 :])
        self._can_fail_over = ranks[0] != 0
        self._lock: int | None = None
        self._lost: set[int] = set()

    def follow(self) -> int | FailoverState:
        folder = os.path.dirname(self._path)  # pathlib takes 5 CPU ms, which every rank would pay
        died_s = time.monotonic()
        with contextlib.suppress(FileNotFoundError):  # the folder is gone: the run ended without a goodbye
            leader_socket = LeaderSocket(_socket_path(folder, self._rank)) if self._can_fail_over else None
            for path in (self._path, *(_socket_path(folder, rank) for rank in self._before)):
                if self._stay(path):
                    return 0
                if path == self._path:
                    died_s = time.monotonic()
            if leader_socket and self._lock is not None:
                return FailoverState(folder, self._lock, leader_socket, self._successors, frozenset(self._lost), died_s)
        log.say(f"rank {self._rank}: the leader of this node ended without a goodbye")
        return os.EX_SOFTWARE

    def _stay(self, path: str) -> bool:
        """Follow the rank behind the socket ``path``; return whether it said goodbye: if not, it is dead."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, contextlib.suppress(ConnectionError):
            with unix_socket.address(path) as address:
                sock.connect(address)
            outputs = [sys.stdout.fileno(), sys.stderr.fileno()]
            socket.send_fds(sock, [json.dumps(self._rank).encode()], outputs)
            # the worker holds its descriptors: a reader of this rank's output need not wait for this process to end
            while True:
                data, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES, 1)
                if not data:
                    return False
                message = json.loads(data)
                if message["op"] == "end":
                    return True
                if message["op"] == "lost":
                    self._lost.add(message["rank"])
                for fd in fds:
                    if self._lock is None:
                        self._lock = fd
                    else:
                        os.close(fd)
        return False


def _socket_path(folder: str, rank: int) -> str:
    return f"{folder}/leader-{rank}"


def _answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock, unix_socket.address(path) as address:
        return sock.connect_ex(address) == 0


def _encode(op: str, **fields: object) -> bytes:
    return json.dumps({"op": op, **fields}).encode()

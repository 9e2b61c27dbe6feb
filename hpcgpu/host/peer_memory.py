"""Copies from the memory of other processes on this host, and the proof that one is the peer of a connection.

``process_vm_readv`` (Linux 3.2) copies from another process without its help, if the kernel would let the caller trace
it: both have the same user, and no rule of Yama or seccomp forbids it (ptrace(2), "Ptrace access mode checking").

Each end of a connection has a slot in its memory, and sends a challenge. The peer writes the answer into its own slot,
once; the addresses of the connection are in it, so it is no proof for another one. It stays as long as bytes are lent.
Who reads compares it before the first copy, and after each one.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import os
import secrets
import struct
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

CHALLENGE_BYTES = 32  # and of an answer
_MOST_SPANS = 512  # of one call, both ends of each (UIO_MAXIOV)
_MOST_BYTES = 1 << 30  # of one call; the kernel copies at most 2 GiB
ELSEWHERE, ENDED = "another host, or another pid namespace", "the process has ended"
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")

Spans = Iterable[tuple[int, memoryview]]  # addresses of a peer, and where their bytes go


@functools.cache
def _readv() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    vector = (ctypes.c_char_p, ctypes.c_ulong)
    call.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    return call


def _batches(spans: Spans) -> Iterator[tuple[list[int], list[int], int]]:
    """Yield what one call copies: addresses and sizes in this process, in the other one, and the sum of the sizes."""
    local: list[int] = []
    remote: list[int] = []
    total = 0
    for address, out in spans:
        start = ctypes.addressof(ctypes.c_char.from_buffer(out)) if out.nbytes else 0
        for begin in range(0, out.nbytes, _MOST_BYTES):
            nbytes = min(out.nbytes - begin, _MOST_BYTES)
            if len(local) == 2 * _MOST_SPANS or total + nbytes > _MOST_BYTES:
                yield local, remote, total
                local, remote, total = [], [], 0
            local += (start + begin, nbytes)
            remote += (address + begin, nbytes)
            total += nbytes
    if total:
        yield local, remote, total


def read(pid: int, spans: Spans) -> None:
    """Copy memory of a process into writable buffers of bytes, without the GIL; raise OSError if it is unreadable."""
    for *ends, total in _batches(spans):
        vectors = [end for words in ends for end in (struct.pack(f"={len(words)}Q", *words), len(words) // 2)]
        copied = _readv()(pid, *vectors, 0)
        if copied != total:  # only a fault ends it early
            code = ctypes.get_errno() if copied < 0 else errno.EFAULT
            if code == errno.ENOMEM:
                raise MemoryError(f"no memory to read process {pid}")
            raise OSError(code, os.strerror(code), f"memory of process {pid}")


def are_readable(spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether others, as this process, can read all spans (address, size): no driver's, and no cut file's."""
    into = ctypes.create_string_buffer(2 * _MOST_SPANS)
    for i in range(0, len(spans), _MOST_SPANS):
        part = spans[i : i + _MOST_SPANS]
        ends = [word for address, nbytes in part for word in (address, 1, address + nbytes - 1, 1)]
        local, remote = struct.pack("=QQ", ctypes.addressof(into), 2 * len(part)), struct.pack(f"={len(ends)}Q", *ends)
        if _readv()(os.getpid(), local, 1, remote, 2 * len(part), 0) != 2 * len(part):
            return False
    return True


def answer_to(challenge: bytes, local: str, remote: str) -> bytes:
    """Return what a slot has after a challenge; its process sees these addresses as those of the connection."""
    return hashlib.sha256(b"|".join((challenge, local.encode(), remote.encode()))).digest()


class Identity(NamedTuple):
    """One end of a connection, as its handshake shows it to a peer on its host."""

    host: str  # boot id and pid namespace: where the pid means this process
    pid: int
    slot: int  # an address in the memory of the process
    challenge: bytes  # for the peer

    @classmethod
    def of_this_process(cls, slot: int) -> Identity:
        """Return the identity of one end of a connection, with a challenge that no other one has."""
        return cls(host(), os.getpid(), slot, secrets.token_bytes(CHALLENGE_BYTES))

    @classmethod
    def parse(cls, value: object) -> Identity | None:
        """Return the identity in a peer's handshake; None if it has none that this version understands."""
        if not isinstance(value, Mapping):
            return None
        host, pid, slot, challenge = (value.get(name) for name in cls._fields)
        if not (isinstance(host, str) and isinstance(challenge, bytes) and len(challenge) == CHALLENGE_BYTES):
            return None
        if not (type(pid) is type(slot) is int and 0 < pid < 2**31 and 0 < slot < 2**63):
            return None
        return cls(host, pid, slot, challenge)

    def refusal(self, answer: bytes) -> str:
        """Return why this process cannot read the memory of that one; "" if it can, and its slot has the answer."""
        if self.host != host():
            return ELSEWHERE
        try:
            return "" if self._slot_text() == answer else ENDED  # another process has its pid
        except ProcessLookupError:
            return ENDED
        except OSError as e:
            rule = f"kernel.yama.ptrace_scope={_yama()}" if _yama() else "another user, or a container's rules"
            return f"process_vm_readv: {e.strerror}{f' ({rule})' if e.errno == errno.EPERM else ''}"

    def copy(self, lent: Spans, answer: bytes) -> None:
        """Copy lent buffers; raise OSError if one is unreadable, or was given up meanwhile."""
        read(self.pid, lent)
        if self._slot_text() != answer:
            raise OSError(errno.ESTALE, f"process {self.pid} has given up the bytes that it had lent")

    def _slot_text(self) -> bytearray:
        read(self.pid, [(self.slot, memoryview(text := bytearray(CHALLENGE_BYTES)))])
        return text


def obstacle() -> str:
    """Return why this process can read no other one's memory, as far as that is known without a peer; "" if it can."""
    if not host():
        return "/proc/sys/kernel/random/boot_id cannot be read"
    byte = ctypes.c_char()
    try:
        read(os.getpid(), [(ctypes.addressof(byte), memoryview(bytearray(1)))])  # seccomp forbids this, too
    except OSError as e:
        return f"process_vm_readv: {e.strerror}"
    return f"kernel.yama.ptrace_scope={_yama()}" if _yama() > 1 else ""


def _yama() -> int:
    """Return which processes Yama lets others trace (ptrace_scope): 0, all of the user; also without Yama."""
    return int(_YAMA.read_text()) if _YAMA.exists() else 0


@functools.cache
def host() -> str:
    """Return the name of this boot of the host, and of the pid namespace; "" where /proc does not show them."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # masked in a container, or gVisor
        return ""


def allow(pid: int) -> None:
    """Let a process and its descendants read this process's memory where Yama forbids it (ptrace_scope 1)."""
    if _YAMA.exists():
        ctypes.CDLL(None, use_errno=True).prctl(0x59616D61, pid, 0, 0, 0)  # PR_SET_PTRACER


class Slots:
    """Memory that is never freed, for the answers of connections; for any thread, finalizer and forked child."""

    def __init__(self, count: int = 4096) -> None:  # one connection more lends nothing
        self._memory = ctypes.create_string_buffer(count * CHALLENGE_BYTES)
        start = ctypes.addressof(self._memory)
        # no lock: a fork copies a held one, and the garbage collector may free a slot while its thread takes another
        self._free = deque(start + i * CHALLENGE_BYTES for i in range(count))

    def take(self) -> int:
        """Return the address of a free slot; 0 if all are in use."""
        try:
            return self._free.pop()
        except IndexError:
            return 0

    def write(self, slot: int, answer: bytes) -> None:
        """Write an answer: from now on the peer may read what is lent."""
        ctypes.memmove(slot, answer, CHALLENGE_BYTES)

    def free(self, slot: int) -> None:
        """Clear a slot: from now on what was lent may change."""
        ctypes.memset(slot, 0, CHALLENGE_BYTES)
        self._free.append(slot)

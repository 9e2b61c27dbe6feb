"""Memory of other processes of this host: a proof that it can be read, and one copy by the kernel.

``process_vm_readv`` (Linux 3.2) copies from another process without its help, if the kernel would let the caller trace
it: both have the same user, and no rule of Yama or seccomp forbids it (ptrace(2), "Ptrace access mode checking").
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import secrets
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_NONCE_BYTES = 32
_SPAN = struct.Struct("=QQ")  # the kernel's iovec
_MOST_SPANS = 512  # of one call, both ends of each (UIO_MAXIOV)
ELSEWHERE, ENDED = "another host, or another pid namespace", "the process has ended"
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@functools.cache
def _readv() -> Any:
    call = ctypes.CDLL(None, use_errno=True).process_vm_readv
    call.restype = ctypes.c_ssize_t
    vector = (ctypes.c_void_p, ctypes.c_ulong)
    call.argtypes = [ctypes.c_int, *vector, *vector, ctypes.c_ulong]
    return call


def read(pid: int, address: int, out: memoryview) -> None:
    """Copy memory of a process into a writable buffer of bytes, without the GIL; raise OSError if it is unreadable."""
    call, done = _readv(), 0
    start = ctypes.addressof(ctypes.c_char.from_buffer(out))
    while done < out.nbytes:  # the kernel copies at most 2 GiB at once
        left = out.nbytes - done
        copied = call(pid, _SPAN.pack(start + done, left), 1, _SPAN.pack(address + done, left), 1, 0)
        if copied <= 0:
            code = ctypes.get_errno() if copied else errno.EFAULT
            raise OSError(code, os.strerror(code), f"address {address + done:#x} of process {pid}")
        done += copied


def are_readable(spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether other processes can read all spans (address and size) of this process's memory."""
    # Pages of a driver (VM_PFNMAP), and of a file that was cut off, fail for each reader, so also for this process.
    into = (ctypes.c_char * (2 * _MOST_SPANS))()
    for i in range(0, len(spans), _MOST_SPANS):
        part = spans[i : i + _MOST_SPANS]
        ends = [word for address, nbytes in part for word in (address, 1, address + nbytes - 1, 1)]
        local, remote = _SPAN.pack(ctypes.addressof(into), 2 * len(part)), struct.pack(f"={len(ends)}Q", *ends)
        if _readv()(os.getpid(), local, 1, remote, 2 * len(part), 0) != 2 * len(part):
            return False
    return True


class Identity(NamedTuple):
    """A process as a peer on its host checks it: the nonce is at the address in the memory of the process."""

    host: str  # boot id and pid namespace: where the pid means this process
    pid: int
    address: int
    nonce: bytes

    @classmethod
    def of_this_process(cls) -> Identity:
        """Return this process's identity. A forked child has its parent's nonce, at the same address."""
        nonce = _nonce()
        return cls(_host(), os.getpid(), ctypes.addressof(nonce), bytes(nonce))

    @classmethod
    def parse(cls, value: object) -> Identity | None:
        """Return the identity in a peer's handshake; None if it has none that this version understands."""
        if not isinstance(value, Mapping):
            return None
        host, pid, address, nonce = (value.get(name) for name in cls._fields)
        if not (isinstance(host, str) and isinstance(nonce, bytes) and len(nonce) == _NONCE_BYTES):
            return None
        if not (type(pid) is type(address) is int and 0 < pid < 2**31 and 0 < address < 2**63):
            return None
        return cls(host, pid, address, nonce)

    def refusal(self) -> str:
        """Return why this process cannot read the memory of that one; "" if it can."""
        if self.host != _host():
            return ELSEWHERE
        nonce = bytearray(_NONCE_BYTES)
        try:
            read(self.pid, self.address, memoryview(nonce))
        except ProcessLookupError:
            return ENDED
        except OSError as e:
            rule = f"kernel.yama.ptrace_scope={_yama()}" if _yama() else "another user, or a container's rules"
            return f"process_vm_readv: {e.strerror}{f' ({rule})' if e.errno == errno.EPERM else ''}"
        return "" if nonce == self.nonce else ENDED  # another process has its pid


def obstacle() -> str:
    """Return why this process can read no other one's memory, as far as that is known without a peer; "" if it can."""
    try:
        read(os.getpid(), ctypes.addressof(_nonce()), memoryview(bytearray(1)))  # seccomp forbids this, too
    except OSError as e:
        return f"process_vm_readv: {e.strerror}"
    return f"kernel.yama.ptrace_scope={_yama()}" if _yama() > 1 else ""


def _yama() -> int:
    """Return which processes Yama lets others trace (ptrace_scope): 0, all of the user; also without Yama."""
    return int(_YAMA.read_text()) if _YAMA.exists() else 0


@functools.cache
def _nonce() -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * _NONCE_BYTES).from_buffer(bytearray(secrets.token_bytes(_NONCE_BYTES)))


@functools.cache
def _host() -> str:
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"


def allow(pid: int) -> None:
    """Let a process and its descendants read this process's memory where Yama forbids it (ptrace_scope 1)."""
    if _YAMA.exists():
        ctypes.CDLL(None, use_errno=True).prctl(0x59616D61, pid, 0, 0, 0)  # PR_SET_PTRACER


class Proofs:
    """Words in memory that is never freed, one for each connection: a word has its value while its bytes are lent.

    A reader compares the word after its copy: memory that was given up meanwhile may have held other bytes.
    """

    def __init__(self, count: int = 4096) -> None:  # one connection more sends its bytes itself
        self._words = (ctypes.c_uint64 * count)()
        self._free = list(range(count))
        self._lock = threading.Lock()

    def begin(self) -> tuple[int, int] | None:
        """Return address and value of a free word; None if all are in use."""
        with self._lock:
            if not self._free:
                return None
            i = self._free.pop()
            self._words[i] = value = secrets.randbits(63) + 1
        return ctypes.addressof(self._words) + 8 * i, value

    def end(self, address: int) -> None:
        """Clear a word: from now on its bytes may change."""
        i = (address - ctypes.addressof(self._words)) // 8
        with self._lock:
            self._words[i] = 0
            self._free.append(i)


def copy(pid: int, pairs: Iterable[tuple[int, memoryview]], proof: tuple[int, int]) -> None:
    """Copy a peer's lent buffers; raise OSError if one is unreadable, or was given up meanwhile."""
    for address, out in pairs:
        read(pid, address, out)
    word = ctypes.c_uint64()
    read(pid, proof[0], memoryview(word).cast("B"))
    if word.value != proof[1]:
        raise OSError(errno.ESTALE, f"process {pid} has given up the bytes that it had lent")

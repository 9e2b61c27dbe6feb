"""A loopback of this process's own that holds each packet for a while, as a network does.

``tc netem`` needs a kernel with it. Here netfilter reports each packet by its number alone (NFQUEUE), and lets it go on
when it is told to; no byte is copied. Root, and iptables.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

# linux/netfilter/nfnetlink_queue.h
_QUEUE, _PACKET, _CONFIG, _VERDICTS = 3 << 8, 0, 2, 3
_BIND, _NUMBERS_ONLY, _WHOLE, _ACCEPT = 1, 1, 4, 1  # _WHOLE: packets of 64 KiB are not cut
_NETLINK_NETFILTER, _PR_SET_TIMERSLACK, _PR_SET_PDEATHSIG, _CLONE_NEWNET = 12, 29, 1, 0x40000000
_SO_RCVBUFFORCE = 33


@contextmanager
def slow_loopback() -> Iterator[Callable[[float], float]]:
    """Give this process, and those that it starts, such a loopback; yield a function that sets its delay.

    It is called with the seconds for each way, and returns the round trip of one byte that it then measures.
    """
    delay_s = mmap.mmap(-1, 8)
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "a network namespace of its own needs root")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    rule = ["-A", "INPUT", "-i", "lo", "-j", "NFQUEUE", "--queue-num", "0"]
    subprocess.run(["iptables-legacy", *rule], check=True)
    with _queue() as sock:  # before the first packet, which would be dropped
        holder = os.fork()
        if not holder:
            try:
                _hold(sock, delay_s)
            finally:
                traceback.print_exc()
                os._exit(1)

    def set_delay(seconds: float) -> float:
        delay_s[:] = struct.pack("d", seconds)
        return _round_trip_s()

    try:
        yield set_delay
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


def _round_trip_s() -> float:
    trips_s = []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        for sock in (near, far):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(100):
            began_s = time.perf_counter()
            near.send(b" ")
            far.send(far.recv(1))
            near.recv(1)
            trips_s.append(time.perf_counter() - began_s)
        far.close()
    return median(trips_s)


def _message(kind: int, *attributes: tuple[int, bytes]) -> bytes:
    """Return a message to queue 0."""
    body = struct.pack(">BBH", socket.AF_UNSPEC, 0, 0)
    for number, value in attributes:
        body += struct.pack("=HH", 4 + len(value), number) + value + bytes(-len(value) % 4)
    return struct.pack("=IHHII", 16 + len(body), _QUEUE | kind, 1, 0, 0) + body


def _queue() -> socket.socket:
    """Return the socket that hears of each packet, by its number."""
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
    sock.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, 64 << 20)
    sock.bind((0, 0))
    sock.send(_message(_CONFIG, (1, struct.pack(">BBH", _BIND, 0, socket.AF_INET))))
    sock.send(_message(_CONFIG, (2, struct.pack(">IB", 0, _NUMBERS_ONLY)), (3, struct.pack(">I", 1 << 16))))
    sock.send(_message(_CONFIG, (4, struct.pack(">I", _WHOLE)), (5, struct.pack(">I", _WHOLE))))
    sock.setblocking(False)
    return sock


def _hold(sock: socket.socket, delay_s: mmap.mmap) -> None:
    """Hold each packet, until this process is killed."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # nanoseconds; 50,000 otherwise
    waiting = deque[tuple[float, bytes]]()
    while True:
        # epoll waits for whole milliseconds
        select.select([sock], [], [], max(0.0, waiting[0][0] - time.perf_counter()) if waiting else None)
        (each_s,) = struct.unpack("d", delay_s[:])
        try:
            while True:
                packet = sock.recv(4096)
                if packet[4] == _PACKET:  # its number is in the first attribute
                    waiting.append((time.perf_counter() + each_s, packet[24:28]))
        except BlockingIOError:
            pass
        now_s, number = time.perf_counter(), b""
        while waiting and waiting[0][0] <= now_s:
            number = waiting.popleft()[1]
        if number:  # and all before it
            sock.send(_message(_VERDICTS, (2, struct.pack(">I", _ACCEPT) + number)))

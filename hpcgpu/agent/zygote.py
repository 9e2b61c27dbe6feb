"""The image that forks: a process that has imported distributed and does nothing but fork on request.

A fork of it costs 5 ms where an import costs 0.4 CPU s. It must stay single-threaded: it is made before
MPI, event loops, CUDA and threads. Its parent is the rank; it dies with it, and its children with it.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass

from hpcgpu.host import log, process

# SOCK_SEQPACKET keeps messages whole but bounds them (about 200 KiB): the payload travels in a memfd.
_MESSAGE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Exit:
    """A child ended; ``code`` is negative for a signal, as in subprocess."""

    pid: int
    code: int


class Zygote:
    """The parent's end. Requests are answered in milliseconds, so :meth:`spawn` is a plain call."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.sock, self.pid = sock, pid
        self._exits: list[Exit] = []

    @classmethod
    def fork(cls) -> Zygote:
        """Fork this process, single-threaded and with its imports done, into a zygote."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            _serve(theirs, parent)
        theirs.close()
        return cls(ours, pid)

    @classmethod
    def execute(cls) -> Zygote:
        """Start a fresh image, for a process that has threads or has used MPI and must not fork."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = [sys.executable, "-m", "hpcgpu.agent.zygote", str(theirs.fileno()), str(os.getpid())]
        child = subprocess.Popen(argv, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        return cls(ours, child.pid)

    def spawn(self, entry: str, spec: object, fds: tuple[int, int, int]) -> int:
        """Fork a child that calls ``entry`` ("module:function") with ``(spec, control socket)``.

        Parameters
        ----------
        entry : str
            What to call.
        spec : object
            Its first argument; pickled.
        fds : (control, stdout, stderr)
            Descriptors for the child; the caller closes its own copies.

        Returns
        -------
        int
            The child's pid; its end is reported by :meth:`exits`.

        """
        memfd = os.memfd_create("hpcgpu-spec")
        try:
            with os.fdopen(os.dup(memfd), "wb") as f:
                pickle.dump((entry, spec), f)
            socket.send_fds(self.sock, [b"fork"], [memfd, *fds])
        finally:
            os.close(memfd)
        while True:
            message = self._receive()
            if message[0] == "pid":
                return int(message[1])
            self._exits.append(Exit(message[1], message[2]))

    def exits(self) -> list[Exit]:
        """Return the ends of children that have been reported, without waiting; raise EOFError if the zygote died."""
        while select.select([self.sock], [], [], 0)[0]:
            _, pid, code = self._receive()
            self._exits.append(Exit(pid, code))
        out, self._exits = self._exits, []
        return out

    def close(self) -> None:
        """End the zygote, and with it whatever it forked."""
        self.sock.close()

    def _receive(self) -> tuple[str, int, int]:
        data = self.sock.recv(_MESSAGE_BYTES)
        if not data:
            raise EOFError("the zygote died")
        message: tuple[str, int, int] = pickle.loads(data)
        return message


def _serve(sock: socket.socket, parent: int) -> None:
    """Fork on request until the parent closes its end. Never returns."""
    process.die_with_parent(parent, signal.SIGKILL)
    process.set_title("hpcgpu-zygote")
    for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(s, signal.SIG_IGN)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([sock.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _report_exits(sock)
        if sock.fileno() in ready:
            try:
                data, fds, _, _ = socket.recv_fds(sock, 16, 4)
            except ConnectionError:
                data = b""
            if not data:
                os._exit(0)
            pid = _fork_child(fds, (sock.fileno(), woken, wake))
            sock.send(pickle.dumps(("pid", pid, 0)))


def _report_exits(sock: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        sock.send(pickle.dumps(("exit", pid, os.waitstatus_to_exitcode(status))))


def _fork_child(fds: list[int], own: tuple[int, ...]) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        for fd in fds:
            os.close(fd)
        return pid
    code = 70
    try:
        process.die_with_parent(parent, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # SIGINT stays ignored: Ctrl-C is the rank's business
        for fd in own:
            os.close(fd)
        memfd, control, stdout, stderr = fds
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        os.lseek(memfd, 0, os.SEEK_SET)
        with os.fdopen(memfd, "rb") as f:
            entry, spec = pickle.load(f)
        process.reseed()
        code = process.call(entry, spec, socket.socket(fileno=control))
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        log.flush()
        os._exit(code)


if __name__ == "__main__":
    with process.importing():
        import hpcgpu.deploy.processes.worker  # noqa: F401 - the point of this process is to have imported it, and distributed

    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))

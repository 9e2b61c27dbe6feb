"""The image that forks: a process that has imported distributed and does nothing but fork on request.

A fork of it costs 5 ms where an import costs 0.4 CPU s. It must stay single-threaded: it is made before
MPI, event loops, CUDA and threads. Its parent is the rank; it dies with it, and its children with it.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from hpcgpu.errors import LaunchError
from hpcgpu.host import log, pids, process

# SOCK_SEQPACKET keeps messages whole but bounds them (about 200 KiB): the payload travels in a memfd.
_MESSAGE_BYTES = 1 << 16
# It answers in milliseconds; somebody has stopped one that does not (SIGSTOP).
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class Exit:
    """A child ended; ``code`` is negative for a signal, as in subprocess."""

    pid: int
    code: int


class Zygote:
    """The parent's end. Requests are answered in milliseconds, so :meth:`spawn` is a plain call."""

    def __init__(self, sock: socket.socket, pid: int, answer_s: float = _ANSWER_S) -> None:
        self.sock, self.pid = sock, pid
        self._started, self._answer_s = pids.start_time(pid), answer_s
        sock.settimeout(answer_s)
        self._exits: list[Exit] = []

    @classmethod
    def fork(cls) -> Zygote:
        """Fork this process, single-threaded and with its imports done, into a zygote."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        with _said():
            pid = os.fork()
        if pid == 0:
            ours.close()
            _serve(theirs, parent)
        theirs.close()
        return cls(ours, pid)

    @classmethod
    def execute(cls, lock: int) -> Zygote:
        """Start a fresh image, for a process that has threads or has used MPI and must not fork.

        ``lock`` is a descriptor that it and its children hold, as those of a fork do.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        argv = process.python_argv("hpcgpu.agent.zygote", *map(str, (theirs.fileno(), os.getpid(), lock)), users=True)
        with _said():
            child = subprocess.Popen(argv, pass_fds=[theirs.fileno(), lock], stdin=subprocess.DEVNULL)
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

        Raises
        ------
        LaunchError
            The zygote could not fork; or it did not answer, and was killed, with all that it has forked.
        EOFError
            It is dead.

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
            if message[0] == "refused":
                with _said():
                    raise OSError(message[1], os.strerror(message[1]))
            self._exits.append(Exit(message[1], message[2]))

    def exits(self) -> list[Exit]:
        """Return the ends of children that have been reported, without waiting; raise EOFError if the zygote died."""
        while select.select([self.sock], [], [], 0)[0]:
            _, pid, code = self._receive()
            self._exits.append(Exit(pid, code))
        out, self._exits = self._exits, []
        return out

    def wait_exit(self, pid: int, deadline_s: float) -> int | None:
        """Return how a child ended; None when nobody knows it within ``deadline_s`` seconds."""
        end = time.monotonic() + deadline_s
        with contextlib.suppress(EOFError, ConnectionError):
            while not (codes := [one.code for one in self._exits if one.pid == pid]):
                if not select.select([self.sock], [], [], max(0.0, end - time.monotonic()))[0]:
                    return None
                _, ended, code = self._receive()
                self._exits.append(Exit(ended, code))
            return codes[0]
        return None

    def close(self) -> None:
        """End the zygote and whatever it forked, and return when they are gone: they write to the run's folder."""
        self.sock.close()
        if self._started is not None:
            pids.wait_for_end(self.pid, self._started, self._answer_s)
            self.kill()

    def kill(self) -> None:
        """End it by force, stopped or not; one that has ended may have given its pid to somebody else."""
        if self._started is not None and pids.start_time(self.pid) == self._started:
            os.kill(self.pid, signal.SIGKILL)

    def _receive(self) -> tuple[str, int, int]:
        try:
            data = self.sock.recv(_MESSAGE_BYTES)
        except TimeoutError:
            self.kill()
            raise LaunchError(
                f"the zygote, process {self.pid}, did not answer within {self._answer_s:g} s, and was killed"
            ) from None
        if not data:
            raise EOFError("the zygote died")
        message: tuple[str, int, int] = pickle.loads(data)
        return message


@contextlib.contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise LaunchError(process.refused(e) or f"the processes of this node could not be forked: {e}") from e


def _serve(sock: socket.socket, parent: int) -> None:
    """Fork on request until the parent closes its end. Never returns."""
    process.die_with_parent(parent, signal.SIGKILL)
    process.set_title("hpcgpu-zygote")
    for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(s, signal.SIG_IGN)
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: set[int] = set()
    while True:
        ready = select.select([sock.fileno(), woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _report_exits(sock, children)
        if sock.fileno() in ready:
            try:
                data, fds, _, _ = socket.recv_fds(sock, 16, 4)
            except ConnectionError:
                data = b""
            if not data:
                _end(children)
            try:
                answer = ("pid", _fork_child(fds, (sock.fileno(), woken, wake)), 0)
                children.add(answer[1])
            except OSError as e:
                answer = ("refused", e.errno or 0, 0)
            sock.send(pickle.dumps(answer))


def _end(children: set[int]) -> NoReturn:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)
    os._exit(0)


def _report_exits(sock: socket.socket, children: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        children.discard(pid)
        sock.send(pickle.dumps(("exit", pid, os.waitstatus_to_exitcode(status))))


def _fork_child(fds: list[int], own: tuple[int, ...]) -> int:
    parent = os.getpid()
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid:
            for fd in fds:
                os.close(fd)
    if pid:
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

    os.set_inheritable(int(sys.argv[3]), False)  # forks have it, programs that they start have not
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))

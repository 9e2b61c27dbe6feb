"""The fork server: a process that has imported distributed and only forks on request.

A fork of it costs 5 ms where an import costs 0.4 CPU s. It must stay single-threaded: it is made before MPI, event
loops, CUDA and threads. Its parent is the rank; it dies with it, and its children with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Self

from hpcgpu import supervise
from hpcgpu.agent.leader_socket import LeaderSocket
from hpcgpu.errors import LaunchError
from hpcgpu.host import log, process, remover
from hpcgpu.model import Settings

if TYPE_CHECKING:
    from hpcgpu.deploy.processes.control import Child
    from hpcgpu.host.scratch import Scratch


# SOCK_SEQPACKET keeps messages whole but bounds them (about 200 KiB): the payload travels in a memfd.
_MESSAGE_BYTES = 1 << 16
# It answers in milliseconds, unless it was stopped (SIGSTOP).
_ANSWER_S = 10.0
# distributed reads it at import; without it the start of two workers logs 40 lines
_QUIET = ("DASK_LOGGING__DISTRIBUTED", "warning")


class ForkServer:
    """The parent's end of a fork server, which answers in milliseconds: :meth:`spawn` is a plain call."""

    def __init__(self, sock: socket.socket, pid: int, answer_s: float = _ANSWER_S) -> None:
        self.sock, self.pid = sock, pid
        self._started, self._answer_s = process.start_time(pid), answer_s
        sock.settimeout(answer_s)
        self._exits: dict[int, int] = {}  # by pid; negative for a signal, as in subprocess

    @classmethod
    def fork(cls) -> ForkServer:
        """Fork this process, single-threaded and with its imports done, into a fork server."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        with _launch_errors():
            pid = os.fork()
        if pid == 0:
            ours.close()
            _serve(theirs, parent)
        theirs.close()
        return cls(ours, pid)

    @classmethod
    def execute(cls, lock: int) -> ForkServer:
        """Start a fresh fork server, which holds ``lock``, for a process that must not fork: it has threads or MPI."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        numbers, safe = map(str, (theirs.fileno(), os.getpid(), lock)), bool(sys.flags.safe_path)
        argv = process.python_argv("hpcgpu.agent.fork_server", *numbers, safe=safe)
        with _launch_errors():
            child = subprocess.Popen(argv, pass_fds=[theirs.fileno(), lock], stdin=subprocess.DEVNULL)
        theirs.close()
        return cls(ours, child.pid)

    def spawn(self, entry: str, spec: object, fds: tuple[int, int, int]) -> int:
        """Fork a child that calls ``entry`` ("module:function") with ``(spec, control socket)``; return its pid.

        ``spec`` is pickled. ``fds`` are the child's control socket, stdout and stderr; the caller closes its own
        copies. :meth:`exits` reports the child's end. Raises LaunchError if the server cannot fork, or does not answer
        and is killed with all its children; EOFError if it is dead.
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
                with _launch_errors():
                    raise OSError(message[1], os.strerror(message[1]))

    def exits(self) -> dict[int, int]:
        """Return the exit codes of children that have ended, by pid, without waiting; EOFError if the server died."""
        while select.select([self.sock], [], [], 0)[0]:
            self._receive()
        out, self._exits = self._exits, {}
        return out

    def wait_exit(self, pid: int, deadline_s: float) -> int | None:
        """Return a child's exit code; None if it is not known within ``deadline_s`` seconds."""
        end = time.monotonic() + deadline_s
        with contextlib.suppress(EOFError, ConnectionError):
            while pid not in self._exits:
                if not select.select([self.sock], [], [], max(0.0, end - time.monotonic()))[0]:
                    return None
                self._receive()
            return self._exits[pid]
        return None

    def close(self) -> None:
        """End the fork server and its children; return when they are gone, since they write to the run's folder."""
        self.sock.close()
        if self._started is not None:
            process.wait_for_end(self.pid, self._started, self._answer_s)
            self.kill()

    def kill(self) -> None:
        """Kill the fork server, stopped or not; its pid may be another process's once it has ended."""
        if self._started is not None and process.start_time(self.pid) == self._started:
            os.kill(self.pid, signal.SIGKILL)

    def _receive(self) -> tuple[str, int, int]:
        """Return the server's next message; keep the exit code if it has one."""
        try:
            data = self.sock.recv(_MESSAGE_BYTES)
        except TimeoutError:
            self.kill()
            raise LaunchError(
                f"the fork server, process {self.pid}, did not answer within {self._answer_s:g} s, and was killed"
            ) from None
        if not data:
            raise EOFError("the fork server died")
        message: tuple[str, int, int] = pickle.loads(data)
        if message[0] == "exit":
            self._exits[message[1]] = message[2]
        return message


@contextlib.contextmanager
def _launch_errors() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise LaunchError(process.refused(e) or f"the processes of this node could not be forked: {e}") from e


def _serve(sock: socket.socket, parent: int) -> None:
    """Fork on request until the parent closes its end. Never returns."""
    process.die_with_parent(parent, signal.SIGKILL)
    process.set_title("hpcgpu-fork")
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
                for pid in children:
                    os.kill(pid, signal.SIGKILL)
                for pid in children:
                    os.waitpid(pid, 0)
                os._exit(0)
            try:
                answer = ("pid", _fork_child(fds, (sock.fileno(), woken, wake)), 0)
                children.add(answer[1])
            except OSError as e:
                answer = ("refused", e.errno or 0, 0)
            sock.send(pickle.dumps(answer))


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


def _fork_child(fds: list[int], inherited: tuple[int, ...]) -> int:
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
        for fd in inherited:
            os.close(fd)
        memfd, control, stdout, stderr = fds
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        os.close(stdout)
        os.close(stderr)
        os.lseek(memfd, 0, os.SEEK_SET)
        with os.fdopen(memfd, "rb") as f:
            entry, spec = pickle.load(f)
        # NumPy's global generator is not seeded at a fork, as the standard library's is: all workers of a node would
        # draw the same numbers.
        if numpy_random := sys.modules.get("numpy.random"):
            numpy_random.seed()
        code = int(pkgutil.resolve_name(entry)(spec, socket.socket(fileno=control)) or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        log.flush()
        os._exit(code)


class ForkServerSpawner:
    """Forks processes; ``on_death`` is called when the fork server, and with it every one of them, is gone."""

    def __init__(self, fork_server: ForkServer, on_death: Callable[[], None]) -> None:
        self.fork_server, self._on_death = fork_server, on_death
        self._children: dict[int, asyncio.Future[int]] = {}
        self._loop = asyncio.get_running_loop()
        self._read_exits = supervise.log_errors(
            self._look, "reading the fork server's reports", lambda _: self._give_up()
        )
        self._loop.add_reader(fork_server.sock, self._read_exits)

    def spawn(self, entry: str, spec: object) -> Child:
        """Fork a child that calls ``entry`` with ``(spec, control socket)``, on the output of this process."""
        ours, theirs = socket.socketpair()
        with theirs:
            pid = self.fork_server.spawn(entry, spec, (theirs.fileno(), 1, 2))
        return self.adopt(pid, ours)

    def adopt(self, pid: int, control: socket.socket) -> Child:
        """Report the end of a child that was forked before this spawner was made."""
        from hpcgpu.deploy.processes.control import Child

        exited: asyncio.Future[int] = self._loop.create_future()
        self._children[pid] = exited
        self._loop.call_soon(self._read_exits)  # it may have ended while the pid was on its way
        return Child(pid, control, exited)

    def _look(self) -> None:
        try:
            for pid, code in self.fork_server.exits().items():
                if (exited := self._children.pop(pid, None)) and not exited.done():
                    exited.set_result(code)
        except (EOFError, ConnectionError):
            self._give_up()

    def _give_up(self) -> None:
        """Treat the fork server as dead, also if its reports cannot be read: no child's end would be noticed."""
        self._loop.remove_reader(self.fork_server.sock)
        for exited in self._children.values():
            if not exited.done():
                exited.set_result(-9)
        self._children.clear()
        self._on_death()


def prepare_forks(*, simulated: bool) -> None:
    """Prepare a process for its forks, scheduler, workers and nannies; raise ConfigError for Dask's memory limits."""
    with process.importing():
        from distributed.versions import get_versions

        import hpcgpu.deploy.processes.nanny
        import hpcgpu.deploy.processes.scheduler
        from hpcgpu.deploy.dask_config import check_dask_memory
        from hpcgpu.deploy.processes.handshakes import limit_handshakes

        if simulated:
            import hpcgpu.sim  # noqa: F401
        # Else each worker takes 30 CPU ms more at its start (distributed 2026.8.0): it reads the versions of nine
        # packages, and runs uname -p.
        get_versions()
        limit_handshakes()
        check_dask_memory()


class LeaderResources(NamedTuple):
    """A leader's fork server, folder and socket; the end of the context ends all children and removes the folder."""

    fork_server: ForkServer
    scratch: Scratch
    leader_socket: LeaderSocket

    @classmethod
    @contextlib.contextmanager
    def make(cls, settings: Settings, *, after_mpi: bool = False) -> Iterator[Self]:
        """Import the modules of the node's processes and fork the fork server, or execute it if MPI has run already.

        Raises ConfigError for a folder that cannot be used, before the imports (1 s), and for a memory limit of Dask's.
        """
        from hpcgpu.host.scratch import Scratch

        if not os.environ.get("HPCGPU_DEBUG"):
            os.environ.setdefault(*_QUIET)
        with contextlib.ExitStack() as undo:
            scratch = Scratch.make(settings.local_directory, "run", trusted=settings.trust_local_directory)
            undo.callback(scratch.remove)
            remover.start(str(scratch.lock_path))
            prepare_forks(simulated=settings.gpus is not None)
            # forked processes hold the lock, too: the folder stays as long as one process writes to it
            fork_server = ForkServer.execute(scratch.lock) if after_mpi else ForkServer.fork()
            undo.callback(fork_server.close)
            leader_socket = LeaderSocket(str(scratch.path / "leader"))
            undo.callback(leader_socket.close)
            yield cls(fork_server, scratch, leader_socket)


if __name__ == "__main__":
    prepare_forks(simulated=False)
    os.set_inheritable(int(sys.argv[3]), False)  # forks inherit it, programs that they start do not
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))

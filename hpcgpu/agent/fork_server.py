"""The fork server: a process that has imported distributed and only forks on request.

A fork of it costs 5 ms where an import costs 0.4 CPU s. It must stay single-threaded: it is made before MPI, event
loops, CUDA and threads. Its parent is the rank; it dies with it, and its children with it.

``python -m hpcgpu.worker SCHEDULER`` runs this node's workers by one, for a scheduler that others started: no MPI, no
rendezvous. It stands where ``dask worker`` stands in the jobs of dask-jobqueue.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from hpcgpu import supervise
from hpcgpu.agent.node import LeaderSocket
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import log, process, remover
from hpcgpu.model import Settings, WorkerSpec

if TYPE_CHECKING:
    from distributed import Nanny
    from distributed.security import Security

    from hpcgpu.deploy.processes import Child
    from hpcgpu.spill.storage import Scratch


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
        argv = process.python_argv(
            "hpcgpu.agent.fork_server", *map(str, (theirs.fileno(), os.getpid(), lock)), users=True
        )
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
            self._exits[message[1]] = message[2]

    def exits(self) -> dict[int, int]:
        """Return the exit codes of children that have ended, by pid, without waiting; EOFError if the server died."""
        while select.select([self.sock], [], [], 0)[0]:
            _, pid, code = self._receive()
            self._exits[pid] = code
        out, self._exits = self._exits, {}
        return out

    def wait_exit(self, pid: int, deadline_s: float) -> int | None:
        """Return a child's exit code; None if it is not known within ``deadline_s`` seconds."""
        end = time.monotonic() + deadline_s
        with contextlib.suppress(EOFError, ConnectionError):
            while pid not in self._exits:
                if not select.select([self.sock], [], [], max(0.0, end - time.monotonic()))[0]:
                    return None
                _, ended, code = self._receive()
                self._exits[ended] = code
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
        process.reseed()
        code = process.call(entry, spec, socket.socket(fileno=control))
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

    def kill(self) -> None:
        """Kill a fork server that does not answer; its end is noticed as any other."""
        self.fork_server.kill()

    def adopt(self, pid: int, control: socket.socket) -> Child:
        """Report the end of a child that was forked before this spawner was made."""
        from hpcgpu.deploy.processes import Child

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


class LeaderResources:
    """A leader's fork server, folder and socket; the end of the context ends all children and removes the folder."""

    def __init__(self, fork_server: ForkServer, scratch: Scratch, leader_socket: LeaderSocket) -> None:
        self.fork_server, self.scratch, self.leader_socket = fork_server, scratch, leader_socket

    @classmethod
    def make(cls, settings: Settings, *, after_mpi: bool = False) -> Self:
        """Import the modules of the node's processes and fork the fork server, or execute it if MPI has run already.

        Raises ConfigError if the folder cannot be used, which is checked before the imports (1 s), or if Dask's
        configuration has an invalid memory limit.
        """
        from hpcgpu.spill.storage import Scratch

        if not os.environ.get("HPCGPU_DEBUG"):
            os.environ.setdefault(*_QUIET)
        with contextlib.ExitStack() as undo:
            scratch = Scratch.make(settings.local_directory, "run", trusted=settings.trust_local_directory)
            undo.callback(scratch.remove)
            remover.start(str(scratch.lock_path))
            with process.importing():
                from hpcgpu.deploy.processes.scheduler import prepare_forks

                prepare_forks(simulated=settings.gpus is not None)
            # forked processes hold the lock, too: the folder stays as long as one process writes to it
            fork_server = ForkServer.execute(scratch.lock) if after_mpi else ForkServer.fork()
            undo.callback(fork_server.close)
            resources = cls(fork_server, scratch, LeaderSocket(str(scratch.path / "leader")))
            undo.pop_all()
        return resources

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.leader_socket.close()
        self.fork_server.close()
        self.scratch.remove()


if __name__ == "__main__":
    with process.importing():
        from hpcgpu.deploy.processes.scheduler import prepare_forks

        prepare_forks(simulated=False)

    os.set_inheritable(int(sys.argv[3]), False)  # forks inherit it, programs that they start do not
    _serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))


_CLOSE_S = 10.0  # as in dask worker
# After SIGTERM: KillWait of Slurm is 30 s, and as little as 5 at some sites. distributed 2026.8 checks each 2 s.
_HAND_OVER_S = 4.0
# The part of the job's memory for this process and the fork server: twice the 62 MiB of both for 2 workers (Pss,
# distributed 2026.8).
_OWN_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneOptions:
    """Options of ``dask worker`` beside those of a worker."""

    scheduler: str
    name: str = ""  # several workers are name-0, name-1 ..., by which dask-jobqueue counts
    workers: int | None = None  # None: one for each GPU
    # files: tls_ca_file, tls_worker_cert, tls_worker_key
    tls: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    # further arguments of distributed's Nanny: lifetime, preload ...
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def run(typed: Mapping[str, object], typed_from: str, options: StandaloneOptions) -> int:
    """Start the workers and stay while one lives; return the exit code, or raise ConfigError or LaunchError."""
    from hpcgpu.deploy import settings as read_settings
    from hpcgpu.deploy.start import ld_preload

    settings = read_settings.read(typed, typed_from).settings
    if process.rank_env(os.environ):  # parts of it are read before main only: execute this program again
        added = process.rank_env(os.environ, ld_preload(settings))
        process.execute((sys.executable, *sys.orig_argv[1:]), {**os.environ, **added})
    with LeaderResources.make(settings) as resources:
        specs = plan(settings, options, str(resources.scratch.path))
        process.hide_gpus(_protocol(options.scheduler))
        return asyncio.run(_StandaloneNode(settings, options, specs, resources).run())


def plan(settings: Settings, options: StandaloneOptions, scratch: str) -> tuple[WorkerSpec, ...]:
    """Return the workers, with the names by which the caller counts them."""
    from hpcgpu.deploy import network
    from hpcgpu.deploy.processes import node

    machine = node.Machine.read(settings, os.environ)
    most = len(machine.gpus) * settings.workers_per_gpu
    count = options.workers or most
    if count > most or count % settings.workers_per_gpu:
        raise LaunchError(
            f"--nworkers {count}: {machine.name} has {len(machine.gpus)} GPUs for this job, and each has "
            f"{settings.workers_per_gpu} of the workers; leave --nworkers out, or request more GPUs"
        )
    specs = node.plan_here(settings, machine, count, scratch=scratch, environ=dict(os.environ), kept_bytes=_OWN_BYTES)
    notes = (
        *process.replaced(os.environ, settings.env),
        *node.lowered(settings, specs),
        *node.folder_notes(settings, count),
    )
    log.say_of(machine.name, (*notes, network.exposed(_protocol(options.scheduler))))
    return tuple(replace(spec, name=name) for spec, name in zip(specs, names(options.name, specs), strict=True))


def _protocol(address: str) -> str:
    return address.partition("://")[0] if "://" in address else "tcp"


def names(name: str, specs: tuple[WorkerSpec, ...]) -> tuple[str, ...]:
    """Return the workers' names as ``dask worker`` makes them; raise ConfigError for a name that cannot be a file's."""
    if "/" in name or "\0" in name:
        raise ConfigError(f"--name {name!r} has a slash; allowed: the name of a file")
    if not name:
        return tuple(spec.name for spec in specs)
    return (name,) if len(specs) == 1 else tuple(f"{name}-{i}" for i in range(len(specs)))


class _StandaloneNode:
    """The nannies, from start to end."""

    def __init__(
        self, settings: Settings, options: StandaloneOptions, specs: tuple[WorkerSpec, ...], resources: LeaderResources
    ) -> None:
        from distributed.security import Security

        self._settings, self._options, self._specs, self._resources = settings, options, specs, resources
        self._security: Security = Security(**options.tls)
        self._nannies: list[Nanny] = []
        self._signal = 0

    async def run(self) -> int:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me

        def stop(number: int) -> None:
            if not self._signal:
                self._signal = number
                me.cancel()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        self._spawner = ForkServerSpawner(self._resources.fork_server, lambda: stop(0))
        try:
            await self._start()
            await asyncio.gather(*(nanny.finished() for nanny in self._nannies))
        except asyncio.CancelledError:
            if not self._signal:
                raise LaunchError("the fork server process died, and with it all workers of this node") from None
            if self._signal == signal.SIGTERM:
                await self._hand_over()
            return 128 + self._signal
        finally:
            why = f"it got {signal.Signals(self._signal).name}" if self._signal else "the workers are to end"
            await asyncio.gather(*(n.close(timeout=_CLOSE_S, reason=why) for n in self._nannies))
        return 0

    async def _start(self) -> None:
        from hpcgpu.deploy.network.scheduler_file import connect_first
        from hpcgpu.deploy.processes.nanny import make_nanny

        reached = await connect_first([self._options.scheduler], self._security, self._settings.death_timeout_s)
        common: dict[str, Any] = {"spawner": self._spawner, "security": self._security, **self._options.options}
        self._nannies = [make_nanny(reached, self._settings, spec, **common) for spec in self._specs]
        done = await asyncio.gather(*(n.start() for n in self._nannies), return_exceptions=True)
        if failed := [e for e in done if isinstance(e, BaseException)]:
            raise LaunchError(f"{len(failed)} of {len(done)} workers could not be started: {failed[0]}")
        text = ", ".join(f"{s.name} on PUs {s.binding.cpuset} beside GPU {s.binding.gpus[0].pci}" for s in self._specs)
        log.say(f"{len(done)} workers at {self._options.scheduler}: {text}")

    async def _hand_over(self) -> None:
        """Have the scheduler move the data that no other worker has. Where all workers end, none can take it."""
        from hpcgpu.deploy.processes.nanny import hand_over

        stay = {"close_workers": False, "remove": False}
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                left, count = await hand_over(
                    self._nannies, self._options.scheduler, self._security, "retire_workers", **stay
                )
            log.say(f"handed over the data of {left} of {count} workers")
        except (OSError, TimeoutError) as error:
            log.say(f"data could not be handed over: {error or 'out of time'}")

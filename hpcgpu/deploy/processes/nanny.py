"""distributed's Nanny, whose worker a fork server forks: one that died is back in 60 ms, not in 600."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import Any

import dask
from distributed import Nanny, Security, Status, rpc

from hpcgpu import supervise
from hpcgpu.deploy import compat
from hpcgpu.deploy.network.scheduler_file import Route
from hpcgpu.deploy.processes import worker
from hpcgpu.deploy.processes.control import Child, Control
from hpcgpu.deploy.processes.worker import WorkerStart
from hpcgpu.errors import LaunchError
from hpcgpu.host import host_memory, process
from hpcgpu.model import Settings, WorkerSpec

logger = logging.getLogger("distributed.nanny")
# Attributes of a Nanny that its worker is started with.
_HANDED_ON = (
    *("nthreads", "services", "name", "resources", "validate", "silence_logs", "death_timeout"),
    *("preload", "preload_argv", "security", "contact_address"),
)


class ForkNanny(Nanny):
    """A Nanny whose worker is forked by agent's ``ForkServerSpawner``; ``options`` win over spec and settings.

    ``stream_heartbeats``: the scheduler is one of hpcgpu, and takes them by workers' streams.
    """

    def __init__(
        self,
        route: Route,
        settings: Settings,
        spec: WorkerSpec,
        *,
        spawner: Any,
        stream_heartbeats: bool = False,
        **options: Any,
    ) -> None:
        compat.spare_nvml()
        self.spawner, self.spec, self.stream_heartbeats = spawner, spec, stream_heartbeats
        # Why the worker leaves for good, and why the nanny ended without that; empty: neither happened.
        self.farewell = self.ended = ""
        # A worker listens on its interface, else at this host's address on the way to the scheduler. A planned one is
        # not used where that address is loopback: the worker must not be reachable from outside.
        interface, host = spec.binding.interface, route.own_host
        is_local = host.startswith("127.") or host == "[::1]"
        on_interface = interface and (settings.interface is not None or not is_local)
        planned = {
            "name": spec.name,
            "nthreads": spec.nthreads,
            "memory_limit": spec.memory_limit_bytes or 0,
            "resources": dict(spec.resources),
            "local_directory": spec.local_directory,
            "protocol": settings.protocol,
            "death_timeout": settings.death_timeout_s,
            **({"interface": interface} if on_interface else {"host": host}),
        }
        super().__init__(route.address, **{**planned, **options})
        self.periodic_callbacks.pop("memory_monitor", None)
        self.memory_manager = compat.MemoryManager(
            self, memory_limit=spec.memory_limit_bytes or 0, simulated_bytes=worker.usage_reader(spec)
        )

    async def instantiate(self) -> Status:
        """Start a worker process; called by distributed at start and after each exit."""
        if getattr(self, "process", None) is None:
            self.process = ForkedWorker(self)
        return await super().instantiate()

    def close_gracefully(self, reason: str = "nanny-close-gracefully") -> None:
        """Let the worker leave, and start no other; called by distributed at retirement or without scheduler."""
        self.farewell = self.farewell or reason
        super().close_gracefully(reason=reason)

    async def close(self, timeout: float = 5, reason: str = "nanny-close") -> str:
        """End the worker and this nanny."""
        self.ended = self.ended or ("" if self.farewell else reason)
        return str(await super().close(timeout=timeout, reason=reason))


async def hand_over(
    nannies: Sequence[ForkNanny], scheduler: str, security: Security, retire: str = "hpcgpu_retire", **options: float
) -> tuple[int, int]:
    """Have a scheduler's handler move the data that only these workers have; return for how many of how many.

    Raises OSError if the scheduler is gone.
    """
    here = [nanny.worker_address for nanny in nannies if nanny.worker_address]
    if not here:
        return 0, 0
    async with rpc(scheduler, connection_args=security.get_connection_args("worker")) as to:
        left = await getattr(to, retire)(workers=here, **options)
    return len(set(here) & set(left)), len(here)


class ForkedWorker:
    """A forked child with the interface of distributed's WorkerProcess, which Nanny expects."""

    def __init__(self, nanny: ForkNanny) -> None:
        self.nanny = nanny
        self.status = Status.init
        self.worker_address: str | None = None
        self.worker_dir: str | None = None
        self.process: ProcessHandle | None = None
        self._running = asyncio.Event()
        self._stopped = asyncio.Event()
        self._control: Control | None = None

    async def start(self) -> Status:
        """Fork, and wait until the worker has registered or failed."""
        if self.status in (Status.starting, Status.running):
            await self._running.wait()
            return self.status
        self._running, self._stopped = asyncio.Event(), asyncio.Event()
        self._oom_kills = host_memory.oom_kills()
        child = self._fork()
        self.status = Status.starting
        self.process = ProcessHandle(child.pid)
        text = f"the nanny's look at the end of worker {self.nanny.name}"
        child.exited.add_done_callback(
            supervise.log_errors(lambda done: self._on_exit(child, done.result()), text, self._give_up)
        )
        self._control = await Control.open(child.control)
        try:
            async for message in self._control.messages():
                self._take_report(message)
                break
            else:
                await self._stopped.wait()  # the worker died before its first report
        except BaseException:
            if self.status == Status.starting:
                self.status = Status.failed
            raise
        finally:
            self._running.set()
        return self.status

    def _fork(self) -> Child:
        nanny = self.nanny
        kwargs = {
            "scheduler_ip": nanny.scheduler_addr,
            "local_directory": compat.original_local_directory(nanny),
            "nanny": nanny.address,
            "memory_limit": nanny.memory_manager.memory_limit,
            **{name: getattr(nanny, name) for name in _HANDED_ON},
            **nanny.worker_kwargs,
        }
        place = dict(nanny.env), dask.config.config, tuple(sys.path), os.getpid()
        start = WorkerStart(nanny.spec, kwargs, *place, nanny.stream_heartbeats)
        try:
            return nanny.spawner.spawn("hpcgpu.deploy.processes.worker:main", start)
        except Exception as e:  # no descriptor, no memory
            if nanny.status == Status.running:  # distributed's Nanny would stay forever, without a worker
                self._give_up(e)
            raise

    def _give_up(self, error: BaseException) -> None:
        """End the nanny, as its worker cannot be started again."""
        reason = f"worker {self.nanny.name} cannot be started again: {error!r}"
        logger.error(reason)
        close = functools.partial(self.nanny.close, reason=reason)
        self._closing = supervise.start(close, f"the end of the nanny of {self.nanny.name}", supervise.only_log)

    def _take_report(self, message: dict[str, Any]) -> None:
        if message["op"] == "error":
            # the reason comes last, where readers of a log look first; the other process's traceback stands above it
            text, reason = message["text"], message["reason"]
            raise LaunchError(f"the worker {self.nanny.name} did not start: {reason}", evidence=text)
        self.worker_address, self.worker_dir = message["address"], message["dir"]
        if self.status == Status.starting:
            self.status = Status.running

    async def kill(self, timeout: float = 5, executor_wait: bool = True, reason: str = "kill") -> None:
        """Ask the worker to stop, kill it after 0.8 of ``timeout`` seconds; return when it is reaped."""
        if self.status == Status.starting:
            await self._running.wait()
        if self.status == Status.stopped or self.process is None:
            return
        child, stopped = self.process, self._stopped  # the nanny restarts the worker at once, and they are replaced
        if self.status != Status.stopping:
            self.status = Status.stopping
            grace_s = timeout * 0.8
            if self._control:
                self._control.send("stop", timeout=grace_s, executor_wait=executor_wait, reason=reason)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), grace_s)
            if not stopped.is_set():  # it may have ended when the time was over
                logger.warning("Worker process still alive after %.1f seconds, killing", grace_s)
                child.kill()
                await self._reaped(child.pid, stopped, timeout)
        await stopped.wait()

    async def _reaped(self, pid: int, stopped: asyncio.Event, look_s: float) -> None:
        """Wait until the fork server has reported a worker's end; kill a fork server that does not: it was stopped."""
        dead = 0  # seen twice: when a whole job was stopped, the fork server goes on a moment later
        while dead < 2:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), look_s)
                return
            dead += process.start_time(pid) is None
        logger.error("The fork server does not report the end of worker process %d; it is killed", pid)
        self.nanny.spawner.fork_server.kill()

    def is_alive(self) -> bool:
        """Return True until the process is reaped."""
        return self.process is not None

    @property
    def pid(self) -> int | None:
        """Pid of the running process."""
        return self.process.pid if self.process else None

    def _on_exit(self, child: Child, code: int) -> None:
        if self.process is None or self.process.pid != child.pid:
            return
        if code:
            text = f"worker {self.nanny.name} (process {child.pid}) {host_memory.format_exit(code, self._oom_kills)}"
            logger.log(logging.WARNING if self.status == Status.running else logging.INFO, text)
            if self.status == Status.running and host_memory.oom_kills() > self._oom_kills:
                self.nanny.log_event("warn", text)  # a warning in each client: distributed's KilledWorker has no reason
        self.status = Status.stopped
        self.process = None
        self._running.set()
        self._stopped.set()
        if self._control:
            self._control.close()
        if self.worker_dir:
            remove = functools.partial(shutil.rmtree, self.worker_dir, ignore_errors=True)
            text = f"the removal of {self.worker_dir}"
            self._removing = supervise.start(functools.partial(supervise.to_thread, remove), text, supervise.only_log)
        self.worker_dir = None
        compat.on_worker_exit(self.nanny, code)


class ProcessHandle:
    """The members of a process that distributed's NannyMemoryManager uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        """Send SIGKILL."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended, which the fork server reports
            os.kill(self.pid, signal.SIGKILL)

    terminate = kill  # a worker outlasts a SIGTERM, which a batch system sends to all processes of a job

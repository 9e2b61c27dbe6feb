"""Lead a node: start its workers, watch them, and end them.

This imports distributed: after the leader's resources are made, whose fork server has imported it in its way.

Together: a forced end is what a leader falls back on, and its limits are sums of each other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from distributed import Nanny, Security, connect, rpc

from hpcgpu import supervise
from hpcgpu.agent.fork_server import ForkServer, ForkServerSpawner
from hpcgpu.deploy.dask_config import read_variables
from hpcgpu.deploy.network.scheduler_file import Certificate, Route, connect_first, security
from hpcgpu.deploy.processes.nanny import ForkNanny
from hpcgpu.deploy.processes.registration import Registration
from hpcgpu.errors import LaunchError, cause_of, message_of
from hpcgpu.host import log
from hpcgpu.launch.environment import read_allocation, read_end_s, read_rank
from hpcgpu.model import RunDocument, WorkerSpec
from hpcgpu.plan.jobs.job_text import OUTLIVES

logger = logging.getLogger("distributed.hpcgpu")
_REPORT_S = 10.0
# KillWait of Slurm is 30 s, and as little as 5 at some sites; PBS gives 10.
CANCELLED_S = 4.0
_ANSWER_S = 2.0
_SENDERS = {signal.SIGTERM: "(cancelled, preempted, or at its time limit)"}
# Its script has 2 s, its workers 2, the other nodes 4, the scheduler 5 (agent.rank0 and .leader, deploy's scheduler).
# Saving leaves them theirs, where the batch system grants more than CANCELLED_S; it is asked if that does not do.
_REST_S, _ASKS_S = 11.0, 1.0
# Much more on a node that is overloaded; and an end that is forced there for nothing would lose the script's exit code.
LIMIT_S = 60.0


@dataclass(slots=True, kw_only=True)
class LeaderContext:
    """A leader's inputs once the ranks have met."""

    run: RunDocument
    environ: Mapping[str, str]  # of this rank at its start
    fork_server: ForkServer
    scheduler: Mapping[str, Any]  # addresses, cert and key of rank 0's record
    workers: Sequence[WorkerSpec] = ()
    node: str = ""  # the host's name
    in_job: bool = False  # in a batch job, which has a time limit
    notes: Sequence[str] = ()  # messages about the node, for people


class Leader:
    """The workers of one node, from start to end. Rank 0's is a :class:`hpcgpu.agent.rank0.Rank0Leader`."""

    close_s = 2.0  # for a worker in the middle of a task to end by itself before it is killed

    def __init__(self, context: LeaderContext) -> None:
        self.context = context
        self.security = security_of(context.scheduler)
        self.nannies: list[Nanny] = []
        self.watch: Any = None  # a comm of distributed
        self._outliving: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None  # hands over the workers' data
        self._extending: asyncio.Task[None] | None = None  # asks for more time
        self.ended = asyncio.Event()
        self.on_end: Callable[[float], object] = lambda more_s: None
        self.exit_code = 0
        self.why = ""
        self._warned = self._saved = False
        self.signalled = 0  # the number of the signal by which the run ends
        self._saves_until_s = -math.inf  # if the batch system grants it; on the loop's clock
        self._ends_s: float | None = None  # when the job's time ends, on the loop's clock
        self.drains_s = -math.inf  # when this leader warns itself

    def end(self, exit_code: int, why: str = "") -> None:
        """Let the run end; the first reason counts."""
        if not self.ended.is_set():
            self.exit_code, self.why = exit_code, why
            self.ended.set()
            self.on_end(0.0)

    def stop(self, sig: signal.Signals, why: str) -> None:
        """End the run because of a signal."""
        self.end(128 + sig, why)

    def _warn(self) -> None:
        now_s = asyncio.get_running_loop().time()
        is_early = self._outliving is None and now_s < self.drains_s  # Slurm's may come before there are workers
        if not self._warned and not is_early:
            self._warned = True
            self.drain(self._ends_s and max(0.0, self._ends_s - now_s))

    def drain(self, left_s: float | None) -> None:
        """Prepare for the job's time limit, ``left_s`` seconds away; None: soon."""

    async def run(self) -> int:
        """Start the workers, stay until the run ends, end the workers; return the exit code."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(sig, self._answer(sig))
        warn = supervise.log_errors(self._warn, "the answer to the end of the job's time", supervise.only_log)
        # MPICH's mpiexec sends SIGUSR1 to the other ranks of a node when one ends (5.0.2, -disable-auto-cleanup).
        if read_rank(self.context.environ).launcher != "MPICH mpiexec":  # Slurm's --signal, through the batch script
            # Not by the loop: at its end it sets the default, and a late signal would kill this process.
            late = loop.is_closed
            signal.signal(signal.SIGUSR1, lambda *_: None if late() else loop.call_soon_threadsafe(warn) and None)
        end_s = read_end_s(self.context.environ)  # by the batch system, else the request
        left_s = max(1.0, end_s - time.time()) if end_s else self.context.run.settings.walltime_s
        if self.context.in_job and left_s:
            self._ends_s = loop.time() + left_s
            self.drains_s = self._ends_s - min(self.context.run.settings.drain_s, left_s / 4)
            loop.call_at(self.drains_s, warn)
        self.spawner = ForkServerSpawner(
            self.context.fork_server, lambda: self.end(os.EX_SOFTWARE, "the fork server process died")
        )
        duty = asyncio.create_task(self.serve())
        ended = asyncio.create_task(self.ended.wait())
        await asyncio.wait((duty, ended), return_when=asyncio.FIRST_COMPLETED)
        try:
            if duty.done() and not self.ended.is_set():
                self.end(await duty)
        finally:
            duty.cancel()
            await asyncio.wait([duty])
            if not duty.cancelled() and (error := duty.exception()) and self.why:
                logger.debug("while the run ended: %s", error)  # the end broke it
            await self.close()
        if self.why and self.exit_code:
            log.say(f"the run ends: {self.why}")
        return self.exit_code

    def _answer(self, sig: signal.Signals) -> Callable[[], None]:
        """Return the handler of a signal. The run ends even if the handler fails."""

        def why() -> str:
            if sig != signal.SIGTERM or not self._ends_s or asyncio.get_running_loop().time() < self._ends_s:
                return f"it got {sig.name} {_SENDERS.get(sig, '')}".rstrip()
            elastic = self.context.run.shape == "gang" and self.context.run.settings.shape == "elastic"
            return f"it got {sig.name}: its walltime is over{f'; {OUTLIVES}' if elastic else ''}"

        def answer() -> None:
            self.signalled = sig
            self.stop(sig, why())

        name = f"the answer to {sig.name}"
        return supervise.log_errors(answer, name, lambda _: self.end(128 + sig, why()))

    async def serve(self) -> int:
        """Start the workers and stay as long as the scheduler lives; return the exit code."""
        await self.start_workers()
        await self.hear_goodbye()
        return 0

    async def start_workers(self, reach_s: float = math.inf) -> None:
        """Start this node's workers; hold a connection to the scheduler (tried for ``reach_s``) that ends with it."""
        deadline_s = min(self.context.run.settings.death_timeout_s, reach_s)
        reached = await connect_first(self.context.scheduler["addresses"], self.security, deadline_s)
        self.watch = await connect(reached.address, timeout=deadline_s, **self.security.get_connection_args("worker"))
        context = self.context
        about = {"node": context.node, "workers": len(context.workers), "notes": list(context.notes)}
        await self.watch.write({"op": "hpcgpu_watch", "reply": False, **about})
        await self.watch.read()
        self._goodbye = asyncio.create_task(self._read_goodbye())
        if failed := await self.start_nannies(reached, stream_heartbeats=True):
            log.say_of(context.node, failed)
            await self.watch.write({"absent": failed})
            if len(failed) == len(context.workers):
                raise LaunchError(f"no worker of this node could be started: {failed[0]}")
        if self.nannies:
            self._outliving = supervise.start(
                self._report_end, "the wait for the end of all workers", supervise.only_log
            )

    async def start_nannies(self, reached: Route, **options: Any) -> list[str]:
        """Start the workers, with ``options`` for their nannies; return why some did not start, each with its name.

        As many start at once as this process has cores, and each has ``death_timeout`` from its own turn on. One that
        does not start is tried a second time.
        """
        options |= {"spawner": self.spawner, "security": self.security}
        read_variables(self.context.run.settings.env)  # for nannies, and for the workers that they fork
        settings, turns = self.context.run.settings, asyncio.Semaphore(len(os.sched_getaffinity(0)))
        late = f"not registered with the scheduler within {settings.death_timeout_s:g} s (--death-timeout)"
        failed: dict[str, str] = {}

        async def start(spec: WorkerSpec) -> None:
            nanny = ForkNanny(reached, settings, spec, **options)
            registration.take(nanny)
            self.nannies.append(nanny)
            try:
                await nanny.start()
                failed.pop(spec.name, None)
            except Exception as e:
                why = late if isinstance(cause_of(e), TimeoutError) else message_of(cause_of(e))
                failed[spec.name] = why if spec.name in why else f"worker {spec.name}: {why}"

        async def start_in_turn(spec: WorkerSpec) -> None:
            async with turns:
                await start(spec)
                if spec.name in failed and not self.ended.is_set():
                    self.nannies = [nanny for nanny in self.nannies if nanny.name != spec.name]
                    await start(spec)

        async with Registration(reached.address, self.security) as registration:
            await asyncio.gather(*map(start_in_turn, self.context.workers))
        return [failed[spec.name] for spec in self.context.workers if spec.name in failed]

    async def _report_end(self) -> None:
        """Report to the scheduler when none of this leader's workers is left or will be restarted."""
        await self.workers_ended()
        ended = [f"worker {n.name}: {n.ended}" for n in self.nannies if n.ended]
        with contextlib.suppress(OSError):  # it is gone, which is seen elsewhere
            await self.watch.write({"died": "; ".join(ended)})

    async def workers_ended(self) -> None:
        """Wait until no worker is left or will be restarted."""
        await asyncio.gather(*(n.finished() for n in self.nannies))

    async def hear_goodbye(self) -> bool:
        """Wait for the scheduler's end; return True if it said goodbye."""
        return await asyncio.shield(self._goodbye)  # distributed aborts the connection of a read that is cancelled

    async def _read_goodbye(self) -> bool:
        with contextlib.suppress(OSError):
            while (message := await self.watch.read()) != "end":
                if "granted_s" in message:
                    self._saves_until_s = asyncio.get_running_loop().time() + message["granted_s"]
            return True
        return False

    async def extend_grace(self) -> None:
        """Ask the batch system how long this job lives after its SIGTERM, and take the time."""
        if self.signalled != signal.SIGTERM or not self.context.in_job:
            return
        from hpcgpu.batch import get  # 34 modules, which others need not have
        from hpcgpu.deploy.jobs.batch_client import killed_s

        job, came_s = read_allocation(self.context.environ), time.time()
        await asyncio.sleep(_ASKS_S)  # most end before
        left_s = await killed_s(get(job.batch), job.job_id, came_s) - time.time() - _REST_S
        if left_s > 0:
            self.take_grace(left_s)

    def take_grace(self, left_s: float) -> None:
        """Take so much time, from now on, for what is done before the end."""

    async def save(self, limit_s: float, workers: Sequence[str] | None = None) -> None:
        """Have workers, or all of the run, write what checkpoints lack; say what they could not write in time."""
        self._saved = True
        texts = await self._save(limit_s, workers)
        left_s = self._saves_until_s - asyncio.get_running_loop().time()
        if texts and left_s > 0:
            self.on_end(left_s)
            texts = await self._save(left_s, workers)
        log.say_of(self.context.node, texts)

    async def _save(self, limit_s: float, workers: Sequence[str] | None) -> list[str]:
        if self.watch is None or self._goodbye.done():
            return []
        scheduler = rpc(self.watch.peer_address, connection_args=self.security.get_connection_args("worker"))
        try:
            async with asyncio.timeout(limit_s + _ANSWER_S), scheduler as to:
                return list(await to.hpcgpu_save(limit_s=limit_s, workers=workers))
        except (OSError, TimeoutError) as e:
            return [f"checkpoints may lack finished chunks: {supervise.reason_of(e)}"]

    async def close(self) -> None:
        """End the workers, the busy ones by force."""
        if self.signalled == signal.SIGTERM and not (self._leaving or self._saved):
            await self.save(CANCELLED_S, [n.worker_address for n in self.nannies if n.worker_address])
            if (left_s := self._saves_until_s - asyncio.get_running_loop().time()) > 0:
                await asyncio.wait([self._goodbye], timeout=left_s)  # rank 0's, when all nodes have saved
        for task in filter(None, (self._outliving, self._leaving, self._extending)):
            task.cancel()
        await asyncio.gather(*(n.close(timeout=self.close_s, reason="the run ended") for n in self.nannies))
        if self.watch:
            if self.exit_code != os.EX_SOFTWARE:
                with contextlib.suppress(OSError):
                    await self.watch.write("bye")  # else rank 0 would say that this leader is lost
            self._goodbye.cancel()
            await self.watch.close()


class ForcedEnd:
    """Kills the fork server with its children, and this process, ``limit_s`` after :meth:`begin` unless left before."""

    def __init__(self, fork_server: ForkServer, limit_s: float = LIMIT_S) -> None:
        self._fork_server, self._limit_s, self._end_s = fork_server, limit_s, 0.0
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self, more_s: float = 0.0) -> None:
        """Start the countdown, as the run ends; or start it again, with more time."""
        self._end_s = time.monotonic() + more_s + self._limit_s
        self._begun.set()

    def __enter__(self) -> Self:
        self._thread.start()  # now: at the end there may be no room for another one
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._begun.set()

    def _watch(self) -> None:
        text = f"process {os.getpid()} has not ended within {self._limit_s:g} s; it is killed, and its workers"
        self._begun.wait()
        while not self._over.wait(max(0.0, self._end_s - time.monotonic())):
            if time.monotonic() < self._end_s:  # there is more time now
                continue
            try:
                log.say(text)
                self._fork_server.kill()
            finally:
                os._exit(os.EX_SOFTWARE)


def security_of(scheduler: Mapping[str, Any]) -> Security:
    """Return the Security for connections to the scheduler in a rank's record."""
    return security(Certificate(scheduler["cert"], scheduler["key"]) if scheduler.get("cert") else None)


async def report_failure(scheduler: Mapping[str, Any], text: str) -> None:
    """Report to rank 0 why this node has no workers: it would wait for them."""
    trust = security_of(scheduler)
    reached = await connect_first(scheduler["addresses"], trust, _REPORT_S)
    async with rpc(reached.address, connection_args=trust.get_connection_args("worker")) as to:
        await to.hpcgpu_failed(text=text)

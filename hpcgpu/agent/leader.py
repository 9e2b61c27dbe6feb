"""Lead a node: start its workers, watch them, and end them.

Over 300 lines: the watch over followers, the successor, and the forced end are parts of the same life.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from hpcgpu.agent.follower import FailoverState, FollowerConnection, dismiss
from hpcgpu.agent.fork_server import ForkServer, ForkServerSpawner
from hpcgpu.errors import HpcGpuError, LaunchError, cause_of
from hpcgpu.host import log
from hpcgpu.model import RunDocument, WorkerSpec
from hpcgpu.supervise import tasks
from hpcgpu.supervise.failure_log import reason_of

if TYPE_CHECKING:
    from distributed import Nanny
    from distributed.security import Security

logger = logging.getLogger("distributed.hpcgpu")

# A worker in the middle of a task gets this long to end by itself before it is killed.
_CLOSE_S = 2.0
_REPORT_S = 10.0
_SENDERS = {signal.SIGTERM: "(cancelled, preempted, or at its time limit)"}
# A signal to a whole job reaches the followers, which die at once, and their leader, which ends the run.
_TOGETHER_S = 0.5
# Its script has 2 s, its workers 2, the other nodes 4, the scheduler 5 (agent.rank0 and .leader, deploy's scheduler).
# Much more on a node that is overloaded; and an end that is forced there for nothing would lose the script's exit code.
LIMIT_S = 60.0
_ASK_S = 0.05


@dataclass(slots=True, kw_only=True)
class LeaderContext:
    """A leader's inputs once the ranks have met."""

    run: RunDocument
    environ: Mapping[str, str]  # of this rank at its start
    fork_server: ForkServer
    scheduler: Mapping[str, Any]  # addresses, cert and key of rank 0's record
    workers: Sequence[tuple[int, WorkerSpec]]  # with the rank of each
    followers: Sequence[FollowerConnection] = ()  # with their stdout and stderr
    node: str = ""  # the host's name
    succession: str = ""  # identifies this leader and its successors on one node
    in_job: bool = False  # in a batch job, which has a time limit
    notes: Sequence[str] = ()  # messages about the node, for people


class FollowerLiveness:
    """Watches the followers' connections, which end with their processes.

    ``workers`` returns the names of a rank's workers; ``retire`` has the scheduler retire workers and returns the
    retired. Once ``ended`` is set no death counts. ``node`` is named in messages.
    """

    def __init__(
        self,
        followers: Sequence[FollowerConnection],
        workers: Callable[[int], list[str]],
        retire: Callable[[list[str]], Awaitable[list[str]]],
        ended: asyncio.Event,
        node: str,
    ) -> None:
        self._followers = {g.rank: g for g in followers}
        self._workers, self._retire, self._ended, self._node = workers, retire, ended, node
        self._tasks = tasks.Group()
        self._loop = asyncio.get_running_loop()
        for follower in followers:
            self._loop.add_reader(
                follower.sock,
                tasks.log_errors(self._look, f"the look at rank {follower.rank}", tasks.only_log),
                follower,
            )

    def _look(self, follower: FollowerConnection) -> None:
        self._loop.remove_reader(follower.sock)  # followers say nothing once they are there: this is the end
        del self._followers[follower.rank]
        lose = functools.partial(self._lose, follower.rank)
        self._tasks.start(lose, f"the end of rank {follower.rank}", functools.partial(self._failed, follower.rank))

    def _failed(self, rank: int, error: BaseException) -> None:
        names = self._workers(rank)
        self._say(
            f"rank {rank} died; {_its(names) if names else 'its worker'} could not be retired: {reason_of(error)}"
        )

    async def _lose(self, rank: int) -> None:
        try:
            await asyncio.wait_for(self._ended.wait(), _TOGETHER_S)
        except TimeoutError:
            self._say(f"rank {rank} died; {await self._retired(rank)}")

    async def _retired(self, rank: int) -> str:
        """Retire the workers of a rank; return a message about the result."""
        names = self._workers(rank)
        if not names:
            return "it had no worker"
        try:
            gone = await self._retire(names)
        except (OSError, HpcGpuError) as e:
            return f"{_its(names)} could not be retired: {e}"
        if kept := [n for n in names if n not in gone]:
            return f"{_its(kept)} stay{'s' if len(kept) == 1 else ''}: there is no other to take the data and the tasks"
        for follower in self._followers.values():
            follower.tell("lost", rank=rank)
        return f"{_its(names)} {'was' if len(names) == 1 else 'were'} retired"

    def _say(self, text: str) -> None:
        log.say_of(self._node, (text,))

    def close(self) -> None:
        """Stop watching."""
        for follower in self._followers.values():
            self._loop.remove_reader(follower.sock)
        self._tasks.cancel()


class Leader:
    """The workers of one node, from start to end. Rank 0's is a :class:`hpcgpu.agent.rank0.Rank0Leader`."""

    def __init__(self, context: LeaderContext) -> None:
        self.context = context
        self.security = security_of(context.scheduler)
        self.nannies: list[Nanny] = []
        self.watch: Any = None  # a comm of distributed
        self.liveness: FollowerLiveness | None = None
        self._outliving: asyncio.Task[None] | None = None
        self.ended = asyncio.Event()
        self.on_end: Callable[[], object] = lambda: None
        self.exit_code = 0
        self.why = ""
        self._warned = False
        self._ends_s: float | None = None  # when the job's time ends, on the loop's clock

    def end(self, exit_code: int, why: str = "") -> None:
        """Let the run end; the first reason counts."""
        if not self.ended.is_set():
            self.exit_code, self.why = exit_code, why
            self.ended.set()
            self.on_end()

    def stop(self, sig: signal.Signals, why: str) -> None:
        """End the run because of a signal."""
        self.end(128 + sig, why)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            self.drain(self._ends_s and max(0.0, self._ends_s - asyncio.get_running_loop().time()))

    def drain(self, left_s: float | None) -> None:
        """Prepare for the job's time limit, ``left_s`` seconds away; None: soon."""

    async def run(self) -> int:
        """Start the workers, stay until the run ends, end the workers; return the exit code."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(sig, self._answer(sig))
        warn = tasks.log_errors(self._warn, "the answer to the end of the job's time", tasks.only_log)
        loop.add_signal_handler(signal.SIGUSR1, warn)  # Slurm's --signal, through the batch script
        if self.context.in_job and (limit_s := self.context.run.settings.walltime_s):
            self._ends_s = loop.time() + limit_s
            loop.call_at(self._ends_s - self.context.run.settings.warning_s, warn)
        self.spawner = ForkServerSpawner(
            self.context.fork_server,
            {g.rank: (g.stdout, g.stderr) for g in self.context.followers},
            lambda: self.end(os.EX_SOFTWARE, "the fork server process died"),
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
        why = f"it got {sig.name} {_SENDERS.get(sig, '')}".rstrip()
        stop = functools.partial(self.stop, sig, why)
        return tasks.log_errors(stop, f"the answer to {sig.name}", lambda _: self.end(128 + sig, why))

    async def serve(self) -> int:
        """Start the workers and stay as long as the scheduler lives; return the exit code."""
        await self.start_workers()
        return await self.wait_for_scheduler()

    async def start_workers(self) -> None:
        """Start this node's workers, and hold a connection to the scheduler that ends when it ends."""
        from distributed.comm import connect

        from hpcgpu.deploy.network.connect_first import connect_first
        from hpcgpu.deploy.processes.nanny import make_nanny

        deadline_s = self.reach_s
        reached = await connect_first(self.context.scheduler["addresses"], self.security, deadline_s)
        self.watch = await connect(reached.address, timeout=deadline_s, **self.security.get_connection_args("worker"))
        context = self.context
        about = {"node": context.node, "succession": context.succession, "workers": len(context.workers)}
        await self.watch.write({"op": "hpcgpu_watch", "reply": False, **about, "notes": list(context.notes)})
        await self.watch.read()
        common: dict[str, Any] = {"spawner": self.spawner, "security": self.security}
        settings = context.run.settings
        self.nannies = [make_nanny(reached, settings, spec, rank=rank, **common) for rank, spec in context.workers]
        done = await asyncio.gather(*(n.start() for n in self.nannies), return_exceptions=True)
        failed = [e for e in done if isinstance(e, BaseException)]
        if failed and len(failed) == len(done):
            raise LaunchError(f"no worker of this node could be started: {cause_of(failed[0])}")
        self.liveness = FollowerLiveness(
            self.context.followers, self._names_of, self._retire, self.ended, self.context.node
        )
        if self.nannies:
            self._outliving = tasks.start(self._outlive_workers, "the look for the end of all workers", tasks.only_log)

    async def _outlive_workers(self) -> None:
        """Report to the scheduler when none of this leader's workers is left or will be restarted."""
        await self.workers_ended()
        ended = [f"worker {n.name}: {n.ended}" for n in self.nannies if n.ended]
        with contextlib.suppress(OSError):  # it is gone, which is seen elsewhere
            await self.watch.write({"died": "; ".join(ended)})

    async def workers_ended(self) -> None:
        """Wait until no worker is left or will be restarted."""
        await asyncio.gather(*(n.finished() for n in self.nannies))

    def _names_of(self, rank: int) -> list[str]:
        return [spec.name for owner, spec in self.context.workers if owner == rank]

    async def _retire(self, names: list[str]) -> list[str]:
        """Let the scheduler move the workers' data to others and close them for good; return the retired ones."""
        # Three callers have data handed over, by two requests, since their ends differ. These workers stay if no other
        # can take the data. A member's (agent.member) leave in a hurry, and hpcgpu's scheduler hurries them
        # (hpcgpu_retire). Those of agent.standalone_node have another scheduler, without that request; their
        # nannies close them.
        async with scheduler_rpc(self.context.scheduler, _REPORT_S) as scheduler:
            if not await worker_names(scheduler) - set(names):
                return []  # a client that waits for a result would wait for ever
            gone = await scheduler.retire_workers(names=names, close_workers=True, remove=True)
        return [worker["name"] for worker in gone.values()]

    @property
    def reach_s(self) -> float:
        """Seconds in which the scheduler's addresses are tried."""
        return self.context.run.settings.death_timeout_s

    async def wait_for_scheduler(self) -> int:
        """Wait until the scheduler says goodbye or is gone; return the exit code."""
        await self.hear_goodbye()
        return 0

    async def hear_goodbye(self) -> bool:
        """Wait for the scheduler's end; return whether it said goodbye."""
        with contextlib.suppress(OSError):
            while await self.watch.read() != "end":
                continue
            return True
        return False

    async def close(self) -> None:
        """End the workers, the busy ones by force."""
        if self._outliving:
            self._outliving.cancel()
        if self.liveness:
            self.liveness.close()
        await asyncio.gather(*(n.close(timeout=_CLOSE_S, reason="the run ended") for n in self.nannies))
        if self.watch:
            if self.exit_code != os.EX_SOFTWARE:
                with contextlib.suppress(OSError):
                    await self.watch.write("bye")  # else rank 0 would say that this leader is lost
            await self.watch.close()


class Successor(Leader):
    """Leads in place of the node's first leader, and starts that one's workers again."""

    def __init__(self, context: LeaderContext, failover: FailoverState, rank: int) -> None:
        super().__init__(context)
        self._failover, self._rank = failover, rank

    async def start_workers(self) -> None:
        """Start the workers when the scheduler has noticed the death of those before."""
        names = {spec.name for _, spec in self.context.workers}
        await self._wait_for(names)
        await super().start_workers()
        count, after_s = len(names), time.monotonic() - self._failover.since_s
        log.say(
            f"{self.context.node}: the leader died; rank {self._rank} leads, and {count} "
            f"worker{'s are' if count != 1 else ' is'} back after {after_s:.1f} s"
        )

    async def _wait_for(self, names: set[str]) -> None:
        """Wait until these names are free: a worker whose name is taken is refused (distributed 2026.8.0)."""
        deadline_s = self.context.run.settings.death_timeout_s
        taken = names
        try:
            async with asyncio.timeout(deadline_s), scheduler_rpc(self.context.scheduler, deadline_s) as scheduler:
                while taken := names & await worker_names(scheduler):
                    await asyncio.sleep(_ASK_S)
        except TimeoutError:
            raise LaunchError(
                f"{self.context.node}: the leader died, but within {deadline_s:g} s the scheduler did not lose its "
                f"workers {', '.join(sorted(taken))}"
            ) from None


class ForcedEnd:
    """Ends a leader by force if its event loop does not end; a context manager around the loop.

    Kills the fork server with all its children, and then this process, ``limit_s`` seconds after :meth:`begin`. The
    followers get a goodbye: otherwise one of them would lead in this process's place.
    """

    def __init__(
        self, fork_server: ForkServer, followers: Sequence[FollowerConnection] = (), limit_s: float = LIMIT_S
    ) -> None:
        self._fork_server, self._followers, self._limit_s = fork_server, followers, limit_s
        self._begun, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def begin(self) -> None:
        """Start the countdown, as the run ends."""
        self._begun.set()

    def __enter__(self) -> Self:
        self._thread.start()  # now: at the end there may be no room for another one
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._begun.set()

    def _watch(self) -> None:
        self._begun.wait()
        if not self._over.wait(self._limit_s):
            self._force()

    def _force(self) -> None:
        try:
            log.say(f"process {os.getpid()} has not ended within {self._limit_s:g} s; it is killed, and its workers")
            self._fork_server.kill()
            dismiss(self._followers)
        finally:
            os._exit(os.EX_SOFTWARE)


def security_of(scheduler: Mapping[str, Any]) -> Security:
    """Return the Security for connections to the scheduler in a rank's record."""
    from hpcgpu.deploy.network.tls import Certificate, security

    return security(Certificate(scheduler["cert"], scheduler["key"]) if scheduler.get("cert") else None)


async def report_failure(scheduler: Mapping[str, Any], text: str) -> None:
    """Report to rank 0 why this node has no workers: it would wait for them."""
    async with scheduler_rpc(scheduler, _REPORT_S) as to:
        await to.hpcgpu_failed(text=text)


@contextlib.asynccontextmanager
async def scheduler_rpc(scheduler: Mapping[str, Any], deadline_s: float) -> AsyncIterator[Any]:
    """Call the scheduler's handlers by name, at the first of its addresses that answers."""
    from distributed.core import rpc

    from hpcgpu.deploy.network.connect_first import connect_first

    trust = security_of(scheduler)
    reached = await connect_first(scheduler["addresses"], trust, deadline_s)
    async with rpc(reached.address, connection_args=trust.get_connection_args("worker")) as to:
        yield to


async def worker_names(scheduler: Any) -> set[str]:  # distributed has no types
    """Return the names of the scheduler's workers."""
    identity = await scheduler.identity(n_workers=-1)
    return {worker["name"] for worker in identity["workers"].values()}


def _its(names: Sequence[str]) -> str:
    return f"its worker{'s' if len(names) > 1 else ''} {', '.join(names)}"

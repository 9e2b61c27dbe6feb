"""The rank that owns its node's processes: it starts the workers, watches them, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpcgpu.agent.attendance import Attendance
from hpcgpu.agent.follower import Guest
from hpcgpu.agent.spawner import ZygoteSpawner
from hpcgpu.agent.zygote import Zygote
from hpcgpu.errors import LaunchError, cause_of
from hpcgpu.host import log
from hpcgpu.model import RunDocument, WorkerSpec
from hpcgpu.supervise import tasks

if TYPE_CHECKING:
    from distributed import Nanny
    from distributed.security import Security

logger = logging.getLogger("distributed.hpcgpu")

# A worker in the middle of a task gets this long to end by itself before it is killed.
_CLOSE_S = 2.0
_REPORT_S = 10.0
_SENDERS = {signal.SIGTERM: "(cancelled, preempted, or at its time limit)"}


@dataclass(slots=True, kw_only=True)
class Post:
    """Everything that a leader needs once the ranks have met.

    Attributes
    ----------
    scheduler : mapping
        ``addresses``, ``protocol``, ``cert``, ``key``, ``local`` of rank 0's record.
    workers : sequence of (int, WorkerSpec)
        The node's workers and the rank of each.
    guests : sequence of Guest
        The followers, with their stdout and stderr.
    node : str
        The host's name.
    place : str
        What the node's leaders, one after another, and no others, say of themselves.
    environ : mapping of str to str
        The environment as this rank was started with it.
    in_job : bool
        Whether this is a batch job, which has a time limit.
    notes : sequence of str
        What people should know of the node.

    """

    run: RunDocument
    environ: Mapping[str, str]
    zygote: Zygote
    scheduler: Mapping[str, Any]
    workers: Sequence[tuple[int, WorkerSpec]]
    guests: Sequence[Guest] = ()
    node: str = ""
    place: str = ""
    in_job: bool = False
    notes: Sequence[str] = ()


class Leader:
    """The workers of one node, from start to end. Rank 0's is a :class:`hpcgpu.agent.head.Head`."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.security = security_of(post.scheduler)
        self.nannies: list[Nanny] = []
        self.watch: Any = None  # a comm of distributed
        self.attendance: Attendance | None = None
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
        """Prepare for the job's time limit, which is ``left_s`` seconds away; None: soon."""

    async def run(self) -> int:
        """Start the workers, stay until the run ends, end the workers; return the exit code."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(sig, self._answer(sig))
        warn = tasks.guarded(self._warn, "the answer to the end of the job's time", tasks.say_only)
        loop.add_signal_handler(signal.SIGUSR1, warn)  # Slurm's --signal, through the batch script
        if self.post.in_job and (limit_s := self.post.run.settings.walltime_s):
            self._ends_s = loop.time() + limit_s
            loop.call_at(self._ends_s - self.post.run.settings.warning_s, warn)
        self.spawner = ZygoteSpawner(
            self.post.zygote,
            {g.rank: (g.stdout, g.stderr) for g in self.post.guests},
            lambda: self.end(os.EX_SOFTWARE, "the zygote process died"),
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
                logger.debug("while the run ended: %s", error)  # what it was doing broke because of the end
            await self.close()
        if self.why and self.exit_code:
            log.say(f"the run ends: {self.why}")
        return self.exit_code

    def _answer(self, sig: signal.Signals) -> Callable[[], None]:
        """Return what is done when a signal comes; the run ends even where that fails."""
        why = f"it got {sig.name} {_SENDERS.get(sig, '')}".rstrip()
        stop = functools.partial(self.stop, sig, why)
        return tasks.guarded(stop, f"the answer to {sig.name}", lambda _: self.end(128 + sig, why))

    async def serve(self) -> int:
        """Start the workers and stay as long as the scheduler lives; return the exit code."""
        await self.start_workers()
        return await self.wait_for_scheduler()

    async def start_workers(self) -> None:
        """Start this node's workers, and hold a connection to the scheduler that ends when it ends."""
        from distributed.comm import connect

        from hpcgpu.deploy.network.connect_first import connect_first

        deadline_s = self.reach_s
        reached = await connect_first(self.post.scheduler["addresses"], self.security, deadline_s)
        self.watch = await connect(reached.address, timeout=deadline_s, **self.security.get_connection_args("worker"))
        about = {"node": self.post.node, "place": self.post.place, "workers": len(self.post.workers)}
        await self.watch.write({"op": "hpcgpu_watch", "reply": False, **about, "notes": list(self.post.notes)})
        await self.watch.read()
        host = "127.0.0.1" if self.post.scheduler["local"] else reached.own_host
        self.nannies = [self._nanny(reached.address, host, rank, spec) for rank, spec in self.post.workers]
        done = await asyncio.gather(*(n.start() for n in self.nannies), return_exceptions=True)
        failed = [e for e in done if isinstance(e, BaseException)]
        if failed and len(failed) == len(done):
            raise LaunchError(f"no worker of this node could be started: {cause_of(failed[0])}")
        self.attendance = Attendance(self.post.guests, self._names_of, self._retire, self.ended, self.post.node)
        if self.nannies:
            self._outliving = tasks.start(self._outlive_workers, "the look for the end of all workers", tasks.say_only)

    async def _outlive_workers(self) -> None:
        """Tell the scheduler when no worker of this leader is left, or to be started again."""
        await self.workers_ended()
        ended = [f"worker {n.name}: {n.ended}" for n in self.nannies if n.ended]
        with contextlib.suppress(OSError):  # it is gone, which is seen elsewhere
            await self.watch.write({"died": "; ".join(ended)})

    async def workers_ended(self) -> None:
        """Wait until no worker is left, or to be started again."""
        await asyncio.gather(*(n.finished() for n in self.nannies))

    def _names_of(self, rank: int) -> list[str]:
        return [spec.name for owner, spec in self.post.workers if owner == rank]

    async def _retire(self, names: list[str]) -> list[str]:
        """Let the scheduler move the workers' data to others and close them, for good; return those that went."""
        async with scheduler_rpc(self.post.scheduler, _REPORT_S) as scheduler:
            if not await worker_names(scheduler) - set(names):
                return []  # who waits for a result would wait for ever
            gone = await scheduler.retire_workers(names=names, close_workers=True, remove=True)
        return [worker["name"] for worker in gone.values()]

    @property
    def reach_s(self) -> float:
        """How long to try the scheduler's addresses."""
        return self.post.run.settings.death_timeout_s

    def _nanny(self, scheduler: str, host: str, rank: int, spec: WorkerSpec) -> Nanny:
        from hpcgpu.deploy.processes.nanny import ForkNanny

        settings = self.post.run.settings
        # Dask's traffic takes the planned interface, when there is one, else the way to the scheduler
        place = (
            {"interface": spec.binding.interface} if spec.binding.interface and host != "127.0.0.1" else {"host": host}
        )
        return ForkNanny(
            scheduler,
            spawner=self.spawner,
            spec=spec,
            rank=rank,
            name=spec.name,
            nthreads=spec.nthreads,
            memory_limit=spec.memory_limit_bytes or 0,
            resources=dict(spec.resources),
            security=self.security,
            protocol=self.post.scheduler["protocol"],
            local_directory=spec.local_directory,
            death_timeout=settings.death_timeout_s,
            **place,
        )

    async def wait_for_scheduler(self) -> int:
        """Wait until the scheduler says that the run ends, or is gone."""
        await self.hear_goodbye()
        return 0

    async def hear_goodbye(self) -> bool:
        """Wait for the scheduler's end; return False when it did not say goodbye."""
        with contextlib.suppress(OSError):
            while await self.watch.read() != "end":
                continue
            return True
        return False

    async def close(self) -> None:
        """End the workers, the busy ones by force."""
        if self._outliving:
            self._outliving.cancel()
        if self.attendance:
            self.attendance.close()
        await asyncio.gather(*(n.close(timeout=_CLOSE_S, reason="the run ended") for n in self.nannies))
        if self.watch:
            if self.exit_code != os.EX_SOFTWARE:
                with contextlib.suppress(OSError):
                    await self.watch.write("bye")  # else rank 0 would say that this leader is lost
            await self.watch.close()


def security_of(scheduler: Mapping[str, Any]) -> Security:
    """Return what connections to this scheduler, as a record has it, are made with."""
    from hpcgpu.deploy.network.tls import Certificate, security

    return security(Certificate(scheduler["cert"], scheduler["key"]) if scheduler.get("cert") else None)


async def report_failure(scheduler: Mapping[str, Any], text: str) -> None:
    """Let rank 0 know why this node has no workers; it would wait for them."""
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


async def worker_names(scheduler: Any) -> set[str]:  # noqa: ANN401 - distributed has no types
    """Return the names of the workers that the scheduler has."""
    identity = await scheduler.identity(n_workers=-1)
    return {worker["name"] for worker in identity["workers"].values()}

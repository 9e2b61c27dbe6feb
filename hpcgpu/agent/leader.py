"""The rank that owns its node's processes: it starts the workers, watches them, and ends them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hpcgpu.agent.spawner import ZygoteSpawner
from hpcgpu.agent.zygote import Zygote
from hpcgpu.errors import LaunchError
from hpcgpu.model import RunDocument, WorkerSpec

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
    outputs : mapping of int to (int, int)
        stdout and stderr of the followers.
    environ : mapping of str to str
        The environment as this rank was started with it.

    """

    run: RunDocument
    environ: Mapping[str, str]
    zygote: Zygote
    scheduler: Mapping[str, Any]
    workers: Sequence[tuple[int, WorkerSpec]]
    outputs: Mapping[int, tuple[int, int]] = field(default_factory=dict)


class Leader:
    """The workers of one node, from start to end. Rank 0's is a :class:`hpcgpu.agent.head.Head`."""

    def __init__(self, post: Post) -> None:
        self.post = post
        self.security = _security(post.scheduler)
        self.nannies: list[Nanny] = []
        self.watch: Any = None  # a comm of distributed
        self.ended = asyncio.Event()
        self.exit_code = 0
        self.why = ""

    def end(self, exit_code: int, why: str = "") -> None:
        """Let the run end; the first reason counts."""
        if not self.ended.is_set():
            self.exit_code, self.why = exit_code, why
            self.ended.set()

    async def run(self) -> int:
        """Start the workers, stay until the run ends, end the workers; return the exit code."""
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(sig, self.end, 128 + sig, f"it got {sig.name} {_SENDERS.get(sig, '')}".rstrip())
        self.spawner = ZygoteSpawner(
            self.post.zygote, self.post.outputs, lambda: self.end(os.EX_SOFTWARE, "the zygote process died")
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
            print(f"hpcgpu: the run ends: {self.why}", file=sys.stderr, flush=True)
        return self.exit_code

    async def serve(self) -> int:
        """Start the workers and stay as long as the scheduler lives; return the exit code."""
        await self.start_workers()
        return await self.wait_for_scheduler()

    async def start_workers(self) -> None:
        """Start this node's workers, and hold a connection to the scheduler that ends when it ends."""
        from distributed.comm import connect

        from hpcgpu.deploy.reach import reach

        deadline_s = self.post.run.settings.death_timeout_s
        reached = await reach(self.post.scheduler["addresses"], self.security, deadline_s)
        self.watch = await connect(reached.address, timeout=deadline_s, **self.security.get_connection_args("worker"))
        await self.watch.write({"op": "hpcgpu_watch", "reply": False})
        await self.watch.read()
        host = "127.0.0.1" if self.post.scheduler["local"] else reached.own_host
        self.nannies = [self._nanny(reached.address, host, rank, spec) for rank, spec in self.post.workers]
        done = await asyncio.gather(*(n.start() for n in self.nannies), return_exceptions=True)
        failed = [e for e in done if isinstance(e, BaseException)]
        if failed and len(failed) == len(done):
            raise LaunchError(f"no worker of this node could be started: {failed[0]}")

    def _nanny(self, scheduler: str, host: str, rank: int, spec: WorkerSpec) -> Nanny:
        from hpcgpu.deploy.nanny import ForkNanny

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
        with contextlib.suppress(OSError):
            while await self.watch.read() != "end":
                continue
        return 0

    async def close(self) -> None:
        """End the workers, the busy ones by force."""
        await asyncio.gather(*(n.close(timeout=_CLOSE_S, reason="the run ended") for n in self.nannies))
        if self.watch:
            await self.watch.close()


def _security(scheduler: Mapping[str, Any]) -> Security:
    from hpcgpu.deploy.trust import Certificate, security

    return security(Certificate(scheduler["cert"], scheduler["key"]) if scheduler["cert"] else None)


async def report_failure(scheduler: Mapping[str, Any], text: str) -> None:
    """Let rank 0 know why this node has no workers; it would wait for them."""
    from distributed.core import rpc

    from hpcgpu.deploy.reach import reach

    trust = _security(scheduler)
    reached = await reach(scheduler["addresses"], trust, _REPORT_S)
    async with rpc(reached.address, connection_args=trust.get_connection_args("worker")) as to:
        await to.hpcgpu_failed(text=text)

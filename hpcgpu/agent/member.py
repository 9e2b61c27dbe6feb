"""Lead a job that joins a cluster of hpcgpu: find its scheduler, and hand over the data when the job ends."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from pathlib import Path

from hpcgpu import supervise
from hpcgpu.agent.leader import CANCELLED_S, Leader, LeaderContext, security_of
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.processes.nanny import hand_over
from hpcgpu.errors import LaunchError
from hpcgpu.host import log, process

_POLL_S = 0.5  # many jobs may read one folder
_REACH_S = 10.0  # the scheduler listens before its file is written
_AGAIN_S = 5.0  # if no worker can take the data, a later one may
# A scheduler that says goodbye closes the workers' connections, too.
_GOODBYE_S = 2.0
_GONE = "its launcher is gone"
_BROKEN = "worker-handle-scheduler-connection-broken"  # Worker.handle_scheduler of distributed 2026.8.0


class Member(Leader):
    """The workers of one node, in a cluster whose scheduler is in another job."""

    def __init__(self, context: LeaderContext) -> None:
        super().__init__(context)
        self._cancelled, self._save_s = "", CANCELLED_S / 2

    async def serve(self) -> int:
        """Join, then stay until the scheduler ends the run or all workers have left; return the exit code."""
        file = await self._find_scheduler()
        self.context.scheduler = {"addresses": file.addresses, "cert": file.cert, "key": file.key}
        self.security = security_of(self.context.scheduler)
        await self.start_workers(_REACH_S)
        return await self._stay_beside_launcher()

    async def _stay(self) -> int:
        goodbye = asyncio.ensure_future(self.hear_goodbye())
        left = asyncio.ensure_future(self.workers_ended())
        try:
            await asyncio.wait((goodbye, left), return_when=asyncio.FIRST_COMPLETED)
            if not goodbye.done() and all(n.farewell and n.farewell != _BROKEN for n in self.nannies):
                return 0
            await asyncio.wait((goodbye,), timeout=_GOODBYE_S)
            if goodbye.done() and goodbye.result():
                return 0
        finally:
            goodbye.cancel()
            left.cancel()
        reason = "the scheduler is gone" if goodbye.done() else "its workers have lost the scheduler"
        self.end(os.EX_UNAVAILABLE, f"{reason}: no goodbye from {self.watch.peer_address}")
        return self.exit_code

    async def _stay_beside_launcher(self) -> int:
        """Stay, but leave when srun is gone: Slurm has given the job up, and kills its processes without a warning."""
        loop, launcher = asyncio.get_running_loop(), process.find(self.context.environ.get(process.LAUNCHER, ""))
        # This happens when the node's slurmd does not answer: srun ends at once. When slurmd is back in touch, it sends
        # SIGTERM and SIGKILL together (22.05.8). Ranks of mpirun are its children, and get a signal when it dies.
        with process.watched(*launcher) if launcher else contextlib.nullcontext() as pidfd:
            if pidfd is None:
                return await self._stay()

            def leave() -> None:
                loop.remove_reader(pidfd)
                self._leave(_GONE)

            name = "leaving without a launcher"
            loop.add_reader(pidfd, supervise.log_errors(leave, name, lambda _: self.end(os.EX_SOFTWARE, _GONE)))
            try:
                return await self._stay()
            finally:
                loop.remove_reader(pidfd)

    async def _find_scheduler(self) -> scheduler_file.SchedulerFile:
        """Wait for the cluster's scheduler file."""
        folder, deadline_s = Path(self.context.run.folder), self.context.run.settings.death_timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                return await supervise.until(functools.partial(asyncio.to_thread, scheduler_file.read, folder), _POLL_S)
        except TimeoutError:
            raise LaunchError(
                f"{folder} has no scheduler file after {deadline_s:g} s (death_timeout). Has the job of this cluster's "
                "scheduler started, and is this folder on a file system that all nodes share?"
            ) from None
        except OSError as e:
            raise LaunchError(f"the cluster of this job has ended: its folder is gone: {e}") from e

    def stop(self, sig: signal.Signals, why: str) -> None:
        """Leave because of a signal. At SIGTERM the workers move as much data as they can in a few seconds."""
        if sig != signal.SIGTERM or not self.nannies or self.ended.is_set():
            super().stop(sig, why)
            return
        if self._cancelled:  # batch systems send it to all processes, and again through their launcher
            return
        self._cancelled = why
        self._leave(why)
        self._ending = self._end_in(CANCELLED_S)
        self._extending = supervise.start(self.extend_grace, "the question for the time to leave", supervise.only_log)

    def take_grace(self, left_s: float) -> None:
        """Take so much time, from now on, to move the workers' data."""
        self._ending.cancel()
        self._ending = self._end_in(left_s)

    def _end_in(self, limit_s: float) -> asyncio.TimerHandle:
        reason = f"{self._cancelled}, and its data could not be moved within {limit_s:.0f} s"
        return asyncio.get_running_loop().call_later(limit_s, self.end, 128 + signal.SIGTERM, reason)

    def drain(self, left_s: float | None) -> None:
        """Leave before the job's time limit."""
        self._save_s = max(self._save_s, (left_s or 0.0) / 2)
        self._leave("its time ends soon" if left_s is None else f"its time ends in {left_s:.0f} s")

    def _leave(self, why: str) -> None:
        log.say(f"the workers of this job hand over their data and leave: {why}")
        if self.watch is None:
            self.end(os.EX_UNAVAILABLE, f"{why}, and it has not found its cluster yet")
        elif self._leaving is None:
            self._leaving = supervise.start(
                self._hand_over,
                "handing over the workers' data",
                lambda e: self.end(os.EX_SOFTWARE, f"its workers could not be retired: {supervise.reason_of(e)}"),
            )

    async def _hand_over(self) -> None:
        for nanny in self.nannies:
            nanny.close_gracefully(reason="hpcgpu-drain")  # a worker that dies meanwhile is not replaced
        with contextlib.suppress(OSError):  # then the scheduler is gone, which serve() sees
            while True:
                left, count = await hand_over(self.nannies, self.watch.peer_address, self.security, save_s=self._save_s)
                if left == count:
                    break
                if self._cancelled:
                    self.end(128 + signal.SIGTERM, f"{self._cancelled}, and no worker could take its data")
                await asyncio.sleep(_AGAIN_S)
            self.end(0)

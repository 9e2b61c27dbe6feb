"""Rank 0: the leader with the scheduler, which runs the user's script or serves a client outside.

The scheduler process is forked before the rendezvous and presented to the other ranks in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dask

from hpcgpu import supervise
from hpcgpu.agent.fork_server import LeaderResources
from hpcgpu.agent.leader import CANCELLED_S, Leader, LeaderContext
from hpcgpu.deploy.network import exposed, lease, require_ucx, scheduler_file
from hpcgpu.deploy.processes.control import Child, Control
from hpcgpu.deploy.processes.scheduler import SchedulerSpec
from hpcgpu.errors import LaunchError, SubmitError, opt
from hpcgpu.host import limits, log, private, process
from hpcgpu.host.addresses import local_address, loopback, reachable_addresses
from hpcgpu.host.host_memory import format_exit, oom_kills
from hpcgpu.host.run import ended
from hpcgpu.model import Allocation, Layout, RunDocument, Settings
from hpcgpu.model.allocation import SCRIPT_ADDRESS, SCRIPT_DASHBOARD, SCRIPT_ENV, SCRIPT_LEADER
from hpcgpu.plan.jobs.needs import Size, shortages
from hpcgpu.units import counted

# Limits for the script's end by the error of its futures and after SIGTERM, and for the scheduler to hear all other
# nodes' goodbyes.
_RAISES_S, _SCRIPT_S = 10.0, 2.0
_SAVE_S = 30.0  # half of what a leader may take to end
_SCHEDULER_S = 5.0
_SCHEDULER_START_S = 60.0
_SAVED_PART = 0.75  # of the time left, for checkpoints before a requeue
_SUMMARY_S = 2.0  # the scheduler waits 1 s at most for the last heartbeats
# The fork server reports a child's end a moment after its connections have ended.
_REPORT_S = 5.0
_DASHBOARD = "dashboard"  # the file with its address
_IPV4 = "0.0.0.0"  # UCX's listener wants an address


class SchedulerProcess:
    """The scheduler process, and its record for the other ranks.

    ``local``: all ranks are on this node and no client is outside, so it listens on loopback only, or on the interface
    that the user names. A batch system's log shows the summary of a run; a cluster object on this machine only on
    request.
    """

    def __init__(self, run: RunDocument, resources: LeaderResources, allocation: Allocation, *, local: bool) -> None:
        settings = run.settings
        loopback()  # the dashboard is there
        self.allocation, self.folder, self._interface = allocation, resources.scratch.path, settings.interface
        self._own_address = local_address(settings.interface) if local else ""
        self.protocol = protocol(settings)
        if self.protocol == "ucx":
            require_ucx(opt("protocol", "ucx"))
        self.certificate = scheduler_file.Certificate.make() if self.protocol == "tls" else None
        self.secret = secrets.token_urlsafe() if settings.dashboard else ""
        if warning := exposed(self.protocol):
            log.say(warning)
        spec = SchedulerSpec(
            local_directory=str(self.folder),
            host=self._own_address or (_IPV4 if self.protocol == "ucx" else ""),  # TLS both ways guards it
            port=settings.scheduler_port,
            protocol=self.protocol,
            node_copies=settings.node_copies,
            certificate=self.certificate,
            dashboard_secret=self.secret,
            client_grace_s=settings.client_grace_s,
            stalled_s=settings.death_timeout_s,
            grows=run.shape == "head" or (run.shape == "gang" and settings.shape == "elastic"),
            walltime_s=settings.walltime_s,
            carbon_g_per_kwh=settings.carbon_g_per_kwh,
            summary="json" if allocation.batch != "local" else "lines" if run.script else "",
            rank_pid=os.getpid(),
        )
        self.dashboard_port = 0
        self._fork_server = resources.fork_server
        self.control, theirs = socket.socketpair()
        with theirs:  # on this rank's output; it starts while MPI does
            entry, fds = "hpcgpu.deploy.processes.scheduler:main", (theirs.fileno(), 1, 2)
            self.pid = self._fork_server.spawn(entry, spec, fds)

    def record(self) -> dict[str, Any]:
        """Wait until the scheduler listens; return its addresses and certificate."""
        started = wait_started(self.control, functools.partial(self._fork_server.wait_exit, self.pid, _REPORT_S))
        self.dashboard_port = started["dashboard_port"]
        address = self._own_address
        hosts = (address,) if address else reachable_addresses(started["hosts"], self._interface)
        return {
            "addresses": [f"{self.protocol}://{f'[{h}]' if ':' in h else h}:{started['port']}" for h in hosts],
            "cert": self.certificate.cert_pem if self.certificate else "",
            "key": self.certificate.key_pem if self.certificate else "",
        }


def wait_started(
    control: socket.socket, exit_code: Callable[[], int | None], deadline_s: float = _SCHEDULER_START_S
) -> dict[str, Any]:
    """Return the scheduler's first message, its ports; raise LaunchError if it fails, ends, or is silent."""
    control.settimeout(deadline_s)
    try:
        with control.makefile("rb") as lines:
            line = lines.readline()
    except TimeoutError:
        raise LaunchError(
            f"the scheduler process does not listen after {deadline_s:g} s; the traceback above shows where"
        ) from None
    if not line:
        code = exit_code()
        end = "closed its connection" if code is None else format_exit(code, 0)
        raise LaunchError(f"the scheduler process {end} before it listened")
    control.settimeout(None)
    message: dict[str, Any] = json.loads(line)
    if message["op"] == "error":
        log.write(message["text"])
        raise LaunchError(f"the scheduler could not be started: {message['reason']}")
    return message


def protocol(settings: Settings) -> str:
    """Return Dask's protocol: tls, unless the user turned encryption off."""
    return settings.protocol or ("tcp" if settings.security is False else "tls")


class Rank0Leader(Leader):
    """The leader of rank 0's node, which also has the run as a whole."""

    def __init__(self, context: LeaderContext, scheduler: SchedulerProcess, layout: Layout) -> None:
        super().__init__(context)
        self._scheduler, self._run_folder = scheduler, Path(context.run.folder)
        self._expected, self._nodes, self._size = layout.worker_count, len(layout.nodes), Size.of(layout)
        self._idle = sum(len(node.idle) for node in layout.nodes)
        self._present, self._working, self._died = 0, 1, ""
        self._absent: list[str] = []  # why each worker that did not start did not
        self._started, self._files = False, -1
        self._client_gone, self._stalled = False, False
        self._changed, self._summarised = asyncio.Event(), asyncio.Event()
        self._child: Child | None = None
        self._control: Control | None = None
        self._listening: asyncio.Task[None] | None = None
        self._script: subprocess.Popen[bytes] | None = None
        self._asking: asyncio.Task[None] | None = None  # the batch system, for another start of this job

    async def serve(self) -> int:
        """Start the workers, then run the script, or serve until the client's lease ends; return the exit code."""
        scheduler = self._scheduler
        self._child = self.spawner.adopt(scheduler.pid, scheduler.control)
        kills = oom_kills()
        self._child.exited.add_done_callback(
            lambda ended: self.end(os.EX_SOFTWARE, f"the scheduler process {format_exit(ended.result(), kills)}")
        )
        self._control = await Control.open(scheduler.control)
        self._listening = supervise.start(
            functools.partial(self._listen, self._control),
            "following the scheduler process",
            lambda e: self.end(os.EX_SOFTWARE, f"the scheduler process cannot be followed: {supervise.reason_of(e)}"),
        )
        await supervise.to_thread(self._check_limits)
        await self.start_workers()
        if self._expected:
            await self._wait_for_workers()
            self._started = True
            self._end_without_workers()
        if self.context.run.script:
            return await self._run_script(self.watch.peer_address)
        await self._publish(self._control)
        if not await self.hear_goodbye():
            await self._child.exited  # its connections end a moment before it is known to be dead
            await self.ended.wait()
        return 0

    def _check_limits(self) -> None:
        """Look whether this node's limits allow the whole run; LaunchError if the scheduler would run out of files."""
        allowed = limits.read()
        self._files = allowed.files
        for text in shortages(self._size, allowed, exact=False):
            log.say(f"{text} on {self.context.node}")
        if short := "; ".join(shortages(self._size, allowed, exact=True)):
            raise LaunchError(
                f"{short} on {self.context.node}, which has the scheduler: ask the administrators for a higher one "
                "(limits.conf; LimitNOFILE of slurmd or pbs_mom), or start fewer workers"
            )

    async def _log_summary(self) -> None:
        """Have the scheduler log the run's summary, while its workers can be asked; the last that is heard of it."""
        if self._child and self._control and not self._child.exited.done():
            self._control.send("summary")
            done: asyncio.Future[Any] = asyncio.ensure_future(self._summarised.wait())
            await asyncio.wait([done, self._child.exited], timeout=_SUMMARY_S, return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
        if self._listening:
            self._listening.cancel()

    async def _publish(self, control: Control) -> None:
        """Write the scheduler file for the cluster object outside, which must show a sign of life from now on."""
        scheduler, job = self.context.scheduler, self._scheduler.allocation
        facts = scheduler_file.SchedulerFile(
            addresses=tuple(scheduler["addresses"]),
            node=job.node_name or socket.gethostname(),
            job_id=job.job_id,
            restart_count=job.restart_count,
            cert=scheduler["cert"],
            key=scheduler["key"],
            dashboard_port=self._scheduler.dashboard_port,
            dashboard_secret=self._scheduler.secret,
            files=self._files,
        )
        try:
            control.send("lease", detached=await supervise.to_thread(lease.is_detached, self._run_folder))
            await supervise.to_thread(scheduler_file.publish, self._run_folder, facts)
        except FileNotFoundError as e:
            raise LaunchError(f"the client has closed this cluster: its folder is gone: {e}") from e

    async def _listen(self, control: Control) -> None:
        """Handle the scheduler process's messages."""
        async for message in control.messages():
            if message["op"] == "workers":
                self._present = message["count"]
                self._changed.set()
            elif message["op"] == "absent":
                self._absent = message["texts"]
                self._changed.set()
            elif message["op"] == "summarised":
                self._summarised.set()
            elif message["op"] == "failed":
                self.end(1, message["text"])
            elif message["op"] == "stalled":
                log.say(message["text"] or "tasks go on again")
                self._stalled = bool(message["text"])
                if self._stalled and self.context.run.script:  # else the client decides, whose futures have failed
                    self.end(1, message["why"])
            elif message["op"] == "leaders":
                self._working, self._died = message["working"], message["died"]
                self._end_without_workers()
            elif message["op"] == "leader_lost":
                log.say(f"node {message['node']} lost its leader; its workers are gone")
            elif message["op"] == "silent" and await supervise.to_thread(lease.is_detached, self._run_folder):
                control.send("lease", detached=True)  # then the silence of its client ends nothing
            elif message["op"] in {"end", "silent"}:
                log.say(f"the job ends: {message['reason']}")
                self._client_gone = True
                self.end(0)

    def _end_without_workers(self) -> None:
        """End a run that has no workers and will get none, unless its script has let them go."""
        if self._working or not self._started:  # at the start not all leaders may be known
            return
        if self._died:
            self.end(1, f"no worker is left, and none comes: {self._died}")
        elif self.context.run.script:
            log.say("all workers have been retired; the script goes on without workers")
        else:
            log.say("the job ends: all its workers have been retired")
            self.end(0)

    def take_grace(self, left_s: float) -> None:
        """Have the leaders of all nodes, this one too, take more time to save."""
        if self._control:
            self._control.send("grant", left_s=left_s)

    def drain(self, left_s: float | None) -> None:
        """Announce the end of the job's time: in the log, and to the clients as an event."""
        when = "soon" if left_s is None else f"in {left_s:.0f} s"
        log.say(f"the job's time ends {when}")
        if self._control:
            self._control.send("event", facts={"action": "time-limit", "left_s": left_s})
        if self.context.run.settings.requeue and self.context.in_job:
            self._requeuing = supervise.start(
                functools.partial(self._requeue, left_s), "the job's requeue", supervise.only_log
            )

    async def _requeue(self, left_s: float | None) -> None:
        """Have the workers write what checkpoints lack, then ask the batch system to start this job again."""
        early_s = max(0.0, self.drains_s - asyncio.get_running_loop().time())  # Slurm's signal may be a minute early
        await asyncio.sleep(early_s)
        await self.save(CANCELLED_S if left_s is None else (left_s - early_s) * _SAVED_PART)
        if not self.ended.is_set():  # else the script was through meanwhile
            await self._start_again()

    def _start_again(self) -> asyncio.Task[None]:
        """Ask the batch system to start this job again, once."""
        if self._asking is None:
            self._asking = supervise.start(self._ask_for_start, "the request for another start", supervise.only_log)
        return self._asking

    async def _ask_for_start(self) -> None:
        from hpcgpu.batch import get  # 34 modules, which a leader without a requeue need not have
        from hpcgpu.deploy.jobs.batch_client import requeue

        job, by_script = self._scheduler.allocation, bool(self.context.run.script)
        try:
            follower = await requeue(get(job.batch), job.job_id, by_script=by_script)
        except SubmitError as e:
            if by_script or self.signalled or await supervise.to_thread(lease.is_detached, self._run_folder):
                log.say(f"{e}; nothing goes on after this job unless you submit it again")
            else:
                self.end(os.EX_TEMPFAIL, f"{e}; so its client submits it again")
            return
        if follower == job.job_id:
            log.say(f"job {job.job_id} is requeued")  # the batch system ends it now
        else:
            self.end(os.EX_TEMPFAIL, f"job {follower} follows this one")

    async def _outlive(self, saved: asyncio.Future[Any]) -> None:
        """Have Slurm requeue a job whose time was over before it asked; or, when all is saved, one in a GraceTime."""
        from hpcgpu.batch import slurm
        from hpcgpu.host.run import run

        job_id, system = self._scheduler.allocation.job_id, slurm.Slurm()
        if not self._asking:
            if self._scheduler.allocation.batch != "slurm":
                return
            status = system.read_status(await run(system.status([job_id]))).get(job_id)
            if not status or status.reason != "TimeLimit":
                await asyncio.wait([saved])
                if not slurm.read_needs_requeue([await run(command) for command in system.grace(job_id)]):
                    return
        await self._start_again()

    async def _wait_for_workers(self) -> None:
        deadline_s = self.context.run.settings.death_timeout_s
        try:
            while self._present + len(self._absent) < self._expected:
                self._changed.clear()
                if self._present and not self.context.run.script:  # the client outside waits for all workers
                    with contextlib.suppress(FileNotFoundError):  # the client is gone, which its lease will tell
                        await supervise.to_thread(scheduler_file.report_progress, self._run_folder, self._present)
                async with asyncio.timeout(deadline_s):  # for the next one: nodes with few cores start them in turn
                    await self._changed.wait()
        except TimeoutError:
            if not self._present:
                raise LaunchError(f"none of {self._expected} workers has registered within {deadline_s:g} s") from None
            text = f"only {self._present} of {self._expected} workers have registered within {deadline_s:g} s"
            log.say(f"{text}; the run goes on with them")
            if self._control:
                self._control.send("note", node=self.context.node, text=f"{text} (death_timeout)")
            return
        some = f"{self._present} of " if self._absent else ""
        workers = f"{some}{counted(self._expected, 'worker')} on {counted(self._nodes, 'node')} ready"
        idle = f"; ranks without a worker: {self._idle}" if self._idle else ""
        absent = "".join(f"; {text}" for text in self._absent)
        log.say(f"{workers}{absent}{idle}{await supervise.to_thread(self._write_dashboard)}")

    def _write_dashboard(self) -> str:
        """Write the dashboard's address, which holds a secret, into a file; return a message about it."""
        if not (secret := self._scheduler.secret):
            return ""
        path = self._scheduler.folder / _DASHBOARD
        private.write(path, f"http://127.0.0.1:{self._scheduler.dashboard_port}/{secret}/status\n")
        return f"; dashboard: its address is in {path}"

    async def _run_script(self, address: str) -> int:
        found_by, kills = await supervise.to_thread(self._client_env, address), oom_kills()
        self._script = subprocess.Popen(
            [sys.executable, *self.context.run.script],
            env={**process.user_env(self.context.environ), **found_by},
            # Open MPI 5's mpirun never closes the stdin of rank 0: a script that reads it would wait for ever
            stdin=subprocess.DEVNULL,
            preexec_fn=functools.partial(process.die_with_parent, os.getpid(), signal.SIGTERM),
        )
        code = await ended(self._script)
        if code < 0 and code not in (-signal.SIGINT, -signal.SIGTERM):  # of a user, or a batch system
            log.say(f"the script {format_exit(code, kills)}")
        return 128 - code if code < 0 else code

    def _client_env(self, address: str) -> dict[str, str]:
        """Return the variables with which a plain ``Client()`` reaches this cluster; secrets stay in files."""
        env = {"DASK_SCHEDULER_ADDRESS": address, SCRIPT_ADDRESS: address, SCRIPT_LEADER: str(os.getpid())}
        if self._scheduler.secret:
            env[SCRIPT_DASHBOARD] = str(self._scheduler.folder / _DASHBOARD)
        if not dask.config.get("temporary-directory", None):
            env["DASK_TEMPORARY_DIRECTORY"] = str(self._scheduler.folder)  # Dask's own names can be guessed
        preload = [*dask.config.get("distributed.client.preload", []), "hpcgpu.deploy.client_preload"]
        env["DASK_DISTRIBUTED__CLIENT__PRELOAD"] = repr(preload)  # Dask reads it as Python's literal
        quiet = repr({"distributed.preloading": "warning"})  # else each client logs its preload
        env["DASK_DISTRIBUTED__LOGGING"] = self.context.environ.get("DASK_DISTRIBUTED__LOGGING", quiet)
        if self.context.scheduler["cert"]:
            cert, key = self._scheduler.folder / "client.crt", self._scheduler.folder / "client.key"
            private.write(cert, self.context.scheduler["cert"])
            private.write(key, self.context.scheduler["key"])
            tls = "DASK_DISTRIBUTED__COMM__TLS__"
            env |= {
                f"{tls}CA_FILE": str(cert),
                f"{tls}CLIENT__CERT": str(cert),
                f"{tls}CLIENT__KEY": str(key),
                "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "True",
            }
        return {**env, SCRIPT_ENV: ",".join(env)}

    async def close(self) -> None:
        """End the script, all workers, and the scheduler last."""
        self._extending = supervise.start(self.extend_grace, "the question for the time to save", supervise.only_log)
        limit_s = CANCELLED_S if self.signalled else _SAVE_S
        saved = asyncio.gather(self._end_script(), self.save(limit_s), self._log_summary())
        if self.exit_code == 128 + signal.SIGTERM and self.context.run.settings.requeue and self.context.in_job:
            outlive = functools.partial(self._outlive, saved)
            await supervise.start(outlive, "the requeue of a job that Slurm ends", supervise.only_log)
        await saved
        if self._control:
            failed = self.exit_code != 0 and not self.context.run.script
            self._control.send("close", reason=self.why or "the run ended", failed=failed)
        await super().close()
        if self._child:
            await asyncio.wait([self._child.exited], timeout=_SCHEDULER_S)
        if self.context.run.shape in ("gang", "head"):
            # without a batch system the ranks die with their client, and are not restarted
            forever = self._client_gone or not self.context.in_job
            await supervise.to_thread(scheduler_file.retract, self._run_folder, forever=forever)

    async def _end_script(self) -> None:
        script = self._script
        if script is None or script.poll() is not None:
            return
        if self._stalled:  # its output, of which SIGTERM loses what Python has in a buffer, and where it waited
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended(script), _RAISES_S)
                return
        script.terminate()
        try:
            await asyncio.wait_for(ended(script), _SCRIPT_S)
        except TimeoutError:
            script.kill()
            await ended(script)

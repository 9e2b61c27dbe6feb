"""The scheduler process: distributed's Scheduler, with the handlers of hpcgpu's requests."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import math
import os
import select
import selectors
import signal
import socket
import time
import warnings
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import dask
import tornado.platform.asyncio  # noqa: F401 - asyncio's loop as tornado takes it, which all of them run
from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin
from distributed.scheduler import TaskState, heartbeat_interval

from hpcgpu.deploy import compat, network
from hpcgpu.deploy.dashboard.usage import UsagePlugin, say_summary
from hpcgpu.deploy.network.scheduler_file import Certificate, security
from hpcgpu.deploy.processes.control import Control, failure_of
from hpcgpu.deploy.processes.dashboard_http import ROUTES, serve_dashboard
from hpcgpu.deploy.processes.handshakes import limit_handshakes
from hpcgpu.deploy.processes.heartbeats import answer_by_stream
from hpcgpu.deploy.processes.leaders import LeaderConnections
from hpcgpu.deploy.processes.lease_server import LeaseServer
from hpcgpu.deploy.processes.saving import SavingScheduler, retire, save
from hpcgpu.deploy.processes.stalls import StallDetector
from hpcgpu.errors import JobError, opt
from hpcgpu.host import peer_memory, process

_HANGS_S = 55.0  # shorter than rank 0 waits: the log shows where the process hangs
# New objects between two collections: 3 times what Python up to 3.12 has; it is 2000 since 3.13.
_YOUNG = 2100
_TELL_S = 0.3  # a client's gather() must see the errors before it sees that the connection is lost
# A worker sends a heartbeat each 0.5 s, one of 4,000 each 21 s (distributed 2026.8.0). A silent one's connection may be
# open: a frozen node, a suspended job, a task that holds the GIL. distributed gives it up after 5 minutes (worker-ttl).
_SILENT_S, _MISSED = 20.0, 3
_SAMPLE = 100  # of queued tasks
_FULL = 0.6  # above this part of its memory limit more workers come, as distributed's adapt has it
_EVENTS = 16  # in a turn of the loop


class _FewEvents(selectors.EpollSelector):
    """Gives the loop few of the events that are ready, those first that wait longest: no peer waits for another.

    When 4,000 workers join at once, more than a thousand are ready in a turn; one took 1.3 s of CPU time. The kernel
    puts those that it has given behind the others. Python's selectors ask it for all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kernel = select.epoll.fromfd(os.dup(self.fileno()))

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events; called by the loop."""
        keys, events = self.get_map(), []
        for descriptor, kinds in self._kernel.poll(timeout, _EVENTS):
            if key := keys.get(descriptor):  # an error is both
                read, write = bool(kinds & ~select.EPOLLOUT), bool(kinds & ~select.EPOLLIN)
                events.append((key, key.events & (read * selectors.EVENT_READ | write * selectors.EVENT_WRITE)))
        return events


def silent(workers: Mapping[str, Any]) -> list[str]:
    """Return the addresses of workers from which no heartbeat has come for long."""
    since_s = time.time() - max(_SILENT_S, _MISSED * heartbeat_interval(len(workers)))
    return [address for address, worker in workers.items() if worker.last_seen < since_s]


def workers_for(scheduler: Scheduler, pool: str, pools: Sequence[str], nthreads: int, target_duration: float) -> int:
    """Return how many workers of ``nthreads`` a pool should have for its tasks, which name it as a resource.

    "": the cluster's own workers, for tasks that name none of ``pools``. As Scheduler.adaptive_target counts for all
    workers together (distributed 2026.8.0).
    """

    def is_mine(resources: Container[str] | None) -> bool:
        return pool in (resources or ()) if pool else not any(other in (resources or ()) for other in pools)

    def duration_s(task: TaskState) -> float:
        average = task.prefix.duration_average
        return float(average if average >= 0 else scheduler.UNKNOWN_TASK_DURATION)

    mine = [worker for worker in scheduler.workers.values() if is_mine(worker.resources)]
    waiting = [task for task in scheduler.unrunnable if is_mine(task.resource_restrictions)]
    running = [t for worker in mine for t in worker.processing if is_mine(t.resource_restrictions)]
    # tasks that wait in the scheduler's queue name no resource
    queued, some = (0, []) if pool else (len(scheduler.queued), list(islice(scheduler.queued, _SAMPLE)))
    seconds = [sum(map(duration_s, tasks)) for tasks in ((*waiting, *running), some)]
    work_s = seconds[0] + (seconds[1] * queued / len(some) if some else 0.0)
    # a few long tasks need no more than a thread each
    threads = min(len(waiting) + len(running) + queued, math.ceil(work_s / target_duration))
    count = math.ceil(threads / nthreads)
    limit, used = sum(worker.memory_limit for worker in mine), sum(worker.nbytes for worker in mine)
    if limit and used > _FULL * limit:
        count = max(count, 2 * len(mine))
    if count >= len(mine):
        return count
    idle = set(scheduler.workers_to_close())
    return max(count, sum(worker.address not in idle for worker in mine))


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSpec:
    """The scheduler process's parameters."""

    local_directory: str  # private; distributed makes a folder in it, and puts that first into sys.path
    host: str  # to listen on; empty: all addresses, for ranks of other nodes or a client outside
    port: int = 0  # 0: a free one
    protocol: str
    node_copies: bool
    certificate: Certificate | None = None
    dashboard_secret: str = field(default="", repr=False)  # first part of every URL; empty: no dashboard
    client_grace_s: float = 30.0
    stalled_s: float = 60.0
    grows: bool = False  # more jobs with workers may come
    walltime_s: int | None = None  # requested
    carbon_g_per_kwh: float | None = None
    summary: str = ""  # of the run's use at its end: lines, json (lines and JSON), or empty: none
    rank_pid: int  # of rank 0, which started it


def main(spec: SchedulerSpec, control: socket.socket) -> int:
    """Run until told to close; the entry of the forked process.

    A batch system that cancels a job signals all of its processes: rank 0 ends the run, and logs why.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    process.hide_gpus(spec.protocol)
    compat.spare_nvml()
    limit_handshakes()
    network.prepare(f"{spec.protocol}:", node_copies=spec.node_copies)
    peer_memory.allow(spec.rank_pid)  # the leader, from which the workers of its node descend
    # Of a node without a route to the Internet; ranks and clients get the addresses of its interfaces.
    warnings.filterwarnings("ignore", "Couldn't detect a suitable IP address", RuntimeWarning)
    faulthandler.dump_traceback_later(_HANGS_S, file=2)
    # A third of the collections, as by Dask's own command (distributed 2026.8.0). That one triples all three: 4,000
    # workers that join at once have collections of its middle generation hold the loop for up to 90 ms.
    _, middle, old = gc.get_threshold()
    gc.set_threshold(_YOUNG, middle, 9 * old)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_FewEvents())) as runner:
        return runner.run(_serve(spec, control))


async def _serve(spec: SchedulerSpec, sock: socket.socket) -> int:
    control = await Control.open(sock)
    try:
        scheduler = await _start(spec, control)
    except Exception as e:
        advice = f"; {opt('scheduler_port', spec.port)}: leave it out for a free port" if spec.port else ""
        control.send("error", **failure_of(e, advice))
        await control.drained()
        return 1
    finally:
        faulthandler.cancel_dump_traceback_later()
    leaders = LeaderConnections(control, grows=spec.grows)
    lease = LeaseServer(scheduler, control, spec.client_grace_s, spec.rank_pid)
    stalls = StallDetector(scheduler, control, spec.stalled_s, leaders.none_come)
    scheduler.handlers |= {
        "hpcgpu_watch": leaders.hold,
        "hpcgpu_notes": leaders.notes,
        "hpcgpu_absent": lambda: leaders.absent,
        "hpcgpu_failed": lambda text: control.send("failed", text=text),
        "hpcgpu_lease": lease.renew,
        "hpcgpu_silent": lambda: silent(scheduler.workers),
        "hpcgpu_retire": lambda workers, **options: retire(scheduler, workers, **options),
        "hpcgpu_save": lambda limit_s, workers=None: save(scheduler, limit_s, workers),
        # no partial: distributed (2026.8.0) asks for the name of the function, and closes the connection without one
        "hpcgpu_demand": lambda **facts: workers_for(scheduler, **facts),
        "subscribe_worker_status": stalls.subscribe,
    }
    ports = {"port": scheduler.port, "dashboard_port": scheduler.http_server.port}
    control.send("started", address=scheduler.address, hosts=compat.bound_hosts(scheduler) or [spec.host], **ports)
    async for message in control.messages():
        if message["op"] == "lease":  # from now on a client outside must send signs of life
            lease.watch(detached=message["detached"])
        elif message["op"] == "note":
            leaders.late.append((message["node"], message["text"]))
        elif message["op"] == "grant":
            await leaders.tell({"granted_s": message["left_s"]})
        elif message["op"] == "event":
            scheduler.log_event("hpcgpu", message["facts"])
        elif message["op"] == "summary":
            await say_summary(scheduler, spec.summary)
            control.send("summarised")
        elif message["op"] == "close":
            lease.close()
            stalls.close()
            if message["failed"]:
                await scheduler.fail(JobError(f"the job ended: {message['reason']}"))
            await leaders.dismiss()
            await scheduler.close(reason=message["reason"])
            return 0
    os._exit(1)  # rank 0 is gone


async def _start(spec: SchedulerSpec, control: Control) -> EndingScheduler:
    place = {"host": spec.host, "port": spec.port, "protocol": spec.protocol, "local_directory": spec.local_directory}
    http = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}  # its pages come with the first request
    with dask.config.set({ROUTES: [m for m in dask.config.get(ROUTES) if not m.startswith("distributed.")]}):
        scheduler = EndingScheduler(security=security(spec.certificate), **place, **http)
    compat.share_versions(scheduler)
    answer_by_stream(scheduler)
    UsagePlugin.attach(scheduler, spec.walltime_s, spec.carbon_g_per_kwh)
    serve_dashboard(scheduler, spec.dashboard_secret)
    await scheduler
    scheduler.add_plugin(WorkerCount(control), name="hpcgpu-report")
    return scheduler


class EndingScheduler(SavingScheduler):
    """A Scheduler whose clients get the reason of its end, those that wait for a value, too."""

    def __init__(self, **options: Any) -> None:
        self._end: asyncio.Future[JobError] = asyncio.get_running_loop().create_future()
        super().__init__(**options)

    async def fail(self, error: JobError) -> None:
        """End all futures, and all waiting for values, with this error; return when clients have had time to see it."""
        compat.fail_futures(self, error)
        self._end.set_result(error)
        await asyncio.sleep(_TELL_S)

    async def gather(self, *args: Any, **options: Any) -> Any:
        """Return values of workers, or raise the reason of the end; called by clients.

        Without an answer they raise CommClosedError, whatever their futures have got (distributed 2026.8.0).
        """
        gathering = asyncio.ensure_future(super().gather(*args, **options))
        try:
            await asyncio.wait([gathering, self._end], return_when=asyncio.FIRST_COMPLETED)
            if self._end.done():
                raise self._end.result()
            return gathering.result()
        finally:
            gathering.cancel()


class WorkerCount(SchedulerPlugin):
    """Tells rank 0 the number of registered workers."""

    def __init__(self, control: Control) -> None:
        self.control = control

    def add_worker(self, scheduler: Scheduler, worker: str, **_: object) -> None:
        """Report; called by distributed when a worker has registered."""
        self.control.send("workers", count=len(scheduler.workers))

    remove_worker = add_worker  # called by distributed when a worker is gone

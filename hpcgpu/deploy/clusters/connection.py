"""A cluster's connection to its scheduler: made, held by the lease, lost, and found again."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from dask.utils import parse_timedelta
from distributed.core import Status

from hpcgpu.deploy.clusters.lifecycle import LifecycleCluster
from hpcgpu.deploy.clusters.progress import Progress
from hpcgpu.deploy.clusters.way import Way
from hpcgpu.deploy.jobs.job import Job
from hpcgpu.deploy.network.contact import Contact
from hpcgpu.deploy.network.lease import Holder
from hpcgpu.deploy.network.lease_file import is_detached
from hpcgpu.errors import ConfigError, HpcGpuError, JobError
from hpcgpu.model import Patience, Settings
from hpcgpu.plan.jobs.phase import End, JobView, note_lines, summary_line
from hpcgpu.spill.store.dask import register
from hpcgpu.supervise import tasks
from hpcgpu.supervise.rounds import reason_of


class ConnectedCluster(LifecycleCluster):
    """distributed's Cluster for a scheduler in a job: the job may be requeued, the network may fail for a while."""

    settings: Settings
    # Where the job may have to wait, people want to see it.
    waits_in_queue: ClassVar[bool] = True
    patience: ClassVar[Patience] = Patience()

    def __init__(self, settings: Settings, *, asynchronous: bool, loop: Any, quiet: bool) -> None:  # noqa: ANN401
        self.settings = settings
        register()  # a client of this process can scatter arrays of CuPy: distributed's own way needs numba
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=quiet, name=settings.job_name)
        self._job: Job | None = None
        self._folder: Path | None = None
        self._way: Way | None = None
        self._progress = Progress(self._cluster_manager_logs, quiet or not self.waits_in_queue)
        self._holder: Holder | None = None
        self._noted: set[str] = set()
        self._returning: tasks.Loop | None = None
        self._changed = asyncio.Event()
        self._watch_worker_status_comm: Any = None  # distributed's: where the scheduler tells of its workers

    @property
    def job_id(self) -> str:
        """The batch system's id of the job; empty before it is submitted."""
        return self._job.id if self._job else ""

    @property
    def _expected(self) -> int:
        """Workers of the job that has the scheduler; 0: not known."""
        return 0

    async def _connect(self) -> None:
        """Wait for the scheduler of this cluster's job, and hold its lease."""
        assert self._folder
        assert self._job
        way = self._way = Way(
            self._folder, self._job, self._expected, self._progress, self.patience, self.settings.python or ""
        )
        self._use(await way.open(), way)

    async def _show_ready(self) -> None:
        self._first_workers = len(self.scheduler_info["workers"])
        await self._show_notes()
        for line in (self._ready_line(), self._dashboard_way):
            if line:
                self._progress.show(line)
                self._progress.end()

    async def _show_notes(self) -> None:
        """Say what people should know of the nodes, each text once."""
        try:
            said = await self.scheduler_comm.hpcgpu_notes()
        except OSError:  # the connection has just broken: that is told elsewhere
            return
        notes = [(node, text) for node, text in said if text not in self._noted]
        self._noted.update(text for _, text in notes)
        for line in [] if self.quiet else note_lines(notes):
            self._warn(line)

    def _ready_line(self) -> str:
        return self._line(len(self.scheduler_info["workers"]))

    @property
    def _dashboard_way(self) -> str:
        """How people come to the dashboard, without its secret; empty where there is none."""
        facts = self._contact
        if facts is None or not facts.dashboard_secret:
            return ""
        port = facts.dashboard_port
        return (
            f"dashboard: ssh -N -L {port}:127.0.0.1:{port} {facts.node} (from outside with -J LOGIN_NODE), "
            "then open what cluster.dashboard_url() returns"
        )

    @property
    def dashboard_link(self) -> str:
        """Empty, since distributed prints it and the address holds a secret; see :meth:`dashboard_url`."""
        return ""

    def dashboard_url(self) -> str:
        """Return the dashboard's address on the loopback of the scheduler's node; it holds a secret.

        Raises
        ------
        ConfigError
            The cluster has no dashboard.
        JobError
            It is lost or closed.

        """
        self._must_run()
        if not self._dashboard_way:
            raise ConfigError(f"this cluster has no dashboard: {self.settings.said('dashboard')}")
        assert self._contact
        return f"http://127.0.0.1:{self._contact.dashboard_port}/{self._contact.dashboard_secret}/status"

    def wait_for_workers(self, n_workers: int, timeout: float | str | None = None) -> Any:  # noqa: ANN401
        """Wait until so many workers are there, and show what their jobs do meanwhile.

        Raises
        ------
        JobError, SubmitError
            They will not come: the reason, and the end of the last job's log.
        TimeoutError
            They have not come within ``timeout`` seconds; the message says what their jobs do.

        """
        self._must_run()
        return self.sync(self._wait_for_workers, n_workers, timeout)

    async def _wait_for_workers(self, n_workers: int = 0, timeout: float | str | None = None) -> None:
        progress, limit_s = self._progress, parse_timedelta(timeout)
        try:
            async with asyncio.timeout(limit_s):
                while len(self.scheduler_info["workers"]) < n_workers:
                    self._must_run()
                    if error := self._given_up:
                        raise error
                    progress.show(self._line(n_workers))
                    self._changed.clear()
                    await self._changed.wait()
            await self._show_notes()
            progress.show(self._line(n_workers))
        except TimeoutError:
            raise TimeoutError(f"not {n_workers} workers within {limit_s:g} s: {self._line(n_workers)}") from None
        finally:
            progress.end()

    @property
    def _given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None when they may."""
        trouble = self._returning.trouble if self._returning else ""
        return JobError(trouble) if trouble else None

    def _line(self, wanted: int) -> str:
        """Return one line for the whole cluster."""
        workers = self.scheduler_info["workers"].values()
        return summary_line(self._views(), len(workers), wanted, len({facts["host"] for facts in workers}))

    def _views(self) -> Sequence[JobView]:
        """Return what people see of the jobs that have workers."""
        return ()

    def _update_worker_status(self, op: str, msg: Any) -> None:  # noqa: ANN401
        if self._end:
            return
        if op == "stalled":
            self.scheduler_info["stalled"] = msg
            self._warn(msg or "tasks go on again")
        else:
            super()._update_worker_status(op, msg)
        self._changed.set()

    def _use(self, scheduler: Any, way: Way) -> None:  # noqa: ANN401
        assert self._folder
        self.scheduler_comm, self._security = scheduler, way.security
        if self._holder:
            self._holder.stop()
        self._holder = Holder(
            scheduler, self.settings.client_grace_s, self._lose, functools.partial(is_detached, self._folder)
        )

    @property
    def _contact(self) -> Contact | None:
        return self._way.contact if self._way else None

    async def _watch_worker_status(self, comm: Any) -> None:  # noqa: ANN401
        reason = "the scheduler closed the connection"
        try:
            await super()._watch_worker_status(comm)
        except Exception as e:  # distributed has logged it; from then on the workers known here would be those of then
            reason = f"what the scheduler says of its workers was not understood: {reason_of(e)}"
            comm.abort()
        if self.status == Status.running and comm is self._watch_worker_status_comm:
            self._lose(reason)

    def _lose(self, reason: str) -> None:
        """Look for the scheduler again; called whenever it seems to be gone."""
        self._trouble = reason
        if self._returning is None or self._returning.done():
            assert self._contact
            return_ = functools.partial(self._return, reason, self._contact, self._dashboard_way)
            what = "the search for this cluster's scheduler"
            self._returning = tasks.keep(return_, what, changed=self._changed.set)

    async def _return(self, reason: str, before: Contact, way_before: str) -> bool:
        """Take the scheduler up again, that of the job's next life too; say so, or why the cluster is lost.

        Returns whether either is so; else it is to be tried again.
        """
        way = self._way
        assert way
        try:
            await self._start_again(await way.reopen(self._warn), way)
        except HpcGpuError as e:
            if isinstance(e, JobError) and self._holder:
                self._holder.stop()
                self._holder = None  # there is nobody to say goodbye to
            self._lost(str(e))
            return True
        except OSError as e:
            if self._folder is None or not self._folder.exists():
                self._lost(f"{reason}; its folder is gone: somebody has stopped it")
                return True
            self._warn(f"the scheduler has answered and is gone again: {e}")
            await asyncio.sleep(self.patience.ask_s)
            return False
        self._trouble = ""
        again = "the cluster is back; make a new Client(cluster) if yours has closed"
        if way.contact and way.contact.restart_count > before.restart_count:
            again = f"job {self.job_id} was requeued; its results are lost, {again}"
        self._warn(again)
        if self._dashboard_way and self._dashboard_way != way_before:
            self._warn(self._dashboard_way)
        return True

    def _lost(self, why: str) -> None:
        """Say that there is no scheduler any more, and have nobody wait for it."""
        self._over(End.LOST, f"lost: {why}")
        self.status = Status.failed
        if self._adaptive:
            self._adaptive.stop()
        self._changed.set()
        self._warn(f"the cluster is lost: {why}")

    async def _start_again(self, scheduler: Any, way: Way) -> None:  # noqa: ANN401
        """Do what distributed's cluster did at its start, with another connection."""
        old, comm = self.scheduler_comm, self._watch_worker_status_comm
        self._watch_worker_status_comm = None  # its end is no news any more
        if comm:
            await comm.close()
        if self._sync_cluster_info_task:
            self._sync_cluster_info_task.cancel()
        self._use(scheduler, way)
        await super()._start()
        await old.close_rpc()

    def _log(self, log: str) -> None:
        """Say something where distributed's clusters print it."""
        if not self.quiet:
            self._progress.say(log)

    def _warn(self, what: str) -> None:
        """Say something also where quiet is wanted."""
        self._progress.say(what)

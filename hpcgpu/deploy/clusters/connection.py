"""A cluster's connection to its scheduler: made, held by the lease, lost, and found again."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path
from typing import Any, ClassVar

from distributed.core import Status
from distributed.deploy.cluster import Cluster

from hpcgpu.deploy.clusters.progress import Progress
from hpcgpu.deploy.clusters.way import ASK_S, Way
from hpcgpu.deploy.jobs.job import Job
from hpcgpu.deploy.network.contact import Contact
from hpcgpu.deploy.network.lease import Holder
from hpcgpu.deploy.network.lease_file import is_detached
from hpcgpu.deploy.network.trust import security
from hpcgpu.errors import HpcGpuError, JobError
from hpcgpu.host import log
from hpcgpu.model import Settings
from hpcgpu.plan.phase import note_lines, summary_line
from hpcgpu.spill.dask import register


class ConnectedCluster(Cluster):
    """distributed's Cluster for a scheduler in a job: the job may be requeued, the network may fail for a while."""

    settings: Settings
    # Where the job may have to wait, people want to see it.
    waits_in_queue: ClassVar[bool] = True

    def __init__(self, settings: Settings, *, asynchronous: bool, loop: Any, quiet: bool) -> None:  # noqa: ANN401
        self.settings = settings
        register()  # a client of this process can scatter arrays of CuPy: distributed's own way needs numba
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=quiet, name=settings.job_name)
        self.security = security(None)
        self._job: Job | None = None
        self._folder: Path | None = None
        self._way: Way | None = None
        self._progress = Progress(self._log, quiet or not self.waits_in_queue)
        self._holder: Holder | None = None
        self._noted: set[str] = set()
        self._returning: asyncio.Task[None] | None = None
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
        way = self._way = Way(self._folder, self._job, self._expected, self._progress, self.settings.python or "")
        self._use(await way.open(), way)

    async def _show_ready(self) -> None:
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
            self._progress.end()
            self._warn(line)

    def _ready_line(self) -> str:
        workers = self.scheduler_info["workers"]
        nodes = len({facts["host"] for facts in workers.values()})
        return summary_line((), len(workers), len(workers), nodes)

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

    def _use(self, scheduler: Any, way: Way) -> None:  # noqa: ANN401
        assert self._folder
        self.scheduler_comm, self.security = scheduler, way.security
        if self._holder:
            self._holder.stop()
        self._holder = Holder(
            scheduler, self.settings.client_grace_s, self._lose, functools.partial(is_detached, self._folder)
        )

    @property
    def _contact(self) -> Contact | None:
        return self._way.contact if self._way else None

    async def _watch_worker_status(self, comm: Any) -> None:  # noqa: ANN401
        await super()._watch_worker_status(comm)
        if self.status == Status.running and comm is self._watch_worker_status_comm:
            self._lose("the scheduler closed the connection")

    def _lose(self, reason: str) -> None:
        """Look for the scheduler again; called whenever it seems to be gone."""
        if self._returning is None or self._returning.done():
            self._returning = asyncio.create_task(self._return(reason))

    async def _return(self, reason: str) -> None:
        """Take the scheduler up again, that of the job's next life too; say so, or why the cluster is lost."""
        way, before, way_before = self._way, self._contact, self._dashboard_way
        assert way
        assert before
        while True:
            try:
                await self._start_again(await way.reopen(self._warn), way)
                break
            except HpcGpuError as e:
                self._warn(f"the cluster is lost: {e}")
                if isinstance(e, JobError) and self._holder:
                    self._holder.stop()
                    self._holder = None  # there is nobody to say goodbye to
                return
            except OSError as e:
                if self._folder is None or not self._folder.exists():
                    self._warn(f"the cluster is lost: {reason}; its folder is gone: somebody has stopped it")
                    return
                self._warn(f"the scheduler has answered and is gone again: {e}")
            await asyncio.sleep(ASK_S)
        again = "the cluster is back; make a new Client(cluster) if yours has closed"
        if way.contact and way.contact.restart_count > before.restart_count:
            again = f"job {self.job_id} was requeued; its results are lost, {again}"
        self._warn(again)
        if self._dashboard_way and self._dashboard_way != way_before:
            self._warn(self._dashboard_way)

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

    def _warn(self, what: str) -> None:
        log.say(what)

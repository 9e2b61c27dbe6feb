"""The cluster in Python: has its job started, finds the scheduler, holds the lease, ends the job."""

from __future__ import annotations

import asyncio
import inspect
import shlex
import shutil
import sys
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from distributed import Client
from distributed.core import Status, rpc
from distributed.deploy.cluster import Cluster

from hpcgpu.deploy import contact as contacts
from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.contact import Contact
from hpcgpu.deploy.job import Job
from hpcgpu.deploy.lease import Holder
from hpcgpu.deploy.memory import memory, trim_memory
from hpcgpu.deploy.reach import reach
from hpcgpu.deploy.report import bindings
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.trust import security
from hpcgpu.deploy.tunnel import Tunnel
from hpcgpu.errors import ConfigError, HpcGpuError, LaunchError
from hpcgpu.model import RunDocument
from hpcgpu.model.settings import options, user_name

_POLL_S = 0.1
# A batch system serves everybody: it is asked every few seconds, the contact file all the time.
_ASK_S = 2.0
_REACH_S = 10.0


class GPUCluster(Cluster):
    """A scheduler on rank 0 and one bound, spilling worker per GPU, started as one job.

    Parameters
    ----------
    asynchronous : bool
        True inside a running event loop: ``async with``, or ``await`` the object.
    loop : IOLoop, optional
        As of distributed's clusters.
    quiet : bool
        Print nothing while waiting.
    **given
        The options of :class:`hpcgpu.model.Settings`; ``hpcgpu run --help`` lists them.

    Raises
    ------
    ConfigError
        An option is wrong; nothing has been submitted.
    SubmitError
        The batch system refused the job, in its own words.
    JobError
        The job ended before its workers were there, with the tail of its log.

    """

    _supports_scaling = False

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        """Give the class a signature with every option, for help() and completion."""
        super().__init_subclass__(**kwargs)
        own = [p for p in inspect.signature(cls.__init__).parameters.values() if p.kind is p.KEYWORD_ONLY]
        given = [inspect.Parameter(user_name(f), inspect.Parameter.KEYWORD_ONLY, default=None) for f in options()]
        cls.__signature__ = inspect.Signature([*given, *own])

    def __init__(self, *, asynchronous: bool = False, loop: Any = None, quiet: bool = False, **given: Any) -> None:  # noqa: ANN401
        self._wanted = self._read(given)
        self.settings = self._wanted.settings
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=quiet, name=self.settings.job_name)
        self.security = security(None)
        self._job: Job | None = None
        self._contact: Contact | None = None
        self._holder: Holder | None = None
        self._folder: Path | None = None
        self._tunnel: Tunnel | None = None
        self._lost_said = False
        if not self.asynchronous:
            self._loop_runner.start()
            self.sync(self._start)

    def _read(self, given: dict[str, Any]) -> Wanted:
        return wanted_settings.read(given, f"keyword {{name}} of {type(self).__name__}")

    @abstractmethod
    def _make_job(self, run: RunDocument, folder: Path) -> Job:
        """Return the job that runs the document; nothing has been started."""

    @property
    def job_id(self) -> str:
        """The batch system's id of the job; empty before it is submitted."""
        return self._job.id if self._job else ""

    def job_script(self) -> str:
        """Return what was submitted."""
        return self._job.script if self._job else ""

    def explain(self) -> str:
        """Return the settings with where each was set, what was submitted, and the way to the dashboard."""
        text = f"{wanted_settings.explain(self.settings)}\n{self.job_script()}"
        if facts := self._contact:
            text += (
                f"\nscheduler of job {self.job_id or '-'} on {facts.node}; for the dashboard, on your own machine: "
                f"ssh -N -L {facts.dashboard_port}:127.0.0.1:{facts.dashboard_port} {facts.node}, "
                "then open what cluster.dashboard_url() returns (it holds a secret)\n"
            )
        return text

    def bindings(self) -> Any:  # noqa: ANN401 - a coroutine of an asynchronous cluster
        """Return what each worker is tied to, planned and actual: read back from the kernel, for all threads.

        Returns
        -------
        hpcgpu.deploy.report.Bindings
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        return self.sync(self._ask, bindings)

    def memory(self) -> Any:  # noqa: ANN401
        """Return the memory of each worker now: device, host, what is spilled, and what has been moved how fast.

        Returns
        -------
        hpcgpu.deploy.memory.Memory
            It prints as a table; an awaitable of it where the cluster is asynchronous.

        """
        return self.sync(self._ask, memory)

    def trim_memory(self) -> Any:  # noqa: ANN401
        """Have all workers give free memory back to the kernel; see :func:`hpcgpu.trim_memory`.

        Returns
        -------
        dict of str to int
            Bytes given back, by worker; an awaitable of it where the cluster is asynchronous.

        """
        return self.sync(self._ask, trim_memory)

    async def _ask(self, question: Callable[[Client], Any]) -> Any:  # noqa: ANN401
        async with Client(self, asynchronous=True, set_as_default=False) as client:
            return await question(client)

    @property
    def dashboard_link(self) -> str:
        """Empty, since distributed prints it and the address holds a secret; see :meth:`dashboard_url`."""
        return ""

    def dashboard_url(self) -> str:
        """Return the dashboard's address on the loopback of the scheduler's node; it holds a secret.

        Raises
        ------
        ConfigError
            The cluster has no dashboard, or is not running.

        """
        if self._contact is None or not self._contact.dashboard_secret:
            raise ConfigError("this cluster has no dashboard (dashboard=False), or it does not run")
        return f"http://127.0.0.1:{self._contact.dashboard_port}/{self._contact.dashboard_secret}/status"

    def scale(self, n: int | None = None, **_: Any) -> None:  # noqa: ANN401
        """Refuse: the job has the size with which it was submitted."""
        raise ConfigError(
            f"this cluster is one job of fixed size (nodes={self.settings.nodes}): start another with nodes=…; "
            "clusters that grow and shrink come with a later version"
        )

    def adapt(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
        """Refuse: see :meth:`scale`."""
        self.scale()

    def __await__(self) -> Any:  # noqa: ANN401
        async def started() -> Self:
            if self.status == Status.created:
                await self._start()
            return self

        return started().__await__()

    async def _start(self) -> None:
        self.status = Status.starting
        try:
            await self._start_job()
            await super()._start()
        except BaseException:
            await self._close()
            raise

    async def _start_job(self) -> None:
        folder = self._folder = contacts.make_folder(Path.home() / ".hpcgpu" / "runs")
        run = RunDocument(settings=self.settings, shape="gang", meeting=str(folder))
        self._job = await asyncio.to_thread(self._make_job, run, folder)  # it may look for launchers
        await self._job.submit()
        self._contact = await self._wait_for_contact(self._job, folder)
        self.security = security(self._contact.certificate)
        address = await self._find_way(self._job, self._contact)
        self.scheduler_comm = rpc(address, connection_args=self.security.get_connection_args("client"))
        self._holder = Holder(self.scheduler_comm, self.settings.client_grace_s, self._lost)

    async def _wait_for_contact(self, job: Job, folder: Path) -> Contact:
        loop = asyncio.get_running_loop()
        asked = loop.time()
        while (found := contacts.read(folder)) is None:
            if loop.time() - asked >= _ASK_S:
                await job.check()
                asked = loop.time()
            await asyncio.sleep(_POLL_S)
        return found

    async def _find_way(self, job: Job, facts: Contact) -> str:
        """Return an address of the scheduler that answers: its own, or that of a tunnel through the batch system."""
        try:
            return (await reach(facts.addresses, self.security, _REACH_S, "client")).address
        except LaunchError as e:
            direct = e
        protocol, _, place = facts.addresses[0].partition("://")
        python = self.settings.python or sys.executable
        argv = job.onto(facts.node, (python, "-m", "hpcgpu.host.relay", place.rpartition(":")[2]))
        self._tunnel = await Tunnel.open(argv)
        try:
            return (await reach([f"{protocol}://{self._tunnel.address}"], self.security, _REACH_S, "client")).address
        except LaunchError as e:
            why = await self._tunnel.failure() or str(e)
            raise LaunchError(
                f"{direct}; nor through '{shlex.join(argv)}': {why}. "
                "Start this script on a node that reaches the compute nodes, or run it in the job: hpcgpu launch"
            ) from e

    async def _watch_worker_status(self, comm: Any) -> None:  # noqa: ANN401
        await super()._watch_worker_status(comm)
        if self.status == Status.running:
            await self._lost("the scheduler closed the connection")

    async def _lost(self, reason: str) -> None:
        """Say, once, why the scheduler is gone; the batch system may need a moment to know."""
        if self._lost_said or self._job is None:
            return
        self._lost_said = True
        loop = asyncio.get_running_loop()
        end = loop.time() + _ASK_S * 8
        while loop.time() < end and self.status == Status.running:
            try:
                await self._job.check()
            except HpcGpuError as e:
                reason = str(e)
                break
            await asyncio.sleep(_ASK_S)
        print(f"hpcgpu: the cluster is lost: {reason}", file=sys.stderr, flush=True)

    async def _close(self) -> None:
        if self.status == Status.closed:
            return
        if self._holder:
            await self._holder.goodbye()
        await super()._close()
        if self._tunnel:
            await self._tunnel.close()
        if self._job:
            await self._job.end()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

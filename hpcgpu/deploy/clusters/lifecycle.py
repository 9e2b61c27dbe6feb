"""distributed's Cluster that says what has become of it: not started, not connected, lost, detached, closed."""

from __future__ import annotations

import asyncio
import html
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from distributed.core import Status
from distributed.deploy.cluster import Cluster
from distributed.security import Security
from distributed.utils import Log, Logs

from hpcgpu.deploy.network.trust import security
from hpcgpu.errors import ConfigError, JobError
from hpcgpu.plan.jobs.phase import End

_COUNTS = ("n_workers", "total_threads", "total_memory")


class LifecycleCluster(Cluster):
    """What is asked of it when there is no scheduler behind it is answered by what is true, or by an error at once."""

    scheduler_info: Any  # distributed's
    _end: End | None = None
    _end_words = ""
    _trouble = ""
    _first_workers = 0  # those that were there when it was ready

    def __init__(self, *, asynchronous: bool, loop: Any, quiet: bool, name: str) -> None:  # noqa: ANN401
        if asynchronous and loop is None and not _in_event_loop():
            raise ConfigError(
                f"asynchronous=True outside of an event loop: leave it out, or write 'cluster = await "
                f"{type(self).__name__}(asynchronous=True, ...)' in a coroutine"
            )
        super().__init__(asynchronous=asynchronous, loop=loop, quiet=quiet, name=name)
        self._security = security(None)
        self._calls: set[asyncio.Future[Any]] = set()

    @property
    def security(self) -> Security:
        """For connections to the scheduler: its certificate, and the key to it.

        Raises
        ------
        ConfigError
            The cluster has not been started; a client that is made of it now could never connect.
        JobError
            It is lost or closed.

        """
        self._must_run()
        return self._security

    @property
    def scheduler_address(self) -> str:
        """Where the scheduler is, as distributed writes it."""
        return "<Not Connected>" if self._end else str(super().scheduler_address)

    @property
    def wanted_workers(self) -> int:
        """How many workers the cluster is to have."""
        return self._first_workers

    @property
    def _requested_workers(self) -> int:
        """Of these, how many are of jobs that have been submitted."""
        return self.wanted_workers

    @property
    def plan(self) -> set[str]:
        """As of distributed's clusters: the workers that are wanted; those that are not there yet have no names."""
        return self._named(self.wanted_workers)

    @property
    def requested(self) -> set[str]:
        """As of distributed's clusters: of :attr:`plan`, those whose jobs have been submitted."""
        return self._named(self._requested_workers)

    def _named(self, count: int) -> set[str]:
        there = {str(name) for name in self.observed}
        away = 0 if self._end else count - len(there)
        return there | {f"not there yet, {i}" for i in range(1, away + 1)}

    def sync(self, func: Callable[..., Any], *args: Any, **options: Any) -> Any:  # noqa: ANN401
        """Call a coroutine function. In an asynchronous cluster it begins at once, whether or not it is awaited."""
        result = super().sync(func, *args, **options)
        if not inspect.iscoroutine(result):
            return result
        call = asyncio.ensure_future(result)
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    def __repr__(self) -> str:
        if state := self._state:
            return f"{self._cluster_class_name}({self.name}, {_first_line(state)})"
        return str(super().__repr__())

    def _repr_html_(self, cluster_status: str | None = None) -> str:
        state = html.escape(_first_line(self._state or self.status.name))
        row = f'<tr><td style="text-align: left;"><strong>Status:</strong> {state}</td><td></td></tr>'
        return str(super()._repr_html_(cluster_status=f"{row}{cluster_status or ''}"))

    def __del__(self, _warn: Callable[..., None] = warnings.warn) -> None:
        if getattr(self, "status", None) == Status.created:
            what = f"{type(self).__name__} was never awaited: nothing has been started; cluster = await ..."
            _warn(what, RuntimeWarning, source=self)
        else:
            super().__del__(_warn)

    @property
    def _state(self) -> str:
        """What people are told of a cluster that cannot be used now, or is of no use; empty of another."""
        if self._end:
            return self._end_words
        if self.status == Status.created:
            return "not started: await it"
        if self.status == Status.running:
            return f"not connected: {self._trouble}" if self._trouble else self._stalled
        return str(self.status.name)

    @property
    def _stalled(self) -> str:
        """Why no task goes on; empty when one does. The status stays: distributed's own loops end where it changes."""
        reason = self.scheduler_info.get("stalled") if self.status == Status.running and not self._trouble else ""
        return f"stalled: {reason}" if reason else ""

    def _must_run(self) -> None:
        """Raise unless the scheduler is there, or looked for."""
        if self._end or self.status == Status.closing:
            raise JobError(f"this {type(self).__name__} is {self._state}")
        if self.status in (Status.created, Status.starting):
            raise ConfigError(
                f"this {type(self).__name__} has not started yet: it is asynchronous, so write 'cluster = await "
                f"{type(self).__name__}(...)', or 'async with', before you use it"
            )

    def _over(self, end: End, words: str) -> None:
        """Be without a scheduler, and so without workers, from now on."""
        self._end, self._end_words, self._trouble = end, words, ""
        info = self.scheduler_info
        self.scheduler_info = type(info)({**info, **{n: 0 for n in _COUNTS if n in info}, "workers": {}})

    def get_logs(self, cluster: bool = True, scheduler: bool = True, workers: Any = True) -> Any:  # noqa: ANN401
        """Return what was said by the cluster, the scheduler and the workers; of one that has ended, by the cluster."""
        if self._end and not self.asynchronous:  # the thread of its event loop may have ended, too
            said = "\n".join(line for _, line in self._cluster_manager_logs)
            return Logs({"Cluster": Log(said)} if cluster else {})
        return super().get_logs(cluster, scheduler, workers)

    async def _get_logs(self, cluster: bool = True, scheduler: bool = True, workers: Any = True) -> Any:  # noqa: ANN401
        if self.status != Status.running:  # what was said here is there all the same
            scheduler = workers = False
        return await super()._get_logs(cluster, scheduler, workers)


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _first_line(text: str) -> str:
    return text.partition("\n")[0].rstrip(":")

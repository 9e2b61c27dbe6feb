"""Scale, adapt and count the jobs that come and go, for one cluster object; translate the arguments to workers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import pickle
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from distributed.deploy.adaptive import Adaptive

from hpcgpu.deploy.cluster.run import SchedulerView
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.errors import ConfigError, HpcGpuError, JobError
from hpcgpu.model import Settings
from hpcgpu.model.backoff import Backoff
from hpcgpu.plan.jobs.request import workers_for
from hpcgpu.supervise import tasks
from hpcgpu.supervise.failure_log import FailureLog
from hpcgpu.units import parse_bytes

# distributed adapts each second, and removes workers after three: a job that had queued for an hour would be lost.
INTERVAL = "5s"
WAIT_COUNT = 12

_ALLOWED = "give one of them, 0 or more: n workers, jobs, or cores and memory of all workers together"
_LOOK_S = 5.0
_AGAIN_S = 0.5


class Scaler:
    """Scales the jobs that come and go, or lets the object scale them that controls them (processes.clients).

    On the event loop's thread only; properties may be read by any thread.
    """

    def __init__(self, fleet: Fleet, view: SchedulerView) -> None:
        self._fleet, self._scheduler, self._changed = fleet, view.scheduler, view.changed
        self._monitor = HeartbeatMonitor(view.scheduler, fleet.workers_changed)
        view.silent = lambda: self._monitor.silent
        self._comm: Any = None  # to the scheduler, which decides which object controls; without it no object does
        self._is_known = False
        self._news = asyncio.Event()
        self._answers = tasks.Group()
        name = "the connection that tells which object controls this cluster's jobs"
        self._holding = tasks.run_forever(self._hold, name, changed=self._lose)

    @property
    def expected(self) -> int:
        """The number of workers of each job."""
        return self._fleet.expected

    @property
    def wanted_workers(self) -> int:
        """The number of workers of all wanted jobs."""
        return self._fleet.target * self._fleet.expected

    @property
    def requested_workers(self) -> int:
        """The number of workers of all submitted jobs."""
        return len(self._fleet.members) * self._fleet.expected

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None if they may."""
        trouble = self._fleet.trouble or self._trouble
        return self._fleet.error or (JobError(trouble) if trouble else None)

    @property
    def _trouble(self) -> str:
        """Why the controlling object is unknown; "" if it is known."""
        return "" if self._is_known else self._holding.trouble

    def jobs_for(self, workers: int) -> int:
        """Return the number of jobs that have ``workers`` together."""
        return max(0, math.ceil(workers / self._fleet.expected))

    async def started(self) -> None:
        """Wait until the controlling object is known; raise JobError if the connection does not work."""
        while not self._is_known:
            if self._trouble:
                raise JobError(self._trouble)
            self._news.clear()
            await self._news.wait()

    async def scale(self, jobs: int, *, adapting: bool = False) -> None:
        """Set the number of jobs, here or in the controlling object; return after the necessary submissions.

        Raises SubmitError in the batch system's words.
        """
        await self.started()
        if not self._fleet.controls:
            await self._scheduler().hpcgpu_scale(jobs=jobs, adapting=adapting)
            return
        try:
            await self._fleet.scale(jobs, adapting=adapting)
        finally:
            with contextlib.suppress(OSError):  # _hear() sends it to the next scheduler
                await self._comm.write({"op": "wanted", "jobs": self._fleet.target})

    def stop(self) -> None:
        """Stop, and leave the jobs to other objects."""
        self._holding.cancel()
        self._answers.cancel()
        if self._comm:
            self._comm.abort()
        self._monitor.stop()
        self._fleet.stop()

    async def close(self) -> None:
        """Cancel all jobs; raise as :meth:`Fleet.close`."""
        await self._fleet.close()

    def _lose(self) -> None:
        """Forget the controlling object and drop the connection."""
        self._is_known = self._fleet.controls = False
        if self._comm:
            self._comm.abort()
        self._news.set()
        self._changed()

    async def _hold(self) -> None:
        """Read the scheduler's messages until the connection ends."""
        with contextlib.suppress(OSError):
            self._comm = await self._scheduler().live_comm()
            await self._comm.write({"op": "hpcgpu_controller"})
            while True:
                await self._hear(await self._comm.read())
        self._lose()
        await asyncio.sleep(_AGAIN_S)

    async def _hear(self, message: dict[str, Any]) -> None:
        if message["op"] == "scale":
            answer = functools.partial(self._answer, message["number"], message["jobs"], message["adapting"])
            # the asking object waits for an answer: the scheduler gives one when the connection ends
            self._answers.start(answer, "the answer to the object that scales this cluster", lambda _: self._lose())
            return
        await self._fleet.take(message["wanted"], controls=message["op"] == "control")
        self._is_known = True
        self._news.set()
        if self._fleet.controls and message["wanted"] is None:
            await self._comm.write({"op": "wanted", "jobs": self._fleet.target})

    async def _answer(self, number: int, jobs: int, adapting: bool) -> None:
        error = b""
        try:
            await self.scale(jobs, adapting=adapting)
        except Exception as e:  # the asking object waits for an answer, even an error
            error = pickle.dumps(e if isinstance(e, HpcGpuError) else JobError(f"the jobs could not be scaled: {e!r}"))
        with contextlib.suppress(OSError):
            await self._comm.write({"op": "scaled", "number": number, "error": error})


class HeartbeatMonitor:
    """Asks the scheduler which workers are silent, until it is stopped; ``changed`` is called when that changes."""

    def __init__(self, scheduler: Callable[[], Any], changed: Callable[[], None], every_s: float = _LOOK_S) -> None:
        self.silent = frozenset[str]()  # addresses
        self._scheduler, self._changed, self._every_s = scheduler, changed, every_s
        self._listening = tasks.run_forever(self._listen, "the search for workers that have fallen silent")

    async def _listen(self) -> None:
        await asyncio.sleep(self._every_s)
        try:
            silent = frozenset(await self._scheduler().hpcgpu_silent())
        except OSError:
            return  # the cluster object searches its scheduler
        if silent != self.silent:
            self.silent = silent
            self._changed()

    def stop(self) -> None:
        """Stop asking."""
        self._listening.cancel()


def check_scale(n: object, jobs: object, cores: object, memory: object) -> None:
    """Raise ConfigError unless the size is given in exactly one way, with a possible number."""
    ways = [w for w in (n, jobs, memory if cores is None else cores) if w is not None]
    counts = [w for w in (n, jobs) if w is not None]
    if len(ways) != 1 or any(not isinstance(c, Integral) or isinstance(c, bool) or c < 0 for c in counts):
        arguments = {"n": n, "jobs": jobs, "cores": cores, "memory": memory}
        text = ", ".join(f"{name}={value!r}" for name, value in arguments.items() if value is not None)
        raise ConfigError(f"scale({text}); {_ALLOWED}")


def workers_with(settings: Settings, cores: object, memory: object, *, most: bool = False) -> int:
    """Return the number of workers that have these cores and this memory together; ``most``: at most, not at least.

    Raises ConfigError for a value that is no number, or if a worker's memory or cores are unknown.
    """
    count = 0.0 if cores is None else _number(cores)
    if not 0 <= count < math.inf:
        raise ConfigError(f"cores={cores!r} is no number of cores; allowed: 0 or more, for all workers together")
    size = 0 if memory is None else parse_bytes(memory)  # type: ignore[arg-type] # parse_bytes checks it
    return workers_for(settings, cores=count, memory_bytes=size, most=most) if count or size else 0


def bounds(settings: Settings, first: int, per_job: int, options: dict[str, object]) -> dict[str, object]:
    """Translate the options of ``adapt``: bounds in jobs, cores and memory become bounds in workers.

    ``first`` and ``per_job``: workers of the job with the scheduler, and of each other one. Raises ConfigError for a
    bound that is no number, a bound that is given in two ways, or a minimum above the maximum.
    """
    rest = {name: value for name, value in options.items() if value is not None}
    for name, most in (("minimum", False), ("maximum", True)):
        jobs, cores, memory = (rest.pop(f"{name}_{of}", None) for of in ("jobs", "cores", "memory"))
        if sum(way is not None for way in (rest.get(name), jobs, memory if cores is None else cores)) > 1:
            raise ConfigError(f"adapt: {name} is given in two ways; {_ALLOWED}")
        if jobs is not None:
            if not isinstance(jobs, Integral):
                raise ConfigError(f"adapt: {name}_jobs={jobs!r} is no number of jobs; allowed: a whole number from 0")
            rest[name] = first + int(jobs) * per_job
        elif cores is not None or memory is not None:
            rest[name] = workers_with(settings, cores, memory, most=most)
    low, high = rest.get("minimum", 0), rest.get("maximum", math.inf)
    if not 0 <= _number(low) <= _number(high):
        raise ConfigError(f"adapt: minimum {low}, maximum {high}; give 0 or more, and a maximum that is not below it")
    return rest


def _number(value: object) -> float:
    """Return a number; NaN, which no bound allows, for other objects."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


class JobAdaptive(Adaptive):
    """Keeps as many workers as the scheduler has work for, between ``minimum`` and ``maximum``.

    It adds workers at once, and removes some only after the scheduler has needed fewer ``wait_count`` times in a row.
    plan.jobs.reconcile decides which jobs end, and keeps young pending ones.
    """

    def __init__(self, cluster: Any, interval: str = INTERVAL, wait_count: int = WAIT_COUNT, **kwargs: Any) -> None:
        super().__init__(cluster, interval=interval, wait_count=wait_count, **kwargs)
        self._fewer = 0
        every_s = self.interval or 0.0
        self._failures = FailureLog("the count of workers that have work", Backoff(every_s, every_s))

    async def adapt(self) -> None:
        """Adapt once; distributed calls this at intervals, and would log each error."""
        try:
            await self._adapt()
        except Exception as e:
            self._failures.failed(e)
        else:
            self._failures.went_well()

    async def _adapt(self) -> None:
        target, before = await self.safe_target(), self.cluster.wanted_workers
        self._fewer = self._fewer + 1 if target < before else 0
        if target > before or self._fewer >= self.wait_count:
            self._fewer = 0
            await self.cluster.adapt_to(target)

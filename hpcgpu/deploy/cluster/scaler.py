"""The jobs of a cluster that come and go, as one cluster object sees them: scaled, adapted, counted.

Also the arguments of ``scale`` and ``adapt`` as workers, and the rounds in which ``adapt`` looks for work.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from distributed.deploy.adaptive import Adaptive

from hpcgpu.deploy.cluster.controller import Controller
from hpcgpu.deploy.cluster.seen import Seen
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.model import Settings
from hpcgpu.model.backoff import Backoff
from hpcgpu.plan.jobs.request import workers_for
from hpcgpu.supervise import tasks
from hpcgpu.supervise.failure_log import FailureLog
from hpcgpu.units import parse_bytes

# distributed looks each second and gives up after three: a job that waited an hour for its nodes would be lost.
INTERVAL = "5s"
WAIT_COUNT = 12

_ALLOWED = "give one of them, 0 or more: n workers, jobs, or cores and memory of all workers together"
_LOOK_S = 5.0


class Scaler:
    """The jobs that come and go, and this object's part in controlling them.

    On the event loop's thread only; properties may be read by any thread.

    Parameters
    ----------
    fleet : Fleet
        The jobs that come and go.
    seen : Seen
        The cluster.

    """

    def __init__(self, fleet: Fleet, seen: Seen) -> None:
        self._fleet = fleet
        self._listener = HeartbeatMonitor(seen.scheduler, self._fleet.workers_changed)
        seen.silent = lambda: self._listener.silent
        self._controller = Controller(seen.scheduler, self._fleet, seen.changed)

    @property
    def expected(self) -> int:
        """Workers of each job."""
        return self._fleet.expected

    @property
    def wanted_workers(self) -> int:
        """Workers of the jobs that there are to be."""
        return self._fleet.wanted * self._fleet.expected

    @property
    def requested_workers(self) -> int:
        """Workers of the jobs that have been submitted."""
        return len(self._fleet.members) * self._fleet.expected

    @property
    def given_up(self) -> HpcGpuError | None:
        """Why no more workers come; None when they may."""
        return self._controller.given_up

    def jobs_for(self, workers: int) -> int:
        """Return how many jobs have so many workers together."""
        return max(0, math.ceil(workers / self._fleet.expected))

    async def started(self) -> None:
        """Wait until it is known which object controls the jobs.

        Raises
        ------
        JobError
            It cannot be known.

        """
        await self._controller.started()

    async def scale(self, jobs: int, *, adapting: bool = False) -> None:
        """Want so many jobs; return after the necessary submissions.

        Raises
        ------
        SubmitError
            The batch system refused, in its own words.

        """
        await self._controller.scale(jobs, adapting=adapting)

    def stop(self) -> None:
        """Leave the jobs to others."""
        for part in (self._controller, self._listener, self._fleet):
            part.stop()

    async def close(self) -> None:
        """Cancel every job that is left; see :meth:`Fleet.close`."""
        await self._fleet.close()


class HeartbeatMonitor:
    """Asks the scheduler which workers are silent, until it is stopped.

    Parameters
    ----------
    scheduler : callable
        Returns the connection to the present scheduler.
    changed : callable
        Called when a worker has fallen silent or is heard again.
    every_s : float
        Seconds between two questions.

    Attributes
    ----------
    silent : frozenset of str
        The workers' addresses.

    """

    def __init__(self, scheduler: Callable[[], Any], changed: Callable[[], None], every_s: float = _LOOK_S) -> None:
        self.silent = frozenset[str]()
        self._scheduler, self._changed, self._every_s = scheduler, changed, every_s
        self._listening = tasks.run_forever(self._listen, "the look for workers that have fallen silent")

    async def _listen(self) -> None:
        await asyncio.sleep(self._every_s)
        try:
            found = frozenset(await self._scheduler().hpcgpu_silent())
        except OSError:
            return  # the cluster object looks for its scheduler
        if found != self.silent:
            self.silent = found
            self._changed()

    def stop(self) -> None:
        """Ask no more."""
        self._listening.cancel()


def check_scale(n: object, jobs: object, cores: object, memory: object) -> None:
    """Raise unless one of the ways to say how many is used, and with a number that can be."""
    ways = [w for w in (n, jobs, memory if cores is None else cores) if w is not None]
    counts = [w for w in (n, jobs) if w is not None]
    if len(ways) != 1 or any(not isinstance(c, Integral) or isinstance(c, bool) or c < 0 for c in counts):
        given = {"n": n, "jobs": jobs, "cores": cores, "memory": memory}
        said = ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)
        raise ConfigError(f"scale({said}); {_ALLOWED}")


def workers_with(settings: Settings, cores: object, memory: object, *, most: bool = False) -> int:
    """Return the workers that have so many cores, and so much memory, together.

    Raises
    ------
    ConfigError
        It is no number, or the memory or cores of a worker are not known.

    """
    count = 0.0 if cores is None else _number(cores)
    if not 0 <= count < math.inf:
        raise ConfigError(f"cores={cores!r} is no number of cores; allowed: 0 or more, of all workers together")
    size = 0 if memory is None else parse_bytes(memory)  # type: ignore[arg-type] # it says what it takes
    return workers_for(settings, cores=count, memory_bytes=size, most=most) if count or size else 0


def bounds(settings: Settings, first: int, per_job: int, options: dict[str, object]) -> dict[str, object]:
    """Return the options of ``adapt`` with bounds in workers: those in jobs, cores and memory are translated.

    Parameters
    ----------
    settings : Settings
        Of the cluster.
    first, per_job : int
        Workers of the job with the scheduler, and of each other one.
    options : dict of str to object
        As they were given.

    Raises
    ------
    ConfigError
        A bound is no number, is said in two ways, or more are asked for at least than at most.

    """
    rest = {name: value for name, value in options.items() if value is not None}
    for name, most in (("minimum", False), ("maximum", True)):
        jobs, cores, memory = (rest.pop(f"{name}_{of}", None) for of in ("jobs", "cores", "memory"))
        if sum(way is not None for way in (rest.get(name), jobs, memory if cores is None else cores)) > 1:
            raise ConfigError(f"adapt: {name} is said in two ways; {_ALLOWED}")
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
    """Return a number; NaN, which no bound allows, for anything else."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


class JobAdaptive(Adaptive):
    """Wants as many workers as the scheduler has work for, between ``minimum`` and ``maximum``.

    More are asked for at once; fewer only after the scheduler has wanted fewer ``wait_count`` times in a row.
    Which jobs go, and that young pending ones stay, is decided by plan.reconcile.
    """

    def __init__(self, cluster: Any, interval: str = INTERVAL, wait_count: int = WAIT_COUNT, **kwargs: Any) -> None:
        super().__init__(cluster, interval=interval, wait_count=wait_count, **kwargs)
        self._fewer = 0
        every_s = self.interval or 0.0
        self._failures = FailureLog("the look for how many workers there is work for", Backoff(every_s, every_s))

    async def adapt(self) -> None:
        """Look once; called by distributed in intervals, whatever is raised: it would say it each time."""
        try:
            await self._adapt()
        except Exception as e:
            self._failures.failed(e)
        else:
            self._failures.went_well()

    async def _adapt(self) -> None:
        target, wanted = await self.safe_target(), self.cluster.wanted_workers
        self._fewer = self._fewer + 1 if target < wanted else 0
        if target > wanted or self._fewer >= self.wait_count:
            self._fewer = 0
            await self.cluster.adapt_to(target)

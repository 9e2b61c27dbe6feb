"""``scale`` and ``adapt``: their arguments as workers, and the rounds in which ``adapt`` looks for work."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from distributed.deploy.adaptive import Adaptive

from hpcgpu.errors import ConfigError
from hpcgpu.model import Settings
from hpcgpu.model.backoff import Backoff
from hpcgpu.plan.jobs.request import workers_for
from hpcgpu.supervise.rounds import Rounds
from hpcgpu.units import parse_bytes

# distributed looks each second and gives up after three: a job that waited an hour for its nodes would be lost.
INTERVAL = "5s"
WAIT_COUNT = 12

_ALLOWED = "give one of them, 0 or more: n workers, jobs, or cores and memory of all workers together"


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
    """Return a number; what is none is NaN, which no bound allows."""
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan


class JobAdaptive(Adaptive):
    """Wants as many workers as the scheduler has work for, between ``minimum`` and ``maximum``.

    More are asked for at once; fewer only after the scheduler has wanted fewer ``wait_count`` times in a row.
    Which jobs go, and that young pending ones stay, is decided by plan.reconcile.
    """

    def __init__(self, cluster: Any, interval: str = INTERVAL, wait_count: int = WAIT_COUNT, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(cluster, interval=interval, wait_count=wait_count, **kwargs)
        self._fewer = 0
        every_s = self.interval or 0.0
        self._rounds = Rounds("the look for how many workers there is work for", Backoff(every_s, every_s))

    async def adapt(self) -> None:
        """Look once; called by distributed in intervals, whatever is raised: it would say it each time."""
        try:
            await self._adapt()
        except Exception as e:
            self._rounds.failed(e)
        else:
            self._rounds.went_well()

    async def _adapt(self) -> None:
        target, wanted = await self.safe_target(), self.cluster.wanted_workers
        self._fewer = self._fewer + 1 if target < wanted else 0
        if target > wanted or self._fewer >= self.wait_count:
            self._fewer = 0
            await self.cluster.adapt_to(target)

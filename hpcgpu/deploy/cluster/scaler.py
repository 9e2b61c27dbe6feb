"""Translate the arguments of ``scale`` and ``adapt`` to workers, and adapt."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

from distributed.deploy.adaptive import Adaptive

from hpcgpu.errors import ConfigError
from hpcgpu.model import Settings
from hpcgpu.model.command import Backoff
from hpcgpu.plan.jobs.request import workers_for
from hpcgpu.supervise.failure_log import FailureLog
from hpcgpu.units import parse_bytes

# distributed adapts each second, and removes workers after three: a job that had queued for an hour would be lost.
INTERVAL = "5s"
WAIT_COUNT = 12

_ALLOWED = "give one of them, 0 or more: n workers, jobs, or cores and memory of all workers together"


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

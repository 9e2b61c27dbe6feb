"""Dask graphs as lists of what their tasks read, make and free, for ``spill_policy.py``."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import dask
import dask.array as da
import numpy as np
from dask._task_spec import Task, TaskRef
from dask.callbacks import Callback
from dask.core import flatten, get_deps
from dask.local import get_sync
from dask.order import order

SQUARE = (100, 100)


@dataclass(frozen=True)
class Step:
    """A task: what it reads and makes, what nobody needs after it, and what the tasks read that are ready meanwhile."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    frees: tuple[int, ...]
    ready: tuple[tuple[int, ...], ...] = ()


@dataclass
class Trace:
    """What happens to values, which are numbers, and their sizes."""

    steps: list[Step]
    nbytes: dict[int, int]

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """Return the steps that read each value."""
        out: dict[int, list[int]] = {}
        for i, step in enumerate(self.steps):
            for unit in step.reads:
                out.setdefault(unit, []).append(i)
        return out

    def peak(self) -> int:
        """Return the most bytes there are at a time."""
        now = peak = 0
        for step in self.steps:
            now += sum(self.nbytes[u] for u in step.makes)
            peak = max(peak, now)
            now -= sum(self.nbytes[u] for u in step.frees)
        return peak

    def least(self) -> int:
        """Return what the largest task alone needs."""
        return max(sum(self.nbytes[u] for u in {*s.reads, *s.makes}) for s in self.steps)


def buffers(value: Any) -> dict[int, int]:
    """Return identity and size of the memory of all arrays in a value."""
    if isinstance(value, np.ndarray):
        while isinstance(value.base, np.ndarray):
            value = value.base
        return {id(value): value.nbytes}
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return {k: v for item in items for k, v in buffers(item).items()}


def trace(graph: dict[Any, Any], wanted: Sequence[Any], by_submission: bool = False) -> Trace:
    """Compute a graph and return what happened to the memory of its values."""
    values: dict[Any, Any] = {}
    with Callback(posttask=lambda key, value, *_: values.setdefault(key, value)):
        get_sync(graph, list(wanted))
    needs, users = get_deps(graph)
    rank = {k: i for i, k in enumerate(graph)} if by_submission else order(graph)
    keys = sorted(graph, key=rank.__getitem__)
    memory = {k: buffers(values.get(k)) for k in keys}
    units = {k: tuple(memory[k]) for k in keys}
    left = {k: len(users[k]) + (k in wanted) for k in keys}
    holders: dict[int, int] = {}
    missing = {k: set(needs[k]) for k in keys}
    ready: dict[Any, None] = {}
    steps = []
    for key in keys:
        ready.pop(key, None)
        reads = tuple(dict.fromkeys(u for k in needs[key] for u in units[k]))
        makes = tuple(u for u in units[key] if not holders.get(u))
        for u in units[key]:
            holders[u] = holders.get(u, 0) + 1
        frees = []
        for k in needs[key]:
            left[k] -= 1
            for u in units[k] if not left[k] else ():
                holders[u] -= 1
                if not holders[u]:
                    frees.append(u)
        queue = sorted(ready, key=rank.__getitem__)
        steps.append(
            Step(reads, makes, tuple(frees), tuple(tuple(u for k in needs[q] for u in units[k]) for q in queue))
        )
        for user in users[key]:
            missing[user].discard(key)
            if not missing[user]:
                ready[user] = None
    return Trace(steps, {u: n for m in memory.values() for u, n in m.items()})


def of(*arrays: Any) -> Trace:
    """Return the trace of Dask arrays that are computed together."""
    arrays = dask.optimize(*arrays)
    graph = {k: v for a in arrays for k, v in a.__dask_graph__().items()}
    return trace(graph, [k for a in arrays for k in flatten(a.__dask_keys__())])


def noise(shape: tuple[int, ...], chunks: tuple[int, ...]) -> da.Array:
    return da.random.default_rng(0).random(shape, chunks=chunks)


def pairs(seed: int, skewed: bool, submitted: bool) -> Trace:
    """400 tasks that read two of 64 blocks each, of 1, 4 or 16 kB."""
    r = random.Random(seed)
    sizes = [r.choice((1, 1, 1, 4, 16)) * 1000 for _ in range(64)]
    read = [
        tuple(min(int(r.paretovariate(0.8)) - 1, 63) if skewed else r.randrange(64) for _ in "ab") for _ in range(400)
    ]
    blocks = {("b", i): Task(("b", i), np.zeros, sizes[i], "u1") for i in sorted({i for p in read for i in p})}
    tasks = {("t", t): Task(("t", t), tiny, *(TaskRef(("b", i)) for i in p)) for t, p in enumerate(read)}
    return trace({**blocks, **tasks}, list(tasks), submitted)


def tiny(*blocks: np.ndarray) -> np.ndarray:
    return np.zeros(len(blocks))


def smoothed(x: da.Array, times: int) -> da.Array:
    for _ in range(times):
        x = x.map_overlap(lambda block: block * 0.5, depth=8, boundary="reflect")
    return x


def descended(x: da.Array, times: int) -> da.Array:
    w = noise((x.shape[1],), (x.shape[1],))
    for _ in range(times):
        w = w - 1e-3 * (x.T @ (x @ w))
    return w


def mirrored(x: da.Array) -> da.Array:
    return x + x.T


def standard(x: da.Array) -> da.Array:
    return (x - x.mean(axis=0)) / x.std(axis=0)


CASES: dict[str, Callable[[], Trace]] = {
    "svd": lambda: of(*da.linalg.svd(noise((6400, 40), (100, 40)))),
    "svd_compressed": lambda: of(*da.linalg.svd_compressed(noise((800, 800), SQUARE), 10, n_power_iter=2, seed=0)),
    "all to all": lambda: of(noise((2400, 2400), (100, 2400)).rechunk((2400, 100), block_size_limit=2_000_000) + 1),
    "transpose": lambda: of(mirrored(noise((1000, 1000), SQUARE))),
    "reduction tree": lambda: of(noise((256, 1000), (1, 1000)).sum(axis=0, split_every=8)),
    "standardize": lambda: of(standard(noise((6400, 10), (100, 10)))),
    "map_overlap": lambda: of(smoothed(noise((1000, 1000), SQUARE), 3)),
    "matrix product": lambda: of(noise((800, 800), SQUARE) @ noise((800, 800), SQUARE)),
    "gradient descent": lambda: of(descended(noise((6400, 20), (100, 20)), 5)),
    "covariance": lambda: of(da.cov(noise((20, 6400), (4, 400)))),
    "random": lambda: pairs(0, skewed=False, submitted=True),
    "random, by dask.order": lambda: pairs(0, skewed=False, submitted=False),
    "random, skewed": lambda: pairs(0, skewed=True, submitted=True),
}

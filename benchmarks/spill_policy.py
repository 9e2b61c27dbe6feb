"""Bytes that a store of two tiers moves for real Dask graphs, by the rule that chooses what goes down.

A graph is computed once at a small scale, for the sizes of its values and for which of them share memory. Then its
tasks run in ``dask.order``'s order (where the case says so, in the order of submission) on one worker with one thread.
Its store has room for a part of the graph's peak, and at least for the largest task; once full, it goes down to 95 %.
A value that comes up leaves a copy below: moving it down again copies nothing.

``hpcgpu``
    ``hpcgpu.spill.state``. It knows what a worker knows: what the tasks that are ready need, and their
    priorities.
``hpcgpu, clean first``
    The same, with clean values as a group before the others, as under host pressure.
``hpcgpu, headroom``
    As ``hpcgpu.spill.state`` has it: the first for what must go, then from the oldest on what fits in the last 5 %.
``hpcgpu, no priorities``
    The same as the first, but which of the ready tasks runs first is not known.
``LRU``, ``FIFO``
    Longest untouched first; first made first.
``Belady``
    Knows the future: furthest next use first, of equals the biggest. With sizes and with copies that are free the true
    optimum is NP-hard; this is near it and no bound.

One JSON line per figure, medians of ``--runs`` runs: names of tasks, and with them ties in their order, differ between
runs. ``up`` and ``down`` are parts of the bytes that the graph makes; ``moved_to_lru`` is both together beside LRU's.
``all`` is the geometric mean over the cases in which anything moves.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from statistics import geometric_mean
from typing import Any

import _figures
from _traces import CASES, Trace

from hpcgpu.spill.state.victims import Candidate, headroom, victims

ROOM = (0.3, 0.5, 0.8)
report = partial(_figures.report, "spill_policy")
# As the store does: once it is full, it goes down to this part of its limit.
LOW = 0.95


@dataclass
class Store:
    """Two tiers, the upper one with a limit; what is above stands in the order of its last use."""

    trace: Trace
    room: int
    rule: Callable[[Store, int], Iterator[int]]
    above: OrderedDict[int, int] = field(default_factory=OrderedDict)
    made: dict[int, int] = field(default_factory=dict)
    copied: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    soon: dict[int, int] = field(default_factory=dict)
    used: int = 0
    up: int = 0
    down: int = 0
    now: int = 0
    clock: int = 0

    def run(self) -> Store:
        """Run all tasks; return what it is then."""
        nbytes = self.trace.nbytes
        for now, step in enumerate(self.trace.steps):
            self.now = now
            self.pinned = set(step.reads)
            self.soon = {unit: i for i, task in reversed(list(enumerate(step.ready))) for unit in task}
            for unit in step.reads:
                self.up += 0 if unit in self.above else nbytes[unit]
                self.place(unit)
            for unit in step.makes:
                self.made[unit] = self.now
                self.pinned.add(unit)
                self.place(unit)
            for unit in step.frees:
                self.used -= nbytes[unit] if self.above.pop(unit, None) is not None else 0
                self.copied.discard(unit)
        return self

    def place(self, unit: int) -> None:
        """Touch what is above; else make room and put it there."""
        self.clock += 1
        if unit not in self.above:
            over = self.used + self.trace.nbytes[unit] - self.room
            if over > 0:
                self.evict(over + int(self.room * (1 - LOW)))
            self.used += self.trace.nbytes[unit]
        self.above[unit] = self.clock
        self.above.move_to_end(unit)

    def evict(self, need_bytes: int) -> None:
        """Move down what the rule chooses."""
        for unit in list(self.rule(self, need_bytes)):
            self.used -= self.trace.nbytes[unit]
            self.down += 0 if unit in self.copied else self.trace.nbytes[unit]
            self.copied.add(unit)
            del self.above[unit]

    def candidates(self) -> Iterator[Candidate]:
        """Yield what lies above, longest untouched first."""
        for unit, age in self.above.items():
            if unit in self.pinned:
                continue
            turn = (self.soon[unit],) if unit in self.soon else ()
            clean = unit in self.copied
            yield Candidate(unit, age, self.trace.nbytes[unit], len(turn), clean, turn)


def ours(store: Store, need_bytes: int) -> Iterator[int]:
    return (c.name for c in victims(store.candidates(), need_bytes))


def without_priorities(store: Store, need_bytes: int) -> Iterator[int]:
    return (c.name for c in victims((c._replace(priority=()) for c in store.candidates()), need_bytes))


def clean_first(store: Store, need_bytes: int) -> Iterator[int]:
    in_order = sorted(store.candidates(), key=lambda c: not c.clean)
    return (c.name for c in victims(in_order, need_bytes))


def with_headroom(store: Store, need_bytes: int) -> Iterator[int]:
    must = need_bytes - int(store.room * (1 - LOW))
    chosen = list(victims(store.candidates(), must))
    names = {c.name for c in chosen}
    rest = (c for c in store.candidates() if c.name not in names)
    chosen += headroom(rest, need_bytes - sum(c.nbytes for c in chosen))
    return (c.name for c in chosen)


def smallest(rank: Callable[[Store, int], Any], store: Store, need_bytes: int) -> Iterator[int]:
    """Yield what is not pinned by its rank, until the need is covered."""
    for unit in sorted(store.above.keys() - store.pinned, key=lambda u: rank(store, u)):
        if need_bytes <= 0:
            return
        need_bytes -= store.trace.nbytes[unit]
        yield unit


def next_use(store: Store, unit: int) -> tuple[int, int]:
    uses = store.trace.uses.get(unit, [])
    i = bisect_right(uses, store.now)
    return (-uses[i] if i < len(uses) else -len(store.trace.steps), -store.trace.nbytes[unit])


RULES: dict[str, Callable[[Store, int], Iterator[int]]] = {
    "hpcgpu": ours,
    "hpcgpu, clean first": clean_first,
    "hpcgpu, headroom": with_headroom,
    "hpcgpu, no priorities": without_priorities,
    "LRU": partial(smallest, lambda store, u: store.above[u]),
    "FIFO": partial(smallest, lambda store, u: store.made[u]),
    "Belady": partial(smallest, next_use),
}


def figures(name: str) -> Iterator[tuple[str, str, str, float]]:
    """Return case, rule, measure and value for all rooms."""
    graph = CASES[name]()
    made = sum(graph.nbytes.values())
    for part in ROOM:
        room = max(int(graph.peak() * part), graph.least())
        case = f"{name}, room for {part:.0%} of the peak"
        stores = {who: Store(graph, room, rule).run() for who, rule in RULES.items()}
        lru = stores["LRU"].up + stores["LRU"].down
        for who, store in stores.items():
            yield case, who, "up", store.up / made
            yield case, who, "down", store.down / made
            if lru:
                yield case, who, "moved_to_lru", (store.up + store.down) / lru


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    found: dict[tuple[str, str, str], list[float]] = {}
    runs = parser.parse_args().runs
    for name in CASES:
        for _ in range(runs):
            for case, who, measure, value in figures(name):
                found.setdefault((case, who, measure), []).append(value)
    for (case, who, measure), values in found.items():
        report(case, who, measure, values, "of LRU" if measure == "moved_to_lru" else "of the bytes made")
    for who in RULES:
        ratios = [v for (_, w, m), v in found.items() if w == who and m == "moved_to_lru"]
        report("all", who, "moved_to_lru", [geometric_mean(r) for r in zip(*ratios, strict=True)], "of LRU")


if __name__ == "__main__":
    main()

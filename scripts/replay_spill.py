"""Replay the last events of spill stores and check the machine's laws: ``replay_spill.py FILE``.

From the root of the checkout: ``PYTHONPATH=.:tests/support python scripts/replay_spill.py FILE``. FILE is a log with
``spill story of process N: ...`` (each store that loses a value or its GPU logs one, so ``job-N-spill.log`` in
the folder of ``hpcgpu report`` has them), or the lines of ``GpuSpillBuffer.history``.

A story begins with the facts of its machine, so the machine decides as it did. At its end, and at facts within it, the
replayed machine must have these facts. What comes after ``cut`` and before the next facts cannot be replayed: the store
had too many units.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter, deque
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from spill_worlds import broken

from hpcgpu.spill.state.accounting import UNIT_FIELDS
from hpcgpu.spill.state.instructions import Copy, FailedAllocation, Ticket, Unit
from hpcgpu.spill.state.machine import SpillState, _Need

_LINE = re.compile(r"(?:spill story of (process \d+): |^)(\[\[.*\]\])$", re.MULTILINE)
_FACTS = ("state", "unit", "lost", "copied", "moving", "needs", "queue", "ahead", "allocation", "ticket", "waiters")
Row = list[Any]


def read(text: str) -> dict[str, list[Row]]:
    """Return the events of each store in a log."""
    stories: dict[str, list[Row]] = {}
    for process, events in _LINE.findall(text):
        stories.setdefault(process, []).extend(json.loads(events))
    return stories


class _Task(int):
    __hash__ = int.__int__  # the story has hashes


class Replay:
    """A machine that gets the events of a story."""

    def __init__(self) -> None:
        self.state = SpillState({})
        self._is_cut = True  # until the next facts
        self.units: dict[int, Unit] = {}
        self.waiters: dict[int, Any] = {}
        self.silent: list[Ticket] = []  # tickets that were answered before the story: one for each pin
        self.events = self.skipped = 0

    def play(self, story: Iterable[Row]) -> None:
        """Give all events to the machine; raise AssertionError if a law does not hold, or facts are others."""
        for is_facts, rows in groupby(story, key=lambda row: row[0] in _FACTS):
            if is_facts:
                self._compare_or_begin(list(rows))
                continue
            for name, *args in rows:
                self._is_cut = self._is_cut or name == "cut"
                if self._is_cut:
                    self.skipped += name != "cut"
                    continue
                self.events += 1
                try:
                    (getattr(self, f"_do_{name}", None) or getattr(self.state, name))(*args)
                    self._check()
                except Exception as e:
                    event = json.dumps([name, *args])
                    raise AssertionError(f"event {self.events}, {event}: {type(e).__name__}: {e}") from e

    def _check(self) -> None:
        tickets = [each for each in self.waiters.values() if isinstance(each, Ticket)]
        copies = list(self.state._accounting.moving.values())
        for law in broken(self.state, list(self.units.values()), [*tickets, *self.silent], copies):
            raise AssertionError(law)

    def _compare_or_begin(self, rows: list[Row]) -> None:
        if self._is_cut:
            self._is_cut = False
            self._begin(rows)
            return
        numbers = {str(id(waiter)): str(number) for number, waiter in self.waiters.items()}  # here, and in the story
        text = json.dumps(list(self.state._facts()), default=lambda unit: unit.name)
        replayed = json.loads(re.sub(r"\d{9,}", lambda match: numbers.get(match[0], match[0]), text))
        for ours, row in zip(replayed, rows, strict=False):
            if ours != row:
                raise AssertionError(f"after event {self.events} the machine has {ours}, the store had {row}")
        if len(replayed) != len(rows):
            raise AssertionError(f"after event {self.events} the machine has {len(replayed)} facts, not {len(rows)}")

    # --- facts --------------------------------------------------------------------------------------------------------
    def _begin(self, rows: list[Row]) -> None:
        """Make a machine with these facts."""
        self.units, self.waiters, self.silent = {}, {}, []
        self.state = SpillState({})
        for name, *args in rows:
            getattr(self, f"_put_{name}")(self.state, *args)
        explained = Counter(unit for each in self.waiters.values() if isinstance(each, Ticket) for unit in each.units)
        for unit in self.units.values():
            self.silent += [Ticket((unit,), over=True) for _ in range(unit.pins - explained[unit])]

    def _unit(self, name: int) -> Unit:
        return self.units.setdefault(name, Unit(name, 0))  # one that is nowhere now: "set" brings its size

    def _all(self, names: Iterable[int]) -> tuple[Unit, ...]:
        return tuple(map(self._unit, names))

    def _put_state(self, state: SpillState, numbers: Any, stays: Any, sums: Any, stuck: Any) -> None:
        state.__dict__.update(numbers)
        state.stays.update(stays)
        state._accounting.stuck.update(stuck)
        for name, value in sums.items():
            if isinstance(value, list):
                table = getattr(state._accounting, name)
                table.clear()
                table.update(value)
            else:
                setattr(state._accounting, name, value)

    def _put_unit(self, state: SpillState, facts: Any) -> None:
        fields = dict(zip(UNIT_FIELDS, facts, strict=True))
        unit = self._unit(fields["name"])
        unit.__dict__.update(fields)
        state._accounting.orders[unit.tier][unit.name] = unit

    def _put_lost(self, _: SpillState, name: int) -> None:
        self._unit(name).lost = OSError("as in the story")

    def _put_copied(self, state: SpillState, tier: int, name: int) -> None:
        state._accounting.copies[tier][name] = self._unit(name)

    def _put_moving(self, state: SpillState, name: int, source: int, to: int, *rest: int) -> None:
        unit = self._unit(name)
        unit.move, state._accounting.moving[name] = to, Copy(unit, source, to, None, *rest)
        if to < source:
            del state._accounting.orders[source][name]

    def _put_needs(self, state: SpillState, task: int, priority: Any, number: int, running: bool, names: Any) -> None:
        need = _Need(tuple(priority), number, running, self._all(names))
        state._needs[_Task(task)] = need
        if not running:
            state._ready = sorted([*state._ready, need])
        for unit in need.units:
            unit.running += running
            if not running:
                unit.waiting = {**(unit.waiting or {}), _Task(task): need.priority}

    def _put_queue(self, state: SpillState, tier: int, names: Any) -> None:
        state._coming_up[tier] = deque(self._all(names))

    def _put_ahead(self, state: SpillState, name: int) -> None:
        state._ahead = self._unit(name)

    def _put_allocation(self, state: SpillState, number: int, *rest: int) -> None:
        state.allocations.append(self._waiter(FailedAllocation(*rest), number))

    def _put_ticket(self, _: SpillState, number: int, names: Any, *rest: Any) -> None:
        self._waiter(Ticket(self._all(names), *rest), number)

    def _put_waiters(self, _: SpillState, name: int, numbers: Any) -> None:
        self._unit(name).waiters = tuple(self.waiters[number] for number in numbers)

    def _waiter(self, waiter: Any, number: int) -> Any:
        self.waiters[number] = waiter
        return waiter

    # --- events whose arguments are units, tickets and copies ---------------------------------------------------------
    def _do_set(self, names: Any, new: Any) -> None:
        facts = iter(new)
        for unit in self._all(names):
            if not unit.valid:
                unit.nbytes, unit.top, unit.at, unit.fixed, is_lost = next(facts)
                unit.lost = OSError("as in the story") if is_lost else None
        self.state.set(self._all(names))

    def _do_delete(self, names: Any) -> None:
        self.state.delete(self._all(names))

    def _do_used(self, names: Any, writes: bool) -> None:
        self.state.used(self._all(names), writes)

    def _do_need(self, number: int, names: Any, *how: bool) -> None:
        writes, for_peer, stays, at_once = how
        ticket = Ticket(self._all(names), writes, for_peer, stays, at_once)
        self.state.need(self._waiter(ticket, number))

    def _do_release(self, number: int, names: Any) -> None:
        units = self._all(names)
        for unit in units if number not in self.waiters else ():
            self.silent.remove(next(ticket for ticket in self.silent if ticket.units == (unit,)))
        self.state.release(self.waiters.pop(number, None) or Ticket(units, over=True))

    def _do_grow(self, name: int, nbytes: int) -> None:
        self.state.grow(self._unit(name), nbytes)

    def _do_join(self, name: int, *part: int) -> None:
        self.state.join(self._unit(name), _part(*part))

    def _do_leave(self, name: int, *part: int) -> None:
        self.state.leave(self._unit(name), _part(*part))

    def _do_moved(self, name: int, nbytes: int) -> None:
        self.state.moved(self.state._accounting.moving[name], nbytes)

    def _do_failed(self, name: int, for_good: bool) -> None:
        self.state.failed(self.state._accounting.moving[name], OSError("as in the story"), for_good)

    def _do_alloc_failed(self, number: int, tier: int, nbytes: int) -> None:
        self.state.alloc_failed(self._waiter(FailedAllocation(tier, nbytes), number))

    def _do_alloc_given_up(self, number: int) -> None:
        self.state.alloc_given_up(self.waiters.pop(number))

    def _do_expect(self, task: int, names: Any, priority: Any, running: bool) -> None:
        self.state.expect(_Task(task), self._all(names), tuple(priority), running)

    def _do_task_over(self, task: int) -> None:
        self.state.task_over(_Task(task))


def _part(name: int, nbytes: int, keys: int) -> Unit:
    part = Unit(name, nbytes)
    part.keys = keys
    return part


def main(path: str) -> int:
    """Replay all stories of a file; return 1 if a law does not hold in one, or there is none to replay."""
    code, stories = 0, read(Path(path).read_text())
    for process, events in stories.items():
        replay = Replay()
        try:
            replay.play(events)
            end = f"{replay.events} events replayed exactly, and all keep the laws"
        except AssertionError as e:
            code, end = 1, str(e)
        skipped = f"{replay.skipped} events of too many units skipped; " * bool(replay.skipped)
        print(f"{process or 'one store'}: {skipped}{end}")
        code = code or int(not replay.events)
    return code if stories else print(f"{path} has no story") or 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

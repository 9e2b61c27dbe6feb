"""Replay the last events of spill stores and check the machine's laws: ``replay_spill.py FILE``.

From the root of the checkout: ``PYTHONPATH=.:tests/support python scripts/replay_spill.py FILE``. FILE is a log with
``spill story of process N: ...`` (each store that loses a value or its GPU logs one, so a job's log in the folder of
``hpcgpu report`` has them), or the lines of ``GpuSpillBuffer.history``.

A story of less than 1,000 events is complete: the machine decides as it did. A longer one begins in the middle: each
unit begins as its first event shows it, and a copy that the machine does not order is started as in the story.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from spill_worlds import broken

from hpcgpu.spill.state.history import FIELDS
from hpcgpu.spill.state.instructions import Copy, FailedAllocation, Ticket, Unit
from hpcgpu.spill.state.machine import SpillState

_LINE = re.compile(r"(?:spill story of (process \d+): |^)(\[\[.*\]\])$", re.MULTILINE)
Event = tuple[str, list[Any], list[list[Any]]]


def read(text: str) -> dict[str, list[Event]]:
    """Return the events of each store in a log."""
    stories: dict[str, list[Event]] = {}
    for process, events in _LINE.findall(text):
        stories.setdefault(process, []).extend(json.loads(events))
    return stories


class Replay:
    """A machine that gets the events of a story."""

    def __init__(self, events: list[Event]) -> None:
        self.is_whole = events[0][0] == "begin"
        self.state = SpillState(dict(events[0 if self.is_whole else -1][1]))
        self.units: dict[int, Unit] = {}
        self.parts: dict[int, Unit] = {}
        self.waiters: dict[int, Any] = {}
        self.copies: list[Copy] = []
        self.started = 0  # copies that the machine has not ordered
        if not self.is_whole:
            first = {unit[0]: dict(zip(FIELDS, unit, strict=True)) for *_, units in reversed(events) for unit in units}
            for unit in sorted(first.values(), key=lambda unit: int(unit["age"])):
                self.place(unit)

    def place(self, facts: dict[str, Any]) -> None:
        """Let a unit lie where its first event shows it."""
        unit = self.units[facts["name"]] = Unit(facts["name"], facts["nbytes"], facts["top"], facts["at"])
        if valid := facts["valid"]:
            unit.at = valid.bit_length() - 1
            self.state._accounting.add(unit)
            self.state._accounting.set_valid(unit, valid)
            unit.keys = facts["keys"] or 1  # else only a reader from before the story kept it

    def unit(self, values: list[Any]) -> Unit:
        """Return a unit, dirty if it was: reads that change nothing else are no events."""
        facts = dict(zip(FIELDS, values, strict=True))
        unit = self.units.setdefault(facts["name"], Unit(*values[:4]))
        unit.dirty = unit.dirty or (facts["dirty"] and unit.valid == 1 << unit.top)
        return unit

    def copy(self, unit: Unit, to: int) -> Copy | None:
        """Take the copy of a unit; one that the machine has not ordered begins now, if it can."""
        out: list[Any] = [copy for copy in self.copies if copy.unit is unit and copy.to == to]
        if not out and unit.valid and unit.move is None and abs(unit.tier - to) == 1:
            self.started += 1
            self.state._accounting.start(unit, to, None, out)
        self.copies = [copy for copy in self.copies if copy not in out]
        return out[0] if out else None

    def play(self, event: Event) -> None:
        """Give an event to the machine; raise AssertionError if a law does not hold afterwards."""
        name, args, facts = event
        units = tuple(map(self.unit, facts))
        for instruction in self.call(name, args, units) or ():
            if isinstance(instruction, Copy):
                self.copies.append(instruction)
        tickets = [each for each in self.waiters.values() if isinstance(each, Ticket)]
        for law in broken(self.state, self.units.values(), tickets, self.copies):
            raise AssertionError(law)

    def call(self, name: str, args: list[Any], units: tuple[Unit, ...]) -> Any:
        """Call the event's method; return its instructions."""
        call: Any = getattr(self.state, name, None)
        if name in ("begin", "end"):
            return ()
        if name in ("need", "alloc_failed"):
            number, *rest = args
            self.waiters[number] = Ticket(units, *rest) if name == "need" else FailedAllocation(*rest)
            return call(self.waiters[number])
        if name in ("release", "alloc_given_up"):  # of one from before the story begins there is nothing to end
            return call(self.waiters.pop(args[0])) if args[0] in self.waiters else ()
        if name in ("moved", "failed"):
            copy, more = self.copy(units[0], args[0]), args[1:]
            return call(copy, *([OSError("as in the story")] if name == "failed" else []), *more) if copy else ()
        if name in ("join", "leave"):
            part = self.parts.setdefault(args[0], Unit(*args))
            part.keys = max(part.keys, name == "leave")
            return call(units[0], part)
        if name == "expect":
            return call(args[0], units, tuple(args[1]), args[2])
        if name == "used":
            return call(units, writes=True)
        return call(*units, *args) if name == "grow" else call(units) if units else call(*args)


def main(path: str) -> int:
    """Replay all stories of a file; return 1 if a law does not hold in one, or it has none."""
    code, stories = 0, read(Path(path).read_text())
    for process, events in stories.items():
        replay, event = Replay(events), events[0]
        end = f"all {len(events)} events keep the laws"
        for number, event in enumerate(events):
            try:
                replay.play(event)
            except Exception as e:
                code, end = 1, f"event {number}, {json.dumps(event)}: {type(e).__name__}: {e}"
                break
        kind = "the whole story" if replay.is_whole else "the end of a story"
        print(f"{process or 'one store'}: {kind}, {replay.started} copies started as in it; {end}")
    return code if stories else print(f"{path} has no story") or 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

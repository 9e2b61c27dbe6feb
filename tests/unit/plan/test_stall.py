"""When nothing goes on any more."""

from __future__ import annotations

from hpcgpu.plan.jobs.stall import Stall, look


def test_since_when_nothing_goes_on() -> None:
    first = look(None, True, 1000, 5.0)
    assert first == Stall(5.0, 1000)
    assert look(first, True, 995, 6.0) == first  # a byte here and there is no progress
    assert look(first, True, 2000, 6.0) == first


def test_what_still_moves_begins_anew() -> None:
    first = Stall(5.0, 1000)
    assert look(first, True, 900, 9.0) == Stall(9.0, 900)  # the store writes to disk
    assert look(first, False, 1000, 9.0) is None

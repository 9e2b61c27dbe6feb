from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.model.job import Backoff


def test_waits_double_up_to_the_longest() -> None:
    backoff, waits, now_s = Backoff(first_s=1.0, longest_s=10.0), [], 0.0
    for _ in range(6):
        backoff = backoff.failed("full", now_s)
        waits.append(backoff.wait_s)
        now_s += backoff.wait_s
    assert waits == [1, 2, 4, 8, 10, 10]


def test_each_reason_is_new_once() -> None:
    backoff, new = Backoff(), []
    for i, reason in enumerate(["full", "full", "stale", "full", "stale"]):
        backoff = backoff.failed(reason, float(i))
        new.append(backoff.is_new)
    assert new == [True, False, True, False, False]


def test_after_a_calm_the_next_failure_is_the_first_one_again() -> None:
    backoff = Backoff(first_s=1.0, calm_s=60.0).failed("full", 0.0).failed("full", 2.0)
    assert backoff.failed("full", 60.0).failures == 3
    again = backoff.failed("full", 2.0 + backoff.wait_s + 60.0)
    assert (again.failures, again.wait_s, again.is_new) == (1, 1.0, True)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=200))
def test_wait_after_any_failures_is_within_its_bounds(times: list[float]) -> None:
    backoff = Backoff(first_s=0.5, longest_s=30.0)
    for now_s in sorted(times):
        backoff = backoff.failed("full", now_s)
        assert 0.5 <= backoff.wait_s <= 30.0
        assert backoff.failures >= 1

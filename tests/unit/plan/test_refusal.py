"""The next step after a submission that was refused, or not answered."""

from __future__ import annotations

from typing import Any

import pytest

from hpcgpu.errors import SubmitError
from hpcgpu.plan.jobs.refusal import NOT_THERE, TIMED_OUT, Step, after_pause, after_refusal


def refused(**kind: bool) -> SubmitError:
    return SubmitError("no", **kind)


REFUSALS: dict[str, tuple[Any, int, int, Step]] = {
    "no such program": (refused(), NOT_THERE, 2, Step.NAME_CLUSTER),
    "a limit of one's own": (refused(over_limit=True, transient=True), 1, 2, Step.RAISE),
    "for good": (refused(), 1, 2, Step.NAME_LACK),
    "for now": (refused(transient=True), 1, 2, Step.PAUSE),
    "for now, for the last time": (refused(transient=True), 1, 0, Step.RAISE),
    "no answer": (refused(transient=True, unsure=True), TIMED_OUT, 2, Step.PAUSE),
}


@pytest.mark.parametrize(("refusal", "code", "pauses", "step"), REFUSALS.values(), ids=REFUSALS)
def test_after_a_refusal(refusal: SubmitError, code: int, pauses: int, step: Step) -> None:
    assert after_refusal(refusal, code, pauses) is step


@pytest.mark.parametrize(
    ("found", "code", "pauses", "step"),
    [
        ((), 1, 1, Step.SUBMIT),
        ((), 1, 0, Step.RAISE),
        ((), TIMED_OUT, 1, Step.RAISE),  # its jobs may come later
        (None, 1, 1, Step.PAUSE),
        (None, TIMED_OUT, 1, Step.PAUSE),
        (None, 1, 0, Step.RAISE),
    ],
)
def test_after_a_pause(found: tuple[str, ...] | None, code: int, pauses: int, step: Step) -> None:
    assert after_pause(found, code, pauses) is step

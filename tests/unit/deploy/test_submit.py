"""A submission that is refused, or not answered."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from hpcgpu.deploy.jobs import batch_client
from hpcgpu.errors import SubmitError
from hpcgpu.model import Command, JobSpec, Patience, Result

FOR_NOW, LOST = {"transient": True}, {"transient": True, "unsure": True}
REFUSALS: dict[str, tuple[Any, int, list[Any], str, int]] = {
    # kind, return code, answers of the search for its jobs; the job or the error; submissions
    "no such program": ({}, 127, [], "login node of a cluster", 1),
    "a limit of this user": ({"over_limit": True, "transient": True}, 1, [], "^no\n", 1),
    "for good": ({}, 1, [], "The request was", 1),
    "for now": (FOR_NOW, 1, [], "8", 2),
    "for now, again and again": (FOR_NOW, 1, [], "^no\n", 2),
    "no answer, but the job exists": (LOST, 1, [("7",)], "7", 1),
    "no answer, and no job": (LOST, 1, [()], "8", 2),
    "too late, and no job: it may still come": (LOST, 124, [()], "^no\n", 1),
    "no answer to the search at first": (LOST, 124, [SubmitError("?"), ("7",)], "7", 1),
    "no answer to any search": (LOST, 1, [SubmitError("?")] * 2, "^no\n", 1),
}


@pytest.mark.parametrize(("kind", "code", "answers", "end", "count"), REFUSALS.values(), ids=REFUSALS)
def test_submit_after_a_refusal(
    kind: Any, code: int, answers: list[Any], end: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions: list[Command] = []
    left = iter(answers)

    async def run(command: Command) -> Result:
        submissions.append(command)
        return Result(command.argv, code, "", "")

    async def look(*_: object) -> tuple[str, ...]:
        if isinstance(answer := next(left), SubmitError):
            raise answer
        return answer

    def read_submit(_: Result) -> str:
        if len(submissions) == 1 or "^" in end:
            raise SubmitError("no", **kind)
        return "8"

    monkeypatch.setattr(batch_client, "run", run)
    monkeypatch.setattr(batch_client, "look", look)
    command = Command(("sbatch",))
    system: Any = SimpleNamespace(
        submit=lambda *_: command, read_submit=read_submit, elements=lambda i, _: (i,), offers=lambda _: None
    )
    submitting = batch_client.submit(system, JobSpec(name="a", argv=("b",)), "", print, Patience(retries_s=(0, 0)))
    if end.isdigit():
        assert asyncio.run(submitting) == (end,)
    else:
        with pytest.raises(SubmitError, match=end):
            asyncio.run(submitting)
    assert len(submissions) == count
    assert not list(left)

"""What a cluster says while it waits: on standard error, at once, each change once."""

from __future__ import annotations

from datetime import datetime

import pytest

from hpcgpu.deploy.cluster.progress import Progress


def test_elsewhere_than_on_a_terminal_each_change_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[tuple[datetime, str]] = []
    progress = Progress(kept)
    for text in ("PENDING", "PENDING", "STARTING 0/1"):
        progress.show(text)
    progress.say("the batch system does not answer")
    progress.end()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "hpcgpu: PENDING\nhpcgpu: STARTING 0/1\nhpcgpu: the batch system does not answer\n"
    assert [line for _, line in kept] == ["PENDING", "STARTING 0/1", "the batch system does not answer"]


def test_on_a_terminal_the_line_changes_in_place_and_what_is_said_beside_it_has_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    progress = Progress([])
    progress.show("PENDING")
    progress.show("STARTING 0/1")
    progress.say("one of them died")
    progress.show("READY 1 worker")
    progress.end()
    said = capsys.readouterr()
    lines = ["\r\x1b[Khpcgpu: PENDING\r\x1b[Khpcgpu: STARTING 0/1", "hpcgpu: one of them died"]
    assert said.err == "\n".join([*lines, "\r\x1b[Khpcgpu: READY 1 worker", ""])
    assert said.out == ""


def test_quiet_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Progress([], quiet=True).show("PENDING")
    assert capsys.readouterr().err == ""

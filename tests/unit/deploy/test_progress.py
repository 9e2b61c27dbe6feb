"""What a cluster says while it waits: on standard error, at once, each change once."""

from __future__ import annotations

import asyncio
import re
from datetime import datetime
from pathlib import Path

import pytest

from hpcgpu.deploy.progress import Notebook, Progress, Terminal, _elapsed
from hpcgpu.plan.jobs import READY, Phase

COLOURS = {"UP": "32", "GONE": "31", "UNKNOWN": "31", "WILL NOT START": "31", READY: "32"}


def test_progress_elsewhere_is_a_line_per_change(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[tuple[datetime, str]] = []
    progress = Progress(kept)
    Progress([], quiet=True).show("PENDING")
    for text in ("PENDING", "PENDING", "STARTING 0/1"):
        progress.show(text)
    progress.say("the batch system does not answer")
    progress.end()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "hpcgpu: PENDING\nhpcgpu: STARTING 0/1\nhpcgpu: the batch system does not answer\n"
    assert [line for _, line in kept] == ["PENDING", "STARTING 0/1", "the batch system does not answer"]


def test_progress_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    progress = Progress([])
    progress.show("PENDING")
    progress.show("STARTING 0/1")
    progress.say("one of them died")
    progress.show("READY 1 worker")
    progress.end()
    said = capsys.readouterr()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said.err)  # without what is bold
    lines = ["\r\x1b[Khpcgpu: PENDING\r\x1b[Khpcgpu: STARTING 0/1", "hpcgpu: one of them died"]
    assert plain == "\n".join([*lines, "\r\x1b[Khpcgpu: READY 1 worker" * 2, ""])
    assert said.out == ""


@pytest.mark.parametrize("word", [READY, *(phase.value for phase in Phase)])
def test_phase_has_its_colour(word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    Terminal().show(f"job 7: {word} (why)")
    assert f"\x1b[{COLOURS.get(word, '33')}m{word}\x1b[0m" in capsys.readouterr().err


class Screen:
    """A surface that keeps what was shown on it."""

    ticks = True

    def __init__(self) -> None:
        self.shown: list[str] = []
        self.news = asyncio.Event()

    def show(self, text: str) -> None:
        self.shown.append(text)
        self.news.set()

    say = show

    def end(self) -> None:
        self.shown.append("end")


def on(screen: Screen, monkeypatch: pytest.MonkeyPatch, **options: float) -> Progress:
    monkeypatch.setattr("hpcgpu.deploy.progress.surface", lambda: screen)
    return Progress([], **options)


def test_the_time_that_passes_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use() -> list[str]:
        screen = Screen()
        progress = on(screen, monkeypatch)
        monkeypatch.setattr("hpcgpu.deploy.progress.SHORT_S", 0.0)
        progress.show("PENDING")
        screen.news.clear()
        await screen.news.wait()  # nothing has changed but the time
        progress.end()
        return screen.shown

    first, *more, last, end = asyncio.run(use())
    assert (first, last, end) == ("PENDING [0 s]", "PENDING", "end")
    assert re.fullmatch(r"PENDING \[\d+ s\]", more[0])


def test_progress_shows_only_a_long_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def use(limit_s: float) -> list[str]:
        screen = Screen()
        progress = on(screen, monkeypatch)
        monkeypatch.setattr("hpcgpu.deploy.progress.SHORT_S", limit_s)
        with progress.waiting("closing"):
            if not limit_s:
                await screen.news.wait()
        return screen.shown

    assert asyncio.run(use(60.0)) == ["end"]
    assert asyncio.run(use(0.0))[0] == "closing [0 s]"
    late = on(screen := Screen(), monkeypatch, after_s=60.0)
    late.show("STARTING 0/1")
    late.end()
    assert screen.shown == ["end"]


@pytest.mark.parametrize(
    ("seconds", "text"), [(2.9, "2 s"), (60, "1 min 00 s"), (185, "3 min 05 s"), (7860, "2 h 11 min")]
)
def test_times_are_read_at_a_glance(seconds: float, text: str) -> None:
    assert _elapsed(seconds) == text


def test_a_notebook_has_one_display_in_each_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By IPython itself."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from traitlets.config import Config

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    shell = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    try:
        with capture_output() as made:
            notebook = Notebook(shell)
            notebook.show("job 4711: PENDING")
            notebook.show("READY <2> workers")
            notebook.end()
            notebook.say("dashboard: http://127.0.0.1:1/x")
            notebook.drop("dashboard: http://127.0.0.1:1/x")  # a cluster object shows it
            notebook.drop("what was not said")
            shell.execution_count += 1
            notebook.show("closing")
    finally:
        InteractiveShell.clear_instance()
    pages = [out.data["text/html"] for out in made.outputs]
    assert len(pages) == 5
    assert "READY &lt;2&gt; workers\ndashboard: <a href=" in pages[2]
    assert "READY" in pages[3]
    assert not any("dashboard" in page for page in pages[3:])

"""The parent of a launcher does not wait for one that stays when the run has ended."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgpu.host import launched


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """What launch() does before it becomes the parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.parametrize("does", ["exec sleep 600", "trap '' TERM; echo; while :; do sleep 600; done"])
def test_a_launcher_that_stays_is_ended(tmp_path: Path, does: str) -> None:
    ended = tmp_path / "exit"
    ended.write_text("0\n")
    with subprocess.Popen(["bash", "-c", does], start_new_session=True) as launcher:
        assert launched.wait(launcher.pid, str(ended), patience_s=0.2) == 0
        launcher.returncode = 0  # it has been waited for


def test_as_long_as_the_run_has_not_ended_it_stays(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "1"]) as launcher:
        assert launched.wait(launcher.pid, str(tmp_path / "exit"), patience_s=0.1) == 0
        launcher.returncode = 0

"""The parent of a launcher does not wait for one that stays when the run has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import until

from hpcgpu.host import launched


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """What launch() does before it becomes the parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    yield
    signal.sigtimedwait({signal.SIGALRM}, 0)  # of its last look
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


WAITS = """
import signal, subprocess, sys
from hpcgpu.host import launched
launcher = subprocess.Popen(["bash", "-c", "trap 'exit 5' USR1; echo; while :; do sleep 0.05; done"])
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGUSR1})
sys.exit(launched.wait(launcher.pid, sys.argv[1], patience_s=0.1))
"""


def test_a_job_that_was_suspended_for_long_goes_on(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", WAITS, str(tmp_path / "exit")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as waits:
        assert waits.stdout
        waits.stdout.readline()
        process = psutil.Process(waits.pid)
        until(lambda: process.status() == psutil.STATUS_SLEEPING, "it waits")
        process.suspend()
        until(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")
        time.sleep(0.3)  # longer than its patience, which is what this is about
        process.resume()
        waits.send_signal(signal.SIGUSR1)
        assert waits.wait(30) == 5

"""The parent of a launcher does not wait for one that stays when the run has ended."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting import scaled, until

# In a process of its own, as it is: with one thread, and a timer that is no test's.
WAITS = """
import signal, subprocess, sys
from hpcgpu.host import launcher_parent
path, patience_s, *argv = sys.argv[1:]
waited = {signal.SIGCHLD, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
first = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
launcher = subprocess.Popen(argv, start_new_session=True, preexec_fn=first)
sys.exit(launcher_parent.wait(launcher.pid, path, patience_s=float(patience_s)))
"""


def waits(path: Path, patience_s: float, *launcher: str) -> list[str]:
    return [sys.executable, "-c", WAITS, str(path), str(patience_s), *launcher]


@pytest.mark.parametrize("does", ["exec sleep 600", "trap '' TERM; echo; while :; do sleep 600; done"])
def test_a_launcher_that_stays_is_ended(tmp_path: Path, does: str) -> None:
    ended = tmp_path / "exit"
    ended.write_text("0\n")
    assert subprocess.run(waits(ended, 0.2, "bash", "-c", does), timeout=scaled(60), check=False).returncode == 0


def test_as_long_as_the_run_has_not_ended_it_stays(tmp_path: Path) -> None:
    does = waits(tmp_path / "exit", 0.1, "bash", "-c", "sleep 1; exit 7")
    assert subprocess.run(does, timeout=scaled(60), check=False).returncode == 7


def test_a_job_that_was_suspended_for_long_goes_on(tmp_path: Path) -> None:
    launcher = "trap 'exit 5' USR1; echo; while :; do sleep 0.05; done"
    argv = waits(tmp_path / "exit", 0.1, "bash", "-c", launcher)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout
        waiting.stdout.readline()
        process = psutil.Process(waiting.pid)
        until(lambda: process.status() == psutil.STATUS_SLEEPING, "it waits")
        process.suspend()
        until(lambda: process.status() == psutil.STATUS_STOPPED, "it is stopped")
        time.sleep(0.3)  # longer than its patience, which is what this is about
        process.resume()
        waiting.send_signal(signal.SIGUSR1)
        assert waiting.wait(scaled(30)) == 5

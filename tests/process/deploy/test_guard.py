"""The guard of a client: what it costs, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import scaled

from hpcgpu.deploy.jobs import guard
from hpcgpu.deploy.jobs.record import Process
from hpcgpu.host import pids, run


def test_a_guard_costs_next_to_nothing(tmp_path: Path) -> None:
    """It waits with the modules that Python starts with, and one of ours."""
    started = guard.start(tmp_path, Process.here())
    try:
        heavy = {"asyncio", "distributed", "dask", "hpcgpu.batch", "hpcgpu.model", "json", "dataclasses", "pathlib"}
        code = (
            "import sys; before = set(sys.modules); import hpcgpu.deploy.jobs.guard; "
            f"print(sorted((set(sys.modules) - before) & {heavy!r}))"
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        assert out == "[]\n"
        assert run.is_running(started)
        assert os.getsid(started.pid) == started.pid  # no signal of our terminal reaches it
    finally:
        run.end(started)
    assert not run.is_running(started)


@pytest.mark.parametrize("name", ["detached", None])
def test_a_guard_leaves_what_was_detached_or_removed_alone(tmp_path: Path, name: str | None) -> None:
    folder = tmp_path / "run"
    if name:
        folder.mkdir()
        (folder / name).touch()
    with subprocess.Popen(["sleep", "600"]) as client:
        argv = [sys.executable, "-m", "hpcgpu.deploy.jobs.guard", str(folder), str(client.pid)]
        waiting = subprocess.Popen([*argv, str(pids.start_time(client.pid))], stderr=subprocess.PIPE, text=True)
        client.send_signal(signal.SIGKILL)
    assert waiting.communicate(timeout=scaled(60)) == (None, "")
    assert waiting.returncode == 0

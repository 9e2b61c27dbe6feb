"""A run whose memory and scratch are full ends with the reason."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ranks
from waiting import scaled

# It waits for none of its futures, so that it does not end by their errors.
SCRIPT = """
with Client() as c:
    blocks = c.map(lambda i: os.urandom(30_000_000), range(40), pure=False)
    time.sleep(600)
"""


def test_all_workers_pause_and_the_run_ends_with_the_reason(tmp_path: Path) -> None:
    inside = ["unshare", "--mount", "--map-root-user"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no mounts for users here (unshare --mount --map-root-user)")
    (tmp_path / "small").mkdir()
    prepare = f'mount -t tmpfs -o size=40M none {tmp_path}/small && exec "$@"'
    options = ["--gpus", "sim:1", "--memory-limit", "450MB", "--death-timeout", "12"]
    options += ["--local-directory", f"{tmp_path}/small"]
    argv = [*inside, "bash", "-c", prepare, "job", *ranks.command(ranks.script(tmp_path, SCRIPT), options=options)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(120), env=ranks.environment())
    assert done.returncode == 1, done.stderr
    assert "all workers have paused for 12 s, because their memory is full" in done.stderr
    assert "No space left on device" in done.stderr
    assert "hpcgpu: the run ends: all workers have paused\n" in done.stderr

"""What the README shows runs as it is written there."""

from __future__ import annotations

import subprocess

import pytest
import ranks
from pages import line
from paths import ROOT
from waiting import scaled

RESULT = "largest relative difference"


@pytest.mark.parametrize("start", ["mpirun ", "hpcgpu run "])
def test_on_this_machine(start: str) -> None:
    env = ranks.environment(PATH=f"{ranks.BIN}:/usr/bin:/bin")
    done = subprocess.run(line(start), capture_output=True, text=True, timeout=scaled(120), env=env, cwd=ROOT)
    assert (done.returncode, RESULT in done.stdout) == (0, True), done.stderr

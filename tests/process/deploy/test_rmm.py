"""A run that asks for RMM on a node that has none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import ranks
from fake_nvml import FakeGpu, compiled

from hpcgpu.errors import DOCTOR


@pytest.mark.skipif(importlib.util.find_spec("rmm") is not None, reason="RMM is here")
def test_a_run_on_a_node_without_rmm_ends_and_says_so(tmp_path: Path) -> None:
    """The NVML is a fake, the rest is real: the worker fails at its start, and the run with it."""
    nvml = compiled(tmp_path)
    env = nvml.environment([FakeGpu("0000:06:00.0", "GPU-0", size_mib=1024)])
    path = ranks.script(tmp_path, "raise SystemExit('the script ran')")
    done = ranks.run(path, options=("--rmm-pool-size", "0.5"), ranks=1, env=env)
    assert done.returncode != 0
    assert "rmm_pool_size=0.5 (set by" in done.stderr
    said, doctor = done.stderr.strip().splitlines()[-2:]
    assert "needs rmm, which is not installed" in said
    assert doctor == DOCTOR
    assert "the script ran" not in done.stderr

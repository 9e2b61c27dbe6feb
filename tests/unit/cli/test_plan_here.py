"""``hpcgpu plan`` in a job, and without a batch system: the plan for this node, and nothing runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpcgpu.cli.commands import hpcgpu
from hpcgpu.errors import HpcGpuError


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that leaves a file beside it."""
    path = tmp_path / "script.py"
    path.write_text("open(__file__ + '.ran', 'w')\n")
    return path


def said(*words: str, env: dict[str, str] | None = None) -> str:
    return str(CliRunner(env=env).invoke(hpcgpu, [*words], catch_exceptions=False, standalone_mode=False).stdout)


def sections(text: str) -> dict[str, str]:
    parts = [part.partition(":\n") for part in text.split("\n\n")]
    return {name: body for name, _, body in parts}


def test_plan_without_a_batch_system_shows_this_machine(script: Path) -> None:
    plan = sections(said("plan", "--gpus", "sim:2", "--memory-limit", "1GB", str(script), "word"))
    assert re.search(r"gpus +sim:2 +option --gpus", plan["settings"])
    assert "no job: this machine alone" in plan["job"]
    assert "1 rank and 2 workers" in plan["layout"]
    assert plan["node"].count("simulated 256.0 MiB") == 2
    assert "here 953.7 MiB" in plan["memory"]
    assert plan["command"] == f"  {script} word\n"
    assert [*script.parent.iterdir()] == [script]


def test_plan_in_a_job_shows_the_launch(script: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
    words = ("plan", "--launcher", "mpirun", "--gpus", "sim:2", "--no-dashboard", str(script))
    plan = sections(said(*words, env=job))
    assert f"hpcgpu run --gpus sim:2 --no-dashboard {script}\n" in plan["command"]
    assert "job 7 of slurm: 2 nodes" in plan["job"]
    assert "5 ranks and 4 workers; rank 0 has the scheduler" in plan["layout"]
    assert plan["command"] == f"  {said(words[0], '--script', *words[1:], env=job)}"
    assert "#SBATCH" in said("plan", "--batch", "slurm", "--script", *words[3:], env=job)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["launch"], "this is no allocation"),  # no job
        (["plan"], "no GPU can be opened"),
        (["plan", "--gpus", "sim:2", "--queue", "gpu"], "no batch system is given"),
    ],
)
def test_what_would_be_refused_is_refused(
    words: list[str], message: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(HpcGpuError, match=message):
        said(*words, str(script))

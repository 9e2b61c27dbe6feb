"""``--dry-run`` of the commands that start ranks: the plan for this node, and nothing runs."""

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


def dry(*words: str, env: dict[str, str] | None = None) -> str:
    return CliRunner(env=env).invoke(hpcgpu, [*words], catch_exceptions=False, standalone_mode=False).output


def sections(text: str) -> dict[str, str]:
    parts = [part.partition(":\n") for part in text.split("\n\n")]
    return {name: body for name, _, body in parts}


def test_one_process(script: Path) -> None:
    found = sections(dry("run", "--dry-run", "--gpus", "sim:2", "--memory-limit", "1GB", str(script), "word"))
    assert re.search(r"gpus +sim:2 +option --gpus", found["settings"])
    assert "no job: this machine alone" in found["job"]
    assert "1 rank and 2 workers" in found["layout"]
    assert found["node"].count("simulated 256.0 MiB") == 2
    assert "here 953.7 MiB" in found["memory"]
    assert found["command"] == f"  {script} word\n"
    assert [*script.parent.iterdir()] == [script]


def test_a_launch_shows_its_line(script: Path) -> None:
    words = ("--launcher", "mpirun", "--gpus", "sim:2", str(script))
    found = sections(dry("launch", "--dry-run", *words))
    assert "3 ranks and 2 workers; rank 0 has the scheduler" in found["layout"]
    assert found["command"] == f"  {dry('launch', '--print', *words)}"
    assert [*script.parent.iterdir()] == [script]


def test_of_several_ranks_the_first_one_says_it(script: Path) -> None:
    words = ("run", "--dry-run", "--gpus", "sim:2", str(script))
    world = {"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    first = dry(*words, env={**world, "OMPI_COMM_WORLD_RANK": "0"})
    assert "3 ranks of Open MPI mpirun: they divide the work when they meet" in sections(first)["job"]
    assert "layout" not in sections(first)
    assert dry(*words, env={**world, "OMPI_COMM_WORLD_RANK": "1"}) == ""


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "--dry-run"], "this is no allocation"),  # no job
        (["run", "--dry-run"], "no GPU can be opened"),
        (["run", "--dry-run", "--gpus", "sim:2", "--walltime", "1h"], "walltime"),
    ],
)
def test_what_would_be_refused_is_refused(
    words: list[str], said: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(HpcGpuError, match=said):
        dry(*words, str(script))

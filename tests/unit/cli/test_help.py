"""What the command line says of itself: groups, defaults, examples, completion, facts as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import commands
import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner
from paths import ROOT

from hpcgpu import __version__
from hpcgpu.cli.command import Command, Group, example_lines
from hpcgpu.cli.commands import hpcgpu, worker
from hpcgpu.config.layers import ENTRY_POINTS, default_of, unused
from hpcgpu.model.settings import GROUPS, options, user_name
from hpcgpu.worker import gpu

ALL = commands.commands()


def said(*words: str) -> str:
    done = CliRunner(env={"HPCGPU_SITE": ""}).invoke(hpcgpu, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return str(done.output)


def test_every_option_is_below_one_heading() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(user_name(f) for f in options())


@pytest.mark.parametrize("entry_point", ["run", "launch"])
def test_help_has_what_means_something_with_its_default(entry_point: str) -> None:
    text = " ".join(said(entry_point, "--help").split())
    (known,) = [name for name in ENTRY_POINTS if name == f"hpcgpu {entry_point}"]
    for f in options():
        flag = f"--{user_name(f).replace('_', '-')}"
        assert (f"{flag} " in text or f"{flag}, " in text) == (user_name(f) not in unused(known)), flag
    assert "pool of the RAPIDS Memory Manager: bytes, or a fraction of the GPU's memory; 0 = none [default: 0]" in text
    assert "[default: 0.8]" in text
    assert "--security / --no-security encrypt every connection (TLS)" in text
    assert not re.search(r"\b(True|False|None|\w+='|[a-z]+_[a-z_]+)\b", text.partition("Examples:")[0]), (
        "Python in help"
    )
    for several in ("--env NAME=VALUE ", "--resources NAME=NUMBER ", "--nics NAME "):
        assert re.search(rf"{several}.{{,200}}; may be repeated", text), several
    limit = next(f for f in options() if f.name == "memory_limit")
    assert f"[default: {default_of(limit)}]" in text


GROUPED = {"hpcgpu": hpcgpu, "hpcgpu site": hpcgpu.commands["site"]}


@pytest.mark.parametrize("typed", GROUPED)
@pytest.mark.parametrize("columns", ["80", "200"])
def test_a_list_of_commands_fits_a_terminal_and_cuts_no_summary(
    typed: str, columns: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = said(*typed.split()[1:], "--help")
    assert "..." not in text.partition("\n\n")[2]  # after the usage line
    group = GROUPED[typed]
    assert isinstance(group, click.Group)
    for name, command in group.commands.items():
        summary = command.short_help or ""
        assert 0 < len(summary) <= 55, name
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE), name


def test_help_shows_headings_completion_and_optional_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = said("--help")
    assert '\n  eval "$(_HPCGPU_COMPLETE=bash_source hpcgpu)"\n' in text
    headings = ["Try it without a GPU:", "On a cluster:", "In a job, or on one machine:", "Running clusters:", "Facts:"]
    assert sorted(headings, key=text.index) == headings
    assert "\nCommands:" not in text, "a command is below no heading"
    script = "SCRIPT [ARGUMENTS]..."
    for command, usage in {"run": script, "launch": script, "plan": f"[{script}]"}.items():
        assert f"Usage: hpcgpu {command} [OPTIONS] {usage}\n" in said(command, "--help")
    text = str(CliRunner().invoke(worker, ["--help"], catch_exceptions=False).output)
    assert [text.index(f"\n{heading}:\n") for heading in ("Options", "Size", "Memory", "Binding", "Examples")]
    assert [line for line in worker.examples if line not in text] == []
    assert gpu.commands.keys() == {"config", "worker"}  # of dask gpu


@pytest.mark.parametrize("typed", [*GROUPED, *ALL])
def test_every_command_has_examples_that_may_be_typed(typed: str) -> None:
    command = {**GROUPED, **ALL}[typed]
    assert isinstance(command, (Command, Group))
    assert command.examples
    shown = said(*typed.split()[1:], "--help")
    for line, printed in zip(command.examples, example_lines(command.examples), strict=True):
        commands.check(line)
        assert f"  {printed}\n" in shown


FACTS = {
    "hpcgpu version": dict,
    "hpcgpu template": dict,
    "hpcgpu topo --gpus sim:2": dict,
    "hpcgpu plan --batch slurm --gpus sim:2 --no-ask": dict,
    "hpcgpu ps": list,
    "hpcgpu site list": dict,
    "hpcgpu site show polaris": dict,
    "hpcgpu site check site_configs/polaris.yaml": dict,
    "hpcgpu plan --gpus sim:2 examples/svd.py": dict,
    "hpcgpu plan --launcher mpirun --gpus sim:2 examples/svd.py": dict,
    "hpcgpu report --output REPORT": dict,
}


@pytest.mark.parametrize("typed", FACTS)
def test_facts_are_json(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    entry_point, *words = typed.replace("REPORT", str(tmp_path / "report")).split()[1:]
    script = words.pop() if words[-1:] == ["examples/svd.py"] else None
    typed_words = [entry_point, *words, "--json", *filter(None, [script])]  # what comes after a script is the script's
    assert isinstance(json.loads(said(*typed_words)), FACTS[typed])


def test_commands_with_json_print_facts() -> None:
    """Texts to be changed and submitted, a log, what a script prints, and what was done."""
    without = {name for name, command in ALL.items() if not any(p.name == "as_json" for p in command.params)}
    texts = {"hpcgpu site new", "hpcgpu logs", "hpcgpu run", "hpcgpu launch"}
    assert without == {*texts, "hpcgpu demo", "hpcgpu stop", "hpcgpu worker"}
    facts = json.loads(said("version", "--json"))
    assert facts["hpcgpu"] == __version__
    assert {"dask", "distributed", "numpy", "msgspec"} <= facts["python"]["packages"].keys()


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("hpcgpu pl", ["plan"]),
        ("hpcgpu plan --memory-pol", ["--memory-policy"]),
        ("hpcgpu run --memory-policy pref", ["preferred-many"]),
        ("hpcgpu plan --site perl", ["perlmutter"]),
        ("hpcgpu template slurm-a", ["slurm-apptainer.sbatch", "slurm-array.sbatch"]),
        ("hpcgpu site show perl", ["perlmutter"]),
        ("hpcgpu site check site_c", ["file:site_c"]),
        ("hpcgpu launch --gpus 4 my_s", ["file:my_s"]),
        ("hpcgpu logs my", ["my-run"]),
    ],
)
def test_the_shell_completes(typed: str, offered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcgpu.deploy.jobs.Run.all", lambda _: [SimpleNamespace(name="my-run", jobs=["4711"])])
    *words, incomplete = typed.split()[1:]
    completions = BashComplete(hpcgpu, {}, "hpcgpu", "_HPCGPU_COMPLETE").get_completions(words, incomplete)
    assert [f"{c.type}:{c.value}".removeprefix("plain:") for c in completions] == offered


TO_TYPE = (
    ({}, "", "hpcgpu run --gpus sim:4 my_script.py # on this machine"),
    ({"NERSC_HOST": "perlmutter"}, "sinfo", "hpcgpu plan --site perlmutter --gpus 8 # look before you submit"),
    ({}, "pbsnodes", "hpcgpu plan --batch pbs --nodes 2 --gpus-per-node 4 # look before you submit"),
    ({"SLURM_JOB_ID": "7"}, "sinfo", "hpcgpu launch my_script.py # on all nodes of this job"),
)


@pytest.mark.parametrize("case", TO_TYPE)
def test_hpcgpu_alone_on_a_terminal_shows_what_to_type(case: Any, tmp_path: Path, monkeypatch: Any) -> None:
    environ, program, line = case
    (tmp_path / (program or "none")).touch(mode=0o755)
    monkeypatch.setattr("hpcgpu.cli.commands.sys", SimpleNamespace(stdout=SimpleNamespace(isatty=lambda: True)))
    done = CliRunner(env={"PATH": str(tmp_path), **environ}).invoke(hpcgpu, catch_exceptions=False)
    lines = [" ".join(shown.split()) for shown in done.output.splitlines()]
    assert line in lines
    for shown in lines[2:-2]:
        commands.check(shown)

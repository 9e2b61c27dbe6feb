"""What the command line says of itself: groups, defaults, examples, completion, facts as JSON."""

from __future__ import annotations

import json
import os
import subprocess

import click
import commands
import pytest
import ranks
from click.testing import CliRunner

from hpcgpu import __version__
from hpcgpu.cli.command import Command, example_lines
from hpcgpu.cli.commands import hpcgpu
from hpcgpu.cli.worker import worker
from hpcgpu.config.entry_points import ENTRY_POINTS, unused
from hpcgpu.config.numpydoc import default_of
from hpcgpu.model.settings import GROUPS, options, user_name

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
    assert "--security / --no-security False turns TLS off" in text  # None: neither on nor off
    limit = next(f for f in options() if f.name == "memory_limit")
    assert f"[default: {default_of(limit)}]" in text


def test_the_worker_has_headings_and_examples_too() -> None:
    text = str(CliRunner().invoke(worker, ["--help"], catch_exceptions=False).output)
    assert [text.index(f"\n{heading}:\n") for heading in ("Options", "Size", "Memory", "Binding", "Examples")]
    for line in worker.examples:
        assert line in text
        words = line.split()[3:]
        words = ["tls://10.0.0.1:1" if word == "scheduler.json" else word for word in words]
        worker.make_context("worker", [word for word in words if word != "--scheduler-file"])


def test_commands_stand_below_headings() -> None:
    text = said("--help")
    headings = ["Begin:", "Run a script on GPUs:", "Clusters that are there:", "Facts:"]
    assert sorted(headings, key=text.index) == headings
    assert "\nCommands:" not in text, "a command is below no heading"


@pytest.mark.parametrize("typed", [name for name, command in ALL.items() if isinstance(command, Command)])
def test_examples_are_lines_that_may_be_typed(typed: str) -> None:
    command = ALL[typed]
    assert isinstance(command, Command)
    shown = said(*typed.split()[1:], "--help")
    for line, printed in zip(command.examples, example_lines(command.examples), strict=True):
        commands.check(line)
        assert f"  {printed}\n" in shown


def test_a_line_that_may_not_be_typed_is_found() -> None:
    for line in ("hpcgpu plan --gpsu 4", "hpcgpu plam", "sbatch job.sh"):
        with pytest.raises((click.UsageError, ValueError)):
            commands.check(line)


FACTS = {
    "hpcgpu version": dict,
    "hpcgpu template": dict,
    "hpcgpu topo --gpus sim:2": dict,
    "hpcgpu plan --batch slurm --gpus sim:2 --no-ask": dict,
    "hpcgpu ps": list,
    "hpcgpu site list": dict,
    "hpcgpu site show polaris": dict,
}


@pytest.mark.parametrize("typed", FACTS)
def test_facts_are_json(typed: str) -> None:
    assert isinstance(json.loads(said(*typed.split()[1:], "--json")), FACTS[typed])


def test_versions_name_what_workers_share() -> None:
    found = json.loads(said("version", "--json"))
    assert found["hpcgpu"] == __version__
    assert {"dask", "distributed", "numpy", "msgspec"} <= found["python"]["packages"].keys()
    assert said("version").startswith(f"hpcgpu {__version__}, Python 3.")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("hpcgpu pl", ["plan"]),
        ("hpcgpu plan --memory-pol", ["--memory-policy"]),
        ("hpcgpu run --memory-policy pref", ["preferred-many"]),
        ("hpcgpu plan --site perl", ["perlmutter"]),
        ("hpcgpu template slurm-a", ["slurm-apptainer.sbatch", "slurm-array.sbatch"]),
    ],
)
def test_the_shell_completes(typed: str, offered: list[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split()) - 1), "_HPCGPU_COMPLETE": "bash_complete"}
    argv = [str(ranks.BIN / "hpcgpu")]
    done = subprocess.run(argv, env={**os.environ, **words}, capture_output=True, text=True, timeout=60)
    assert [line.partition(",")[2] for line in done.stdout.splitlines()] == offered

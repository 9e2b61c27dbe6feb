"""hpcgpu plan, in a job and without one, and hpcgpu doctor on a login node: from what is typed to what is printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from paths import ROOT, TOPOLOGIES
from programs import program

from hpcgpu.cli.commands import hpcgpu
from hpcgpu.config.values import as_typed
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.plan.doctor.login import LOGIN_CHECKS

POLARIS = ("--site", "polaris", "--gpus", "8", "--account", "x", "--walltime", "1h")
POLARIS = (*POLARIS, "--no-ask", "--job-extra-directives", "-l filesystems=home")
FORGE = ("--batch", "slurm", "--nodes", "2", "--gpus-per-node", "4", "--no-ask")
# What sbatch --test-only says of Slurm 22.05.8, on standard error, and Slurm's words for a wrong account.
TAKEN = "sbatch: Job 42 to start at 2026-11-23T06:38:00 using 8 processors on nodes node[1-2] in partition main"
REFUSED = "allocation failure: Invalid account or account/partition combination specified"


@pytest.fixture(autouse=True)
def at_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HpcGpuError, "form", as_typed)


def invoke(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(hpcgpu, ["plan", *words], catch_exceptions=False)


def stands(*words: str) -> str:
    """The place of the only line of the file with these words."""
    file = (ROOT / "site_configs/polaris.yaml").read_text().splitlines()
    [line] = [i for i, text in enumerate(file, 1) if all(word in text for word in words)]
    return f"site polaris, site_configs/polaris.yaml:{line}"


def test_a_known_site_is_enough() -> None:
    text = invoke(*POLARIS).output
    lines = [re.sub("   +", "  ", line.strip()) for line in text.splitlines()]
    for line in (
        f"nodes  2  option --gpus; 4 on a node: {stands('    gpus: 4')}",
        f"queue  debug  {stands('queue: debug')}",
        f"dialect.gpus  none  {stands('gpus: none')}",
        "9 ranks and 8 workers; rank 0 has the scheduler",
        f"disk: /local/scratch ({stands('path: /local/scratch')})",
        "#PBS -l select=2:system=polaris",
    ):
        assert line in lines
    assert "worker-3  0000:13:00.0 A100-SXM4-40GB  0     8: 0-7 " in text


def test_settings_are_printed_as_people_write_them() -> None:
    several = ("--env", "UCX_TLS=rc,cuda", "--env", "A=1", "--resources", "GPU=1", "--nics", "mlx5_0,mlx5_1")
    directives = ("--job-extra-directives", "--constraint=gpu", "--job-extra-directives", "-C x")
    sizes = ("--memory", "64GiB", "--walltime", "90m", "--drain", "30", "--device-memory-limit", "0.5")
    words = (*several, *directives, *sizes, "--jit-unspill", "--cores", "2", "--cores-per-gpu", "2")
    lines = [" = ".join(re.split("   *", line.strip())[:2]) for line in invoke(*FORGE, *words).output.splitlines()]
    expected = {"env = UCX_TLS=rc,cuda A=1", "resources = GPU=1", "nics = mlx5_0 mlx5_1", "memory = 64.0 GiB"}
    expected |= {"job_extra_directives = --constraint=gpu '-C x'", "walltime = 01:30:00", "drain = 30 s"}
    assert expected | {"device_memory_limit = 0.5", "jit_unspill = true", "cores = 2"} <= {*lines}
    settings = lines[lines.index("settings:") : lines.index("request:")]
    assert not [line for line in settings if any(word in line for word in ("mappingproxy", "{", "True", "('"))]


def test_a_file_tells_what_a_node_is_like() -> None:
    (machine,) = TOPOLOGIES.glob("epyc-corona.xml")
    assert "as " + str(machine) + " describes it" in invoke(*FORGE, "--gpus", "sim:4", "--from", str(machine)).output
    text = invoke(*FORGE).output
    assert "the nodes are unknown: give --from FILE" in text
    assert "warning: 4 cores for 4 GPUs of each node: ask for more, --cores-per-gpu\n" in text


def test_two_plans_are_compared_but_no_other_file(tmp_path: Path) -> None:
    before = tmp_path / "before.json"
    before.write_text(invoke(*FORGE, "--json").output)
    layout = json.loads(before.read_text())["layout"]
    assert [(node["ranks"], node["workers"]) for node in layout] == [([0, 1, 2, 3, 4], 4), ([5, 6, 7, 8], 4)]
    same = CliRunner().invoke(hpcgpu, ["plan", *FORGE, "--diff", str(before)], standalone_mode=False)
    assert (same.return_value, same.output) == (0, "")
    words = ["plan", *FORGE, "--walltime", "2h", "--diff", str(before)]
    other = CliRunner().invoke(hpcgpu, words, standalone_mode=False)
    assert other.return_value == 1
    assert "request.time limit: not requested (default) -> 02:00:00 (option --walltime)" in other.output
    assert "script: +#SBATCH --time=02:00:00" in other.output
    for text in ("{", "[]", None):
        before.write_text(text) if text else before.unlink()
        done = CliRunner().invoke(hpcgpu, ["plan", *FORGE, "--diff", str(before)], standalone_mode=False)
        assert isinstance(done.exception, ConfigError)
        assert f"write one: hpcgpu plan --json > {before}" in str(done.exception)


def test_each_setting_says_where_it_was_set(tmp_path: Path) -> None:
    """In a process of its own, since Dask reads its files when it is imported."""
    file = tmp_path / "mine.yaml"
    file.write_text("hpcgpu: {queue: gpu, walltime: 1h, account: theirs}\n")
    (tmp_path / "before.yaml").write_text("hpcgpu: {queue: other, site: none}\n")
    more = {"DASK_CONFIG": str(tmp_path), "DASK_HPCGPU__WALLTIME": "2h", "HPCGPU_ACCOUNT": "me", "HOME": str(tmp_path)}
    more["COLUMNS"] = "300"
    argv = [sys.executable, "-m", "hpcgpu", "plan", *FORGE]
    text = subprocess.run(argv, capture_output=True, text=True, check=True, env={**os.environ, **more}).stdout
    for line in (
        "nodes  2  option --nodes",
        "account  me  HPCGPU_ACCOUNT",
        f"queue  gpu  dask config hpcgpu.queue, {file}",
        "walltime  02:00:00  dask config hpcgpu.walltime, DASK_HPCGPU__WALLTIME",
        f"site  none  dask config hpcgpu.site, {tmp_path / 'before.yaml'}",
    ):
        assert line in [re.sub("   +", "  ", row.strip()) for row in text.splitlines()]


# --- in a job, and without a batch system


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
    assert plan["command"].endswith(f"/hpcgpu run --gpus sim:2 --memory-limit 1GB {script} word\n"), plan["command"]
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


# --- programs in PATH answer as Slurm does


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login node with an sbatch that keeps what it is asked, and a home of its own."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SCRATCH", raising=False)
    return tmp_path


def answer(folder: Path, words: str, code: int = 0) -> None:
    asked = f'echo "$@" > {folder}/asked; cat >> {folder}/asked'
    program(folder / "sbatch", f'{asked}\necho "{words}" >&2\nexit {code}')


def examine(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(hpcgpu, ["doctor", *words], standalone_mode=False)


def findings(*words: str) -> dict[str, dict[str, str]]:
    done = examine("--json", *words)
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_each_check_has_a_line_and_nothing_is_submitted(slurm: Path) -> None:
    answer(slurm, TAKEN)
    done = examine("--nodes", "2", "--gpus-per-node", "4", "--queue", "main")
    assert done.return_value == 0
    lines = [re.split("  +", line) for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert lines[0] == ["name", "verdict", "seen"]
    assert [line[0] for line in lines[1:]] == [check.name for check in LOGIN_CHECKS]
    assert "slurm would take the job: 2026-11-23T06:38:00 on node[1-2] in partition main" in done.stdout
    asked = (slurm / "asked").read_text()
    assert asked.startswith("--test-only\n")
    assert "#SBATCH --nodes=2\n" in asked
    assert "#SBATCH --partition=main\n" in asked


def test_a_wrong_account_is_a_failure_and_no_answer_is_none(slurm: Path) -> None:
    answer(slurm, REFUSED, 1)
    done = examine("--gpus-per-node", "4", "--account", "nobody")
    assert done.return_value == 1
    assert REFUSED in done.stdout
    assert "--account NAME" in done.stdout
    answer(slurm, "sbatch: error: Unable to contact slurm controller (connect failure)", 1)
    request = findings("--gpus-per-node", "4")["job request"]
    assert request["verdict"] == "not looked at"
    assert "Unable to contact slurm controller" in request["seen"]


@pytest.mark.parametrize(
    ("queue", "verdict", "words"),
    [
        ("", "not looked at", "--submit"),
        ("workq", "not looked at", "its queue workq takes jobs"),
        ("none", "failed", "open queues: workq, debug"),
    ],
)
def test_pbs_is_asked_about_the_queue(slurm: Path, queue: str, verdict: str, words: str) -> None:
    queues = {name: {"enabled": "True", "started": "True"} for name in ("workq", "debug")}
    answer_ = json.dumps({"Queue": {**queues, "closed": {"enabled": "False"}}})
    program(slurm / "qstat", f"[ $1 = -Q ] || exit 1\necho '{answer_}'")
    more = ("--queue", queue) if queue else ()
    request = findings("--batch", "pbs", "--gpus-per-node", "4", *more)["job request"]
    assert request["verdict"] == verdict
    assert words in request["seen"]


def test_without_a_batch_system_the_rest_is_looked_at(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(slurm))
    found = findings()
    assert found["job request"]["seen"].startswith("no batch system here")
    assert found["home"]["verdict"] in ("ok", "warning")
    assert list(slurm.iterdir()) == []
    assert found["scratch"]["verdict"] == "not looked at"
    monkeypatch.setenv("SCRATCH", str(slurm))
    assert str(slurm) in findings()["scratch"]["seen"]


def test_what_is_typed_wrong_is_an_error_of_usage(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(slurm, TAKEN)
    with pytest.raises(ConfigError, match="set by option --device-memory-limit"):
        raise examine("--gpus-per-node", "4", "--device-memory-limit", "1.5").exception
    with pytest.raises(ConfigError, match="the number of GPUs of each node"):
        raise examine("--submit").exception
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(ConfigError, match="set by option --device-memory-limit"):
        raise examine("--device-memory-limit", "1.5").exception


def test_what_qsub_refuses_is_a_line_too(slurm: Path) -> None:
    """The words are those of tests/data/batch/pbs/head/02-qsub-bad-queue.txt."""
    program(slurm / "qsub", "echo 'qsub: Unknown queue' >&2\nexit 170")
    done = examine("--submit", "--batch", "pbs", "--gpus-per-node", "4", "--queue", "none")
    assert done.return_value == 1
    assert "qsub: Unknown queue" in done.stdout
    assert "give a queue that takes such a job: --queue NAME; qstat -Q lists them" in done.stdout
    assert list((slurm / ".hpcgpu" / "runs").iterdir()) == []

"""``hpcgpu doctor`` on a login node, from what is typed to what is printed; programs in PATH answer as Slurm does."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpcgpu.cli.commands import hpcgpu
from hpcgpu.errors import ConfigError
from hpcgpu.plan.doctor import LOGIN_CHECKS

# What sbatch --test-only says of Slurm 22.05.8, on standard error, and Slurm's words for a wrong account.
TAKEN = "sbatch: Job 42 to start at 2026-11-23T06:38:00 using 8 processors on nodes node[1-2] in partition main"
REFUSED = "allocation failure: Invalid account or account/partition combination specified"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A login node with an sbatch that keeps what it is asked, and a home of its own."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SCRATCH", raising=False)
    return tmp_path


def answer(folder: Path, words: str, code: int = 0) -> None:
    program = folder / "sbatch"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {folder}/asked; cat >> {folder}/asked\necho "{words}" >&2\nexit {code}\n'
    )
    program.chmod(0o755)


def invoke(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "300"}).invoke(
        hpcgpu, ["doctor", *words], standalone_mode=False, catch_exceptions=True
    )


def findings(*words: str) -> dict[str, dict[str, str]]:
    done = invoke("--json", *words)
    return {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}


def test_each_check_has_a_line_and_nothing_is_submitted(slurm: Path) -> None:
    answer(slurm, TAKEN)
    done = invoke("--nodes", "2", "--gpus-per-node", "4", "--queue", "main")
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
    done = invoke("--gpus-per-node", "4", "--account", "nobody")
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
    program = slurm / "qstat"
    queues = {name: {"enabled": "True", "started": "True"} for name in ("workq", "debug")}
    answer_ = json.dumps({"Queue": {**queues, "closed": {"enabled": "False"}}})
    program.write_text(f"#!/bin/sh\n[ $1 = -Q ] || exit 1\necho '{answer_}'\n")
    program.chmod(0o755)
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
        raise invoke("--gpus-per-node", "4", "--device-memory-limit", "1.5").exception
    with pytest.raises(ConfigError, match="the number of GPUs of each node"):
        raise invoke("--submit").exception
    monkeypatch.setenv("PATH", "/none")
    with pytest.raises(ConfigError, match="set by option --device-memory-limit"):
        raise invoke("--device-memory-limit", "1.5").exception


def test_what_qsub_refuses_is_a_line_too(slurm: Path) -> None:
    """The words are those of tests/data/batch/pbs/head/02-qsub-bad-queue.txt."""
    program = slurm / "qsub"
    program.write_text("#!/bin/sh\necho 'qsub: Unknown queue' >&2\nexit 170\n")
    program.chmod(0o755)
    done = invoke("--submit", "--batch", "pbs", "--gpus-per-node", "4", "--queue", "none")
    assert done.return_value == 1
    assert "qsub: Unknown queue" in done.stdout
    assert "give a queue that takes such a job: --queue NAME; qstat -Q lists them" in done.stdout
    assert list((slurm / ".hpcgpu" / "doctor").iterdir()) == []

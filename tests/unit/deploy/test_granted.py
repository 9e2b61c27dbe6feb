"""What ``hpcgpu launch`` asks PBS for, and what it says when there is no answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from paths import BATCH
from recordings import records

from hpcgpu.deploy import preview, start
from hpcgpu.errors import LaunchError
from hpcgpu.host import host_memory, run
from hpcgpu.model import Allocation, Command, HostMemory, Result, Settings
from hpcgpu.model.allocation import ALL_OF_THE_NODE

JOB = Allocation(batch="pbs", job_id="0.login01")
ALL = HostMemory(64 << 30, ALL_OF_THE_NODE)


def answer(monkeypatch: pytest.MonkeyPatch, result: Result, granted: HostMemory = ALL) -> list[Command]:
    asked: list[Command] = []

    def run_sync(command: Command) -> Result:
        asked.append(command)
        return result

    monkeypatch.setattr(run, "run_sync", run_sync)
    monkeypatch.setattr(host_memory, "memory_limit", lambda: granted)
    return asked


def test_ranks_are_told_what_pbs_has_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    record = next(records(BATCH / "pbs/head/38-memory-granted.txt"))
    asked = answer(monkeypatch, Result((), 0, record.stdout))
    assert start.memory_env(Settings(), JOB) == (("HPCGPU_GRANTED_MEMORY", f"node1={2 << 30},node2={1 << 30}"),)
    assert [command.argv for command in asked] == [("qstat", "-f", "-F", "json", "0.login01")]
    assert start.memory_env(Settings(), Allocation()) == start.memory_env(Settings(), JOB, "member") == ()
    assert len(asked) == 1


def test_unanswered_memory_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    late = Result((), 124, "", "qstat: no answer in 10 s; it was killed\n")
    answer(monkeypatch, late)
    assert start.memory_env(Settings(), JOB) == ()
    words = "the job's memory is unknown, so its workers share all memory of their node: qstat did not answer: "
    assert capsys.readouterr().err == f"hpcgpu: {words}qstat: no answer in 10 s; it was killed\n"
    assert start.memory_env(Settings(memory_bytes=1 << 30), JOB) == ()
    answer(monkeypatch, late, HostMemory(1 << 30, "cgroup /pbs_jobs.service/jobid/0.login01"))
    assert start.memory_env(Settings(), JOB) == ()
    assert capsys.readouterr().err == ""


def test_topo_plans_with_it_and_asks_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    record = next(records(BATCH / "pbs/head/38-memory-granted.txt"))
    asked = answer(monkeypatch, Result((), 0, record.stdout))
    monkeypatch.setattr(preview.socket, "gethostname", lambda: "node1")
    monkeypatch.setenv("PBS_JOBID", "0.login01")
    said = preview.plan_machine(preview.Selection(gpus="sim:2x64MiB"), {}, "test").table.to_text()
    assert said.count("its share of 2.0 GiB, mem= of PBS job 0.login01") == 1  # of both workers
    monkeypatch.setenv("HPCGPU_JOB_NODES", "2")
    preview.plan_machine(preview.Selection(gpus="sim:2x64MiB"), {}, "test")
    assert len(asked) == 1


def test_a_srun_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mpirun, which answers, does not replace it: on a slow login node every job would get another launcher."""
    for program, line in {"srun": "exec sleep 60", "mpirun": "echo 'mpirun (Open MPI) 5.0.11'"}.items():
        (tmp_path / program).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setattr(start, "_QUERY_S", 1.0)
    with pytest.raises(LaunchError, match=r"srun --mpi=list has not answered in 1 s\..* try again"):
        start.ranks_launch(Settings())

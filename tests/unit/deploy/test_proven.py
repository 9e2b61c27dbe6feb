"""Jobs that wait for what there is not: the batch system's reason is the suspicion, what it has is the proof."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from paths import BATCH
from recordings import records

from hpcgpu.batch import Slurm
from hpcgpu.deploy.jobs.batch_client import proven, submit
from hpcgpu.errors import SubmitError
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Patience, Result

RECORDED = {record.command: record for record in records(BATCH / "slurm" / "22.05.8" / "19-offers.txt")}
SINFO = next(record.stdout for command, record in RECORDED.items() if "--partition=low" in command)
LOW = JobSpec(name="a", argv=("true",), queue="low", nodes=3, walltime_s=7200)
WAITS = JobStatus(JobState.PENDING, "PENDING", "PartitionNodeLimit", advice="fewer nodes=, or another queue=")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """A Slurm whose sinfo answers as it was recorded, and whose sbatch refuses."""
    for name, text in {
        "sinfo": f'echo "$@" >> {tmp_path}/asked\ncat << END\n{SINFO}END\n',
        "sbatch": "echo 'Requested node configuration is not available' >&2; exit 1\n",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Slurm()


def test_a_job_that_can_never_run_is_stuck_with_what_to_change(slurm: Slurm, tmp_path: Path) -> None:
    others = {"2": replace(WAITS, state=JobState.RUNNING), "3": JobStatus(JobState.PENDING, "PENDING", "Priority")}
    found = asyncio.run(proven(slurm, LOW, {"1": WAITS, **others}))
    assert {job_id: found[job_id] for job_id in others} == others
    assert found["1"].state is JobState.STUCK
    assert found["1"].reason == (
        "PartitionNodeLimit: walltime=02:00:00, but queue low has a limit of 01:30:00; "
        "nodes=3, but queue low gives a job 2 at most"
    )
    assert (tmp_path / "asked").read_text().count("\n") == 1  # however many jobs


def test_without_proof_it_waits_on(slurm: Slurm, tmp_path: Path) -> None:
    could = replace(LOW, nodes=2, walltime_s=60)  # a limit of another kind, such as a QOS's
    assert asyncio.run(proven(slurm, could, {"1": WAITS})) == {"1": WAITS}
    priority = {"1": JobStatus(JobState.PENDING, "PENDING", "Priority")}
    (tmp_path / "asked").unlink()
    assert asyncio.run(proven(slurm, LOW, priority)) == priority
    for own in ("--nodes=2", "-p other", "--qos=big", "--gpus-per-task=1"):  # nobody knows what is asked for
        assert asyncio.run(proven(slurm, replace(LOW, extra_directives=(own,)), {"1": WAITS})) == {"1": WAITS}
    assert not (tmp_path / "asked").exists()
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert asyncio.run(proven(slurm, LOW, {"1": WAITS})) == {"1": WAITS}


def test_a_refusal_says_what_there_is_not(slurm: Slurm) -> None:
    asked = replace(LOW, nodes=1, walltime_s=60, gpus_per_node=5)
    with pytest.raises(SubmitError, match="not available") as caught:
        asyncio.run(submit(slurm, asked, slurm.script(asked), print, Patience()))
    assert str(caught.value).splitlines()[-1] == "gpus_per_node=5, but the nodes of queue low have 4 at most"


@pytest.mark.parametrize(
    "dialect", [Slurm(gpus="none"), Slurm(cpus=False), Slurm(memory="none"), Slurm(gpu_type="v100")]
)
def test_what_a_sites_jobs_do_not_ask_for_is_not_compared(dialect: Slurm) -> None:
    command = dialect.offers(LOW)
    assert isinstance(command, Command)
    result = next(record for line, record in RECORDED.items() if "--partition=low" in line)
    [offer] = dialect.read_offers(Result(command.argv, 0, result.stdout, ""))
    assert (offer.gpus is None) == (dialect.gpus == "none")
    assert (offer.cpus is None) == (not dialect.cpus)
    assert (offer.memory_bytes is None) == (dialect.memory == "none")
    assert offer.gpus in ((0,) if dialect.gpu_type else (None, 4))

"""All jobs of a cluster in one loop: one question for the job with the scheduler and those that come and go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
from fleets import make_fleet, make_run
from paths import BATCH
from recordings import records
from waiting import when

from hpcgpu.batch import Slurm
from hpcgpu.deploy.jobs import Run
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.deploy.jobs.runs import Jobs
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.model import JobSpec, JobState, Patience
from hpcgpu.plan.jobs import Job, describe
from hpcgpu.plan.jobs.request import Policy

HEAD, MEMBER = "41", "42"
QUIET = Policy(patience=Patience(ask_s=3600, news_s=3600))  # asks when it is told to
LISTED = next(
    r.stdout for r in records(BATCH / "slurm" / "22.05.8" / "17-node-died.txt") if r.command.startswith("squeue ")
)


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A squeue that knows both jobs, and what it was asked; where there is a file "down", it does not answer."""
    (tmp_path / "listed").write_text(LISTED)
    down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    for name, answer in (("squeue", f"cat {tmp_path}/listed"), ("sinfo", "true")):
        (tmp_path / name).write_text(
            f'#!/bin/sh\necho "$0 $@" >> {tmp_path}/asked\n'
            f'[ ! -e {tmp_path}/down ] || {{ echo "{down}" >&2; exit 1; }}\n{answer}\n'
        )
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def asked() -> list[str]:
        there = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
        return [line for line in there if "/squeue " in line]

    return asked


def recorded(job_id: str, folder: Path) -> Job:
    return Job(id=job_id, role="head", log=str(folder / "log"), exit_file=str(folder / f"exit-{job_id}"))


def looked_after(tmp_path: Path, policy: Policy = QUIET, **calls: Any) -> Fleet:
    """Return the fleet of a run with a head job."""
    fleet = make_fleet(make_run(tmp_path / "run", Slurm()), policy, **calls)
    fleet.add_head(recorded(HEAD, tmp_path))
    return fleet


def test_all_jobs_are_one_question(questions: Callable[[], list[str]], tmp_path: Path) -> None:
    async def body() -> None:
        jobs = make_run(tmp_path / "run", Slurm())
        jobs.add([recorded(HEAD, tmp_path), replace(recorded(MEMBER, tmp_path), role="member")], 0.0)
        jobs.save()
        read = Run.open(jobs.folder)
        read.system = Slurm()
        fleet = make_fleet(read, QUIET, JobSpec(name="x", argv=("true",)))
        known = await fleet.news()
        assert known.state is JobState.RUNNING
        assert [job.state for job in read.members] == [JobState.RUNNING]
        fleet.stop()
        with pytest.raises(JobError, match="has closed"):
            await fleet.news()

    asyncio.run(body())
    (question,) = questions()
    assert HEAD in question
    assert MEMBER in question


def test_job_is_unknown_without_an_answer(questions: Callable[[], list[str]], tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "down").touch()

    async def body() -> None:
        jobs = looked_after(tmp_path, say=said.append)
        for _ in range(2):
            text = describe(await jobs.news(), date(2026, 11, 23)).text
            assert text == "UNKNOWN (the batch system does not answer)"
        (tmp_path / "down").unlink()
        assert describe(await jobs.news(), date(2026, 11, 23)).text == "STARTING 0/1"
        jobs.stop()

    asyncio.run(body())
    assert len(said) == 1
    assert "Unable to contact slurm controller" in said[0]


def test_job_with_an_exit_code_is_polled(questions: Callable[[], list[str]], tmp_path: Path) -> None:
    async def body() -> None:
        policy = Policy(patience=Patience(ask_s=3600, news_s=0.05))
        jobs = looked_after(tmp_path, policy)
        head = recorded(HEAD, tmp_path)
        await when(lambda: len(questions()) == 2)  # a moment after its submission, and once more since it runs
        await jobs.news()
        asked = len(questions())  # from here on once an hour
        Path(head.exit_file).write_text("0\n")
        await jobs.check()
        await when(lambda: len(questions()) > asked)
        jobs.stop()

    asyncio.run(body())


def test_a_refusal_reaches_the_caller_of_scale(
    questions: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the loop acts while scale() writes the new number of jobs."""
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho sbatch: error: QOSMaxSubmitJobPerUserLimit >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)

    async def body() -> None:
        fleet = make_fleet(make_run(tmp_path / "run", Slurm()), QUIET, JobSpec(name="x", argv=("true",)))
        fleet.add_head(recorded(HEAD, tmp_path))
        fleet.start()
        write = fleet.write

        async def slow_write() -> None:
            fleet.alarm.ring()
            await asyncio.sleep(0.2)
            await write()

        monkeypatch.setattr(fleet, "write", slow_write)
        with pytest.raises(SubmitError, match="QOSMaxSubmitJobPerUserLimit"):
            await fleet.scale(8)
        fleet.stop()

    asyncio.run(body())


def test_run_keeps_the_last_five_jobs_that_ended_unasked(tmp_path: Path) -> None:
    jobs = make_run(tmp_path / "run", Slurm())
    jobs.add([Job(id=str(i)) for i in range(9)], 0.0)
    jobs.cancelled(["7"], 1.0)
    jobs.retired("8", 1.0)
    for job_id in tuple(jobs.jobs):
        jobs.ended(job_id, f"exit code {job_id}", datetime(2026, 11, 21, 14, 5, tzinfo=UTC))
    assert [(job.id, job.why) for job in jobs.gone] == [(i, f"exit code {i}") for i in "65432"]
    assert jobs.jobs == {}


@pytest.mark.parametrize("notebook", [False, True])
def test_jobs_print_as_a_table(
    notebook: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Console of rich writes to the notebook instead of the file (15.0)."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)
    jobs = Jobs((Job(id="12", text="UP 2/2", log="/home/me/slurm-12.out"),))
    header, row = str(jobs).splitlines()
    assert header.split() == ["job", "state", "has", "nodes", "log"]
    assert row.split() == ["12", "UP", "2/2", "workers", "1", "/home/me/slurm-12.out"]
    assert jobs._repr_html_().count("UP 2/2") == 1
    assert capsys.readouterr().out == ""

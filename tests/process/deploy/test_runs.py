"""Runs asked for, ended and cleaned up: with real processes for jobs, and a recorded squeue for many of them."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
from hypothesis import given
from hypothesis import strategies as st
from paths import BATCH
from pbs_replay import Pbs as Server
from recordings import records
from waiting import scaled, until

from hpcgpu.batch import Pbs
from hpcgpu.deploy.jobs import Run, abandoned, batch_client, runs
from hpcgpu.deploy.jobs.logs import last_lines
from hpcgpu.deploy.network import lease, scheduler_file
from hpcgpu.errors import ConfigError
from hpcgpu.host import process
from hpcgpu.host import run as processes
from hpcgpu.model import JobSpec, JobState, Patience, RunDocument, Settings
from hpcgpu.plan.jobs.job import Job

RECORDED = BATCH / "slurm" / "22.05.8" / "13-array.txt"


def make_run(
    home: Path, *jobs: Job, alive: bool = False, batch: str = "pbs", grace_s: float = 1, name: str = "mine"
) -> Run:
    """Save the run of an object on another host, or of this process."""
    folder = scheduler_file.make_folder(home / ".hpcgpu" / "runs")
    settings = Settings(job_name=name, client_grace_s=grace_s)
    run = Run.begin(RunDocument(settings=settings, shape="gang", folder=str(folder)), batch, None)
    run.submitting = False
    if not alive:
        run.owner = replace(run.owner, host="another-host")
    run.add(jobs)
    run.save()
    lease.touch(folder)
    return run


def submit(folder: Path, command: str) -> Job:
    spec = JobSpec(name="job", argv=("bash", "-c", command), log_directory=str(folder))
    (job_id,) = asyncio.run(batch_client.submit(Pbs(), spec, Pbs().script(spec), print, Patience()))
    return Job(id=job_id, log=Pbs().log(spec, job_id))


def state(job: Job) -> JobState:
    return asyncio.run(batch_client.ask(Pbs(), [job.id]))[job.id].state


@pytest.fixture
def job(pbs: Server, tmp_path: Path) -> Iterator[Job]:
    """A job that runs until it is ended."""
    made = submit(tmp_path, "echo first; sleep 600")
    yield made
    asyncio.run(batch_client.cancel(Pbs(), [made.id]))
    until(lambda: pbs.over(made.id), "the job is over")


def test_a_guard_ends_a_run_that_nobody_holds_any_more(tmp_path: Path, job: Job) -> None:
    run = make_run(tmp_path, job, grace_s=2)

    async def main() -> None:
        attached = lease.keep_touched(run.folder, 2)
        guarding = asyncio.create_task(abandoned.abandon(run.folder, run.owner.token))
        # longer than it would wait for a lease that has ended
        assert not (await asyncio.wait([guarding], timeout=scaled(12)))[0]
        assert (await batch_client.ask(Pbs(), [job.id]))[job.id].state is JobState.RUNNING
        attached.cancel()
        await guarding

    asyncio.run(main())
    assert state(job) is JobState.ENDED
    assert not run.folder.exists()


def test_a_guard_leaves_a_run_that_is_detached_meanwhile(tmp_path: Path, job: Job) -> None:
    run = make_run(tmp_path, job, grace_s=600)
    lease.detach(run.folder)
    asyncio.run(abandoned.abandon(run.folder, run.owner.token))
    assert state(job) is JobState.RUNNING
    assert run.folder.exists()


def test_a_guard_leaves_a_run_that_another_object_owns(tmp_path: Path, job: Job) -> None:
    run = make_run(tmp_path, job, grace_s=1)
    other = Run.open(run.folder)
    other.take_over()
    try:
        asyncio.run(abandoned.abandon(run.folder, run.owner.token))
        assert state(job) is JobState.RUNNING
        assert run.folder.exists()
    finally:
        other.end_guard()


def test_a_guard_costs_next_to_nothing(tmp_path: Path) -> None:
    """It waits with the modules that Python starts with, and a few small ones of ours."""
    run = make_run(tmp_path, alive=True)
    run.start_guard()
    started = run._guard
    try:
        heavy = {"asyncio", "distributed", "dask", "hpcgpu.batch", "hpcgpu.model.job", "json", "dataclasses", "pathlib"}
        code = "import sys; before = set(sys.modules); import hpcgpu.deploy.guard; "
        code += f"print(sorted((set(sys.modules) - before) & {heavy!r}))"
        assert ranks.run_command([sys.executable, "-c", code]).stdout == "[]\n"
        assert processes.is_running(started)
        assert os.getsid(started.pid) == started.pid  # no signal of our terminal reaches it
    finally:
        run.end_guard()
    assert not processes.is_running(started)


def test_a_guard_of_a_folder_that_is_removed_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with subprocess.Popen(["sleep", "600"]) as client:
        argv = [sys.executable, "-m", "hpcgpu.deploy.guard", str(folder), str(client.pid)]
        waiting = subprocess.Popen(
            [*argv, str(process.start_time(client.pid)), "token"], stderr=subprocess.PIPE, text=True
        )
        client.send_signal(signal.SIGKILL)
    assert waiting.communicate(timeout=scaled(60)) == (None, "")
    assert waiting.returncode == 0


def seen(home: Path) -> tuple[Run, ...]:
    """Return all runs with the present states of their jobs."""
    all_runs = Run.all(home / ".hpcgpu" / "runs", pytest.fail)
    asyncio.run(runs.refresh(all_runs))
    return all_runs


def test_ended_runs_alone_are_cleaned_up(tmp_path: Path, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    over = submit(tmp_path, "true")
    until(lambda: state(over) is JobState.ENDED, "the job has ended")
    detached = make_run(tmp_path, job)
    lease.detach(detached.folder)
    waiting = make_run(tmp_path, over, alive=True)  # its client will want to know how it ended
    held = make_run(tmp_path, over, grace_s=600)  # by a client on another host
    dead, empty = make_run(tmp_path, over, grace_s=0), make_run(tmp_path, grace_s=0)
    left = runs.clean_up(seen(tmp_path))
    assert {run.folder for run in left} == {detached.folder, waiting.folder, held.folder}
    assert {run.folder: run.owner_state for run in left}[detached.folder] == "detached"
    assert not dead.folder.exists()
    assert not empty.folder.exists()
    assert capsys.readouterr().err.count("has ended and its owner is gone") == 2


def test_all_jobs_of_a_batch_system_are_one_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = next(r for r in records(RECORDED) if r.command.startswith("squeue") and r.stdout)
    ids = [line.split("|")[0] for line in listed.stdout.splitlines()]
    parent = ids[0].partition("_")[0]
    program = tmp_path / "squeue"
    program.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\nprintf %s {shlex.quote(listed.stdout)}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for element in ids:
        make_run(tmp_path, Job(id=element, log="x"), batch="slurm", alive=True)
    assert [[job.id for job in run.jobs.values() if job.status] for run in seen(tmp_path)] == [[i] for i in ids]
    assert (tmp_path / "asked").read_text() == "asked\n"
    assert list(Run.find(tmp_path / ".hpcgpu" / "runs", ids[-1]).jobs) == [ids[-1]]
    with pytest.raises(ConfigError, match=f"{len(ids)} runs have the name '{parent}'"):
        Run.find(tmp_path / ".hpcgpu" / "runs", parent)


@given(
    st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\r", b"").replace(b"\n", b"") + b"\n")), st.integers(0, 9)
)
def test_last_lines_of_a_log(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], count: int) -> None:
    log = tmp_path_factory.mktemp("log") / "log"
    log.write_bytes(b"".join(lines))
    expected = b"".join(lines[len(lines) - min(count, len(lines)) :]).decode(errors="replace")
    assert last_lines(log, count) == (expected, log.stat().st_size)


def test_a_log_of_many_chunks(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert last_lines(tmp_path / "log", 2)[0] == "line 99998\nline 99999\n"
    assert last_lines(tmp_path / "log", 20_000)[0].startswith("line 80000\n")


def test_ps_of_many_jobs_names_some_of_them(tmp_path: Path, job: Job) -> None:
    others = [replace(job, id=f"{90_000 + 2 * i}.login01") for i in range(200)]
    make_run(tmp_path, job, *others, alive=True)
    lines = hpcgpu(tmp_path, "ps").stdout.splitlines()
    shown = " ".join(" ".join(lines).split())
    assert f"{job.id} 90000.login01" in shown
    assert "and 185 more" in shown
    assert len(lines) < 20  # as many as the width of the terminal takes
    (described,) = json.loads(hpcgpu(tmp_path, "ps", "--json").stdout)
    assert len(described["jobs"]) == 201


def hpcgpu(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return ranks.in_process(*words, HOME=str(home))


def test_ps_shows_the_energy_of_a_run(tmp_path: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(_: Path) -> tuple[tuple[str, ...], dict[str, float]]:
        return ("n-0",), {"gpu_energy_j": 3.6e6, "cpu_energy_j": 1.8e6}

    make_run(tmp_path, job, alive=True)
    monkeypatch.setattr(scheduler_file, "workers_and_use", answer)
    assert hpcgpu(tmp_path, "ps").stdout.splitlines()[-1].split()[-2:] == ["1.5", "kWh"]
    (described,) = json.loads(hpcgpu(tmp_path, "ps", "--json").stdout)
    assert (described["energy_kwh"], described["workers"]) == (1.5, ["n-0"])


def test_the_commands(tmp_path: Path, job: Job) -> None:
    assert hpcgpu(tmp_path, "ps").stdout == "no clusters\n"
    make_run(tmp_path, job, alive=True, name="a [b] c")
    header, row = hpcgpu(tmp_path, "ps").stdout.splitlines()
    assert header.split() == ["name", "shape", "jobs", "state", "workers", "owner", "age"]  # no energy is known
    assert [word for word in ("a [b] c", "gang", job.id, "RUNNING", f"{os.getpid()}@") if word not in row] == []
    (described,) = json.loads(hpcgpu(tmp_path, "ps", "--json").stdout)
    assert (described["name"], described["owner"]["pid"]) == ("a [b] c", os.getpid())
    assert (described["workers"], described["energy_kwh"]) == (None, None)  # no scheduler answers
    assert [(one["id"], one["phase"], one["log"]) for one in described["jobs"]] == [(job.id, "RUNNING", job.log)]
    logged = hpcgpu(tmp_path, "logs", "a [b] c")
    assert logged.stdout in ("first\n", "")  # the job may not have come so far
    refused = hpcgpu(tmp_path, "stop", "mine")
    assert (refused.returncode, refused.stderr.count("there is no run 'mine'; there are: a [b] c (job")) == (2, 1)
    stopped = hpcgpu(tmp_path, "stop", job.id)
    assert stopped.stdout == f"a [b] c has ended (jobs {job.id})\n"
    assert state(job) is JobState.ENDED
    assert hpcgpu(tmp_path, "ps").stdout == "no clusters\n"

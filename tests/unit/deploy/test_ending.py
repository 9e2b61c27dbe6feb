"""One end for all jobs: of that with the scheduler, which may end by itself, and of those that come and go."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from waiting import scaled, until

from hpcgpu.batch import Slurm
from hpcgpu.deploy.jobs import runs
from hpcgpu.errors import SubmitError
from hpcgpu.plan.jobs import Job


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, state: str, scancel: str) -> None:
    """Put a squeue that knows job 7 in this state, and a scancel."""
    for name, body in (("squeue", f"[ -e {folder}/over ] || echo '7|{state}|0|N/A||None|'"), ("scancel", scancel)):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def close(job: Job, said: list[str], grace_s: float, limit_s: float = 60.0) -> None:
    asyncio.run(runs.close(Slurm(), [job], limit_s, said.append, grace_s=grace_s))


def test_close_refused_cancel_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, "RUNNING", "echo 'scancel: error: Invalid user' >&2; exit 1")
    job = Job(id="7", log="", exit_file=str(tmp_path / "exit"))
    limit_s = 4.0  # all of it passes each time; a busy machine starts both programs within it
    for grace_s in (0.0, 0.1):
        with pytest.raises(SubmitError, match=r"job 7 may still exist: .*hpcgpu stop 7"):
            close(job, [], grace_s, limit_s)
    Path(job.exit_file).write_text("0\n")
    close(job, [], 0.1, limit_s)
    with pytest.raises(SubmitError, match="job 7 may still exist"):
        close(job, [], 0.0, limit_s)


@pytest.mark.parametrize(("state", "grace_s"), [("PENDING", 600.0), ("RUNNING", 0.1), ("RUNNING", 0.0)])
def test_close_cancels_a_job_after_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, grace_s: float
) -> None:
    programs(tmp_path, monkeypatch, state, f"touch {tmp_path}/over")
    said: list[str] = []
    close(Job(id="7", log=""), said, grace_s)
    assert (tmp_path / "over").exists()
    assert said == []


def test_a_job_that_ends_by_itself_is_not_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, "RUNNING", f"touch {tmp_path}/cancelled")

    async def use() -> None:
        closing = asyncio.create_task(runs.close(Slurm(), [Job(id="7", log="")], 60.0, print, grace_s=60.0))
        await asyncio.sleep(0.2)
        (tmp_path / "over").touch()
        await closing

    asyncio.run(use())
    assert not (tmp_path / "cancelled").exists()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that never answers, and the file with its processes' ids."""
    (tmp_path / "squeue").write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/asked\nexec sleep 600\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "asked"


def test_a_job_has_ended_with_its_script_though_nobody_answers(asked: Path, tmp_path: Path) -> None:
    said: list[str] = []
    exit_file = tmp_path / "exit"
    job = Job(id="7", exit_file=str(exit_file))

    async def close() -> None:
        closing = asyncio.create_task(runs.close_head(Slurm(), job, said.append))
        await asyncio.to_thread(until, asked.exists, "squeue is asked")
        exit_file.write_text("0\n")  # from here on the file is the only sign of the end
        await asyncio.wait_for(closing, scaled(30))  # squeue alone is waited for for a minute

    asyncio.run(close())
    assert said == ["job 7: its script has ended with exit code 0; the batch system does not answer"]
    (pid,) = asked.read_text().split()
    until(lambda: not Path(f"/proc/{pid}").exists(), "squeue has been ended")

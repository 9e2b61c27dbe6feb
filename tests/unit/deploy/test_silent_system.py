"""A batch system that says nothing while a cluster's job ends: what its script has left is enough."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from waiting import scaled, until

from hpcgpu.batch import Slurm
from hpcgpu.deploy.jobs import ending
from hpcgpu.plan.jobs.job import Job


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
        closing = asyncio.create_task(ending.close_head(Slurm(), job, said.append))
        await asyncio.to_thread(until, asked.exists, "squeue is asked")
        exit_file.write_text("0\n")  # from here on the file is the only sign of the end
        await asyncio.wait_for(closing, scaled(30))  # squeue alone is waited for for a minute

    asyncio.run(close())
    assert said == ["job 7: its script has ended with exit code 0; the batch system does not answer"]
    (pid,) = asked.read_text().split()
    until(lambda: not Path(f"/proc/{pid}").exists(), "squeue has been ended")

"""What people see of Slurm's jobs whose node dies: Slurm answers as it did when one of its nodes was powered off."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from fleets import make_fleet, make_run
from paths import BATCH
from recordings import records
from waiting import until

from hpcgpu.batch import Slurm
from hpcgpu.deploy.jobs.batch_client import on_lost_nodes
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.errors import JobError
from hpcgpu.model import JobSpec, JobState, JobStatus, Patience
from hpcgpu.plan.jobs import HEAD, Job, describe
from hpcgpu.plan.jobs.request import Policy

RECORDED = list(records(BATCH / "slurm" / "22.05.8" / "17-node-died.txt"))
# Nothing is noticed yet; node4 does not answer; it has been given up.
UNNOTICED, SILENT, DOWN = range(3)
AGAIN, ONE, TWO = "41", "42", "43"
SHOWN = {
    UNNOTICED: "STARTING 0/1",
    SILENT: "STARTING 0/1 (node4 does not answer Slurm)",
    DOWN: "PENDING (BeginTime, node4 is down: Not responding), starts about 2026-11-22 15:50",
}
Turn = Callable[[int], None]


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turn:
    """Slurm's programs, and what brings them from one of these moments to another."""
    for name in ("squeue", "sinfo"):
        answers = [record.stdout for record in RECORDED if record.command.startswith(f"{name} ")]
        assert len(answers) == 3
        for moment, answer in enumerate(answers):
            (tmp_path / f"{name}.{moment}").write_text(answer)
        (tmp_path / name).write_text(f'#!/bin/sh\nread -r moment < {tmp_path}/moment; cat "$0.$moment"\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def to(moment: int) -> None:
        (tmp_path / "next").write_text(f"{moment}\n")
        (tmp_path / "next").rename(tmp_path / "moment")

    to(UNNOTICED)
    return to


def led_by(job_id: str, folder: Path) -> Fleet:
    """Return the fleet of a run of this job alone."""
    fleet = make_fleet(make_run(folder / "run", Slurm()), Policy())
    fleet.add_head(Job(id=job_id, role=HEAD, log="no.log"))
    return fleet


def test_head_job_shows_its_lost_node(turn: Turn, tmp_path: Path) -> None:
    async def look() -> None:
        jobs = led_by(AGAIN, tmp_path)
        for moment, text in SHOWN.items():
            turn(moment)
            assert describe(await jobs.news(), date(2026, 11, 23)).text == text
        jobs.stop()

    asyncio.run(look())


def test_lost_node_of_a_job_that_keeps_the_others_is_named(turn: Turn) -> None:
    turn(DOWN)
    listed = {"1": JobStatus(JobState.RUNNING, "COMPLETING", trouble="in state COMPLETING")}
    before = {"1": ("node3", "node4")}
    assert asyncio.run(on_lost_nodes(Slurm(), listed, ran_on=before))["1"].trouble == "node4 is down: Not responding"
    assert asyncio.run(on_lost_nodes(Slurm(), listed)) == listed


@pytest.mark.parametrize(("job_id", "code"), [(ONE, ""), (TWO, ", exit code 143")])
def test_a_job_that_ended_with_its_node_names_it(turn: Turn, job_id: str, code: str, tmp_path: Path) -> None:
    """Of two nodes, too, of which squeue does not say which one was lost."""
    turn(DOWN)

    async def look() -> None:
        jobs = led_by(job_id, tmp_path)
        try:
            await jobs.news()
        finally:
            jobs.stop()

    with pytest.raises(JobError) as caught:
        asyncio.run(look())
    ended = f"job {job_id} has ended: NODE_FAIL (NodeDown, node4 is down: Not responding){code}; "
    assert str(caught.value).startswith(ended)


def test_member_job_shows_its_lost_node(turn: Turn, tmp_path: Path) -> None:
    seen: list[str] = []

    async def run() -> None:
        def look() -> None:
            seen.extend(describe(member, date(2026, 11, 23)).text for member in owned.members)

        owned = make_run(tmp_path / "run", Slurm())
        owned.add([Job(id=AGAIN)], 0.0)
        owned.target = 1
        policy = Policy(patience=Patience(ask_s=0.05, news_s=0.05))
        fleet = make_fleet(owned, policy, JobSpec(name="x", argv=("true",)), changed=look)
        for moment, text in SHOWN.items():
            turn(moment)
            await asyncio.to_thread(until, lambda text=text: text in seen, text)
        fleet.stop()

    asyncio.run(run())

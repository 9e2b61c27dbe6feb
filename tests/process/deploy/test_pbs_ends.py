"""Jobs of PBS that end slowly, or whose node does not answer: what is cancelled, and what is said of it.

The jobs are real processes of no cluster, but for one test.
"""

import asyncio
import re
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from fleets import make_fleet, make_run
from pbs_replay import Pbs as Server
from waiting import until

from hpcgpu.batch import Pbs
from hpcgpu.deploy.jobs import ending
from hpcgpu.deploy.jobs.batch_client import cancel, submit
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.errors import JobError
from hpcgpu.model import JobSpec, Patience
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_text import describe
from hpcgpu.plan.jobs.reconcile import Policy

LIMIT_S = 60.0


def start(pbs: Server, count: int) -> tuple[str, ...]:
    """Start jobs that sleep; return their ids."""
    spec = JobSpec(name="x", argv=("sleep", "600"), count=count)
    ids = asyncio.run(submit(Pbs(), spec, Pbs().script(spec), print, Patience()))
    until(lambda: all(pbs.processes(i) for i in ids), "the jobs run")
    return ids


def late(pbs: Server, ids: Sequence[str], state: str) -> None:
    """Bring these jobs into a long end."""
    pbs.end_slowly(state)
    for job_id in ids:
        pbs.end(job_id, 271)
    until(lambda: all(pbs.get(i, "late") for i in ids), "the jobs are ending")


@pytest.mark.parametrize("state", ["R", "E"])
def test_cancel_of_ending_jobs_is_no_error(pbs: Server, state: str) -> None:
    """R: in an epilogue (run/56-epi); E: the output cannot be written (run/56-badlog)."""
    ids = start(pbs, 3)
    late(pbs, ids[1:2], state)
    asyncio.run(cancel(Pbs(), ids))
    until(lambda: all(pbs.get(i, "late") for i in ids), "the others have been cancelled")
    asyncio.run(cancel(Pbs(), ids))
    pbs.end_slowly("")
    until(lambda: all(map(pbs.over, ids)), "all jobs are over")


def test_cancel_forces_only_jobs_on_lost_nodes(pbs: Server) -> None:
    ids = start(pbs, 4)
    for job_id in ids[1:3]:
        pbs.lose_node(job_id)
    asyncio.run(cancel(Pbs(), ids))
    forced = [words[-1] for words in pbs.calls("qdel") if "force" in words]
    assert forced == list(ids[1:3])
    until(lambda: all(map(pbs.over, ids)), "all jobs are over")


def elastic(policy: Policy, tmp_path: Path, *argv: str, **calls: Any) -> Fleet:
    """Return a fleet of jobs, of this command or of one that sleeps."""
    spec = JobSpec(name="x", argv=argv or ("sleep", "600"), exit_file=str(tmp_path / "exit"))
    return make_fleet(make_run(tmp_path / "run", Pbs()), policy, spec, **calls)


def refuse_to_delete(job_id: str, bin_: Path) -> None:
    qdel = bin_ / "qdel"
    qdel.write_text(qdel.read_text().replace("exec", f'[ "$1" != {job_id} ] || {{ echo no >&2; exit 159; }}\nexec'))


def test_a_job_that_cannot_be_cancelled_keeps_none_of_the_others(pbs: Server, tmp_path: Path) -> None:
    one, other = start(pbs, 1)[0], start(pbs, 1)[0]
    refuse_to_delete(one, tmp_path / "bin")
    said: list[str] = []
    left, why = asyncio.run(ending.end(Pbs(), [one, other], 8.0, said.append))
    assert left == [one]
    assert str(why) == "qdel failed: no"
    assert [line for line in said if line.startswith("qdel")] == ["qdel failed: no"]  # a poll may tell the walltime
    until(lambda: pbs.over(other), "the other one is over")
    pbs.end(one, 271)
    until(lambda: pbs.over(one), "the first one is over")


def test_a_job_in_a_long_epilogue_has_been_closed(pbs: Server) -> None:
    (job_id,) = start(pbs, 1)
    late(pbs, [job_id], "R")
    said: list[str] = []
    asyncio.run(ending.close_head(Pbs(), Job(id=job_id), said.append, grace_s=1.0, limit_s=1.0))
    assert said == [f"job {job_id}: cancelled, but still there after 1 s: job {job_id}"]
    pbs.end_slowly("")
    until(lambda: pbs.over(job_id), "the job is over")


def test_a_job_that_takes_long_to_end_has_ended_with_its_script(pbs: Server, tmp_path: Path) -> None:
    """As that of a folder for logs that its node cannot write to: E, for a minute and more."""
    (job_id,) = start(pbs, 1)
    late(pbs, [job_id], "E")
    exit_file, log = tmp_path / "exit", tmp_path / "log"
    exit_file.write_text("143\n")

    async def check() -> None:
        jobs = make_fleet(make_run(tmp_path / "run", Pbs()), Policy(late_limit_s=1.0))
        jobs.run.add([Job(id=job_id, role="head", log=str(log), exit_file=str(exit_file))])
        jobs.start()
        try:
            while True:
                await jobs.check()
                await asyncio.sleep(0.1)
        finally:
            jobs.stop()

    with pytest.raises(JobError) as caught:
        asyncio.run(asyncio.wait_for(check(), LIMIT_S))
    ended = rf"job {re.escape(job_id)} has ended: its script has ended with exit code 143 \d+ s ago"
    left = f", though the batch system still has it in state E; its log {log}"
    assert re.match(ended + re.escape(left), str(caught.value))
    pbs.end_slowly("")
    until(lambda: pbs.over(job_id), "the job is over")


def test_a_run_on_a_dead_node_is_ended_with_its_folder(pbs: Server, tmp_path: Path) -> None:
    """As its guard does, and ``hpcgpu stop``."""
    ids = start(pbs, 2)
    pbs.lose_node(ids[0])
    run = make_run(tmp_path / "run", Pbs())
    run.add([Job(id=i, log="") for i in ids])
    asyncio.run(ending.finish(run))
    assert all(map(pbs.over, ids))
    assert not run.folder.exists()


async def test_a_job_on_a_lost_node_is_said_to_be_and_replaced(pbs: Server, tmp_path: Path) -> None:
    """PBS goes on to say that it runs."""

    seen: list[str] = []

    def look() -> None:
        seen.extend(describe(member, date.today()).text for member in fleet.run.members)

    fleet = elastic(Policy(missing_limit_s=2.0, patience=Patience(ask_s=0.5)), tmp_path, changed=look)
    await fleet.scale(1)
    (lost,) = pbs.ids()
    await asyncio.to_thread(until, lambda: pbs.processes(lost), "the job runs")
    pbs.lose_node(lost)
    await asyncio.to_thread(until, lambda: "STARTING 0/1 (node0001 is down)" in seen, "it is said")
    await asyncio.to_thread(until, lambda: len(pbs.ids()) == 2, "another one is submitted")
    await asyncio.to_thread(until, lambda: pbs.over(lost), "it is deleted by force")
    await asyncio.to_thread(until, lambda: [m.id for m in fleet.run.members] == pbs.ids()[1:], "it is replaced")
    await fleet.close()
    assert all(map(pbs.over, pbs.ids()))


async def test_a_job_that_cannot_be_cancelled_stops_no_submission(pbs: Server, tmp_path: Path) -> None:
    said: list[str] = []
    fleet = elastic(Policy(), tmp_path, say=said.append)
    await fleet.scale(1)
    refuse_to_delete(pbs.ids()[0], tmp_path / "bin")
    await fleet.scale(0)
    await fleet.scale(2)
    assert fleet.error is None
    fleet.stop()
    assert [line for line in said if line.startswith("qdel")] == ["qdel failed: no"]  # a poll may tell the walltime
    one, *others = pbs.ids()
    assert len(others) == 2
    await cancel(Pbs(), others)
    until(lambda: all(map(pbs.over, others)), "the others are over")
    pbs.end(one, 271)
    until(lambda: pbs.over(one), "the first one is over")


async def test_the_log_in_the_error_is_that_of_the_job_in_it(pbs: Server, tmp_path: Path) -> None:
    """Another one, which was cancelled, is forgotten at the same time."""
    pbs.history(True)
    first = "1021[0].login01"
    go = tmp_path / "go"
    waits = f"until [ -e {go} ]; do sleep 0.05; done"
    fails = ("bash", "-c", f'[ "$PBS_ARRAY_INDEX" = 1 ] || {{ {waits}; echo why; exit 3; }}; sleep 600')
    fleet = elastic(Policy(breaker=1, patience=Patience(ask_s=0.5)), tmp_path, *fails)
    await fleet.scale(2)
    await asyncio.to_thread(until, lambda: all(map(pbs.processes, (first, "1021[1].login01"))), "both run")
    go.touch()  # and not before: once the failure has been seen, one job is as many as are wanted
    await fleet.scale(1)
    await asyncio.to_thread(until, lambda: all(map(pbs.over, pbs.ids())), "both are over")
    await asyncio.to_thread(until, lambda: fleet.error, "no more are submitted")
    fleet.stop()
    message = str(fleet.error)
    assert f"the last was job {first}" in message
    assert message.endswith("x.o1021.0:\n  why"), message

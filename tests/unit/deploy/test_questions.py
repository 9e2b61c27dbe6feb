"""How often a batch system is asked: calls of its programs in a minute of each situation, for each door."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fleets import make_fleet, make_run
from recordings import block, listing
from waiting import VirtualTime

from hpcgpu.batch import BatchSystem, Pbs, Slurm
from hpcgpu.deploy.jobs import Run, batch_client
from hpcgpu.deploy.jobs.abandoned import abandon
from hpcgpu.deploy.jobs.ending import close_head, finish
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.deploy.jobs.logs import follow_log
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.model import Command, JobSpec, Result
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.reconcile import Policy

LINE = {"Q": "PENDING|0|N/A|", "R": "RUNNING|0|N/A|node1"}  # of squeue
KINDS = ("search", "poll", "history", "nodes", "submit", "cancel")
DOORS = {
    "slurm": (Slurm(), "7", ("squeue", "squeue", "sacct", "sinfo", "sbatch", "scancel")),
    "pbs": (Pbs(), "7.login01", ("qselect", "qstat", "qstat", "pbsnodes", "qsub", "qdel")),
}
SPEC = JobSpec(name="x", argv=("true",), mark="m")
LONG_S = {"dead owner in sbatch": 470.0}


@dataclass
class Door:
    """A batch system with one job, which no cancel ends, and the run of that job; it counts its questions."""

    system: BatchSystem
    batch: str
    job_id: str
    state: str  # Q, R, "away", or "": it does not list the job
    folder: Path
    calls: Counter[str] = field(default_factory=Counter)

    async def answer(self, command: Command) -> Result:
        program = command.argv[0]
        self.calls[program] += 1
        if self.state == "away":
            return Result(command.argv, 183, "", "Zero Bytes were transmitted or received")
        lists = self.state if program in ("squeue", "qstat") and "--me" not in command.argv else ""
        if program == "qstat":
            return Result(command.argv, 0, listing("release", [block("release", self.job_id, s, {}) for s in lists]))
        return Result(command.argv, 0, f"1:00:00|{self.job_id}|{LINE[lists]}|None|\n" if lists else "")

    def job(self, age_s: float = 0.0) -> Job:
        return Job(id=self.job_id, role="head", submitted_s=time.monotonic() - age_s, expected=1)

    def run(self, *jobs: Job, submitting: bool = False) -> Run:
        run = make_run(self.folder, self.system, self.batch)
        run.add(jobs)
        run.submitting = submitting
        run.save()
        return run

    def fleet(self, *jobs: Job, spec: JobSpec | None = None, workers: int = 0) -> Fleet:
        addresses = {f"tls://10.0.0.1:{i}": {"name": f"node1-{i}"} for i in range(workers)}
        fleet = make_fleet(self.run(*jobs), Policy(), spec, workers=lambda: addresses)
        fleet.start()
        return fleet

    async def wait(self, age_s: float = 0.0, workers: int = 0) -> None:
        """Look after the job, which was submitted ``age_s`` ago, as its cluster object does."""
        self.fleet(self.job(age_s), workers=workers)
        await asyncio.Event().wait()

    async def guard(self, *jobs: Job) -> None:
        """Let the guard act for a dead owner, which has submitted these jobs, or else was submitting one."""
        run = self.run(*jobs, submitting=not jobs)
        await abandon(run.folder, run.owner.token)


# The job's state, what is done, and how often each kind of question is asked until its end, or in the first minute.
SITUATIONS: dict[str, tuple[str, Callable[[Door], Awaitable[Any]], dict[str, int]]] = {
    "submission without an answer": ("away", lambda door: door.fleet(spec=SPEC).scale(1), {"submit": 1, "search": 4}),
    "waiting": ("Q", Door.wait, {"poll": 11}),
    "waiting for an hour": ("Q", lambda door: door.wait(3600.0), {"poll": 1}),
    "not listed": ("", Door.wait, {"poll": 11, "history": 11}),
    "away": ("away", Door.wait, {"poll": 11}),
    "starting": ("R", Door.wait, {"poll": 11, "nodes": 11}),
    "running": ("R", lambda door: door.wait(workers=1), {"poll": 1, "nodes": 1}),
    "followed log": ("R", lambda door: follow_log(door.run(door.job()), door.folder / "log", 0, print), {"poll": 11}),
    # 10 s for an end by itself, and 20 s after the first cancel
    "closed": ("R", lambda door: close_head(door.system, door.job(), print), {"poll": 20 + 15, "cancel": 2}),
    "stopped": ("R", lambda door: finish(door.run(door.job())), {"poll": 34, "cancel": 4}),
    "dead owner": ("R", lambda door: door.guard(door.job()), {"search": 2, "poll": 30}),
    "dead owner, away": ("away", lambda door: door.guard(door.job()), {"search": 30}),
    "dead owner in sbatch": ("", Door.guard, {"search": 38}),
}


@pytest.mark.parametrize("batch", DOORS)
@pytest.mark.parametrize("situation", SITUATIONS)
def test_batch_system_is_asked_so_often(
    situation: str, batch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, body, questions = SITUATIONS[situation]
    system, job_id, programs = DOORS[batch]
    door = Door(system, batch, job_id, state, tmp_path / "run")
    monkeypatch.setattr(batch_client, "run", door.answer)

    async def minute() -> None:
        with contextlib.suppress(TimeoutError, JobError, SubmitError):
            async with asyncio.timeout(LONG_S.get(situation, 60.0)):
                await body(door)

    VirtualTime().run(minute, monkeypatch)
    expected = Counter[str]()
    for kind, count in questions.items():
        expected[programs[KINDS.index(kind)]] += count
    assert door.calls == expected
    assert not (situation in LONG_S and door.folder.exists())

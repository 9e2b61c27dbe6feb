"""How often a batch system is asked: calls of its programs in a minute of each situation, for each door."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fleets import make_fleet, make_run
from recordings import block, listing
from virtual_time import VirtualTime

from hpcgpu.batch import BatchSystem, Pbs, Slurm
from hpcgpu.deploy.jobs import Run, batch_client
from hpcgpu.deploy.jobs.abandoned import abandon
from hpcgpu.deploy.jobs.ending import close_head, finish
from hpcgpu.deploy.jobs.logs import follow_log
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.model import Command, JobSpec, Result
from hpcgpu.plan.jobs import Job
from hpcgpu.plan.jobs.request import Policy

LINE = {"Q": "PENDING|0|N/A|", "R": "RUNNING|0|N/A|node1"}  # of squeue


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

    def run(self, *, submitting: bool = False) -> Run:
        run = make_run(self.folder, self.system, self.batch)
        run.add([] if submitting else [self.job()])
        run.submitting = submitting
        run.save()
        return run

    async def look_after(self, age_s: float = 0.0, *, workers: int = 0) -> None:
        """Look after the job, which was submitted ``age_s`` ago, as its cluster object does."""
        addresses = {f"tls://10.0.0.1:{i}": {"name": f"node1-{i}"} for i in range(workers)}
        fleet = make_fleet(make_run(self.folder, self.system), Policy(), workers=lambda: addresses)
        fleet.run.add([self.job(age_s)])
        fleet.start()
        await asyncio.sleep(60.0)
        fleet.stop()

    async def scale(self) -> None:
        fleet = make_fleet(make_run(self.folder, self.system), Policy(), JobSpec(name="x", argv=("true",), mark="m"))
        with pytest.raises(SubmitError):
            await fleet.scale(1)
        await asyncio.sleep(60.0)
        fleet.stop()

    async def stop(self) -> None:
        with pytest.raises(JobError, match="still exist"):
            await finish(self.run())

    async def guard(self, *, submitting: bool = False) -> None:
        run = self.run(submitting=submitting)
        await abandon(run.folder, run.owner.token)
        assert not self.folder.exists()


def minute(body: Callable[[Door], Awaitable[Any]]) -> Callable[[Door], Awaitable[Any]]:
    """Cut off after a minute what would go on."""

    async def cut(door: Door) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60.0):
                await body(door)

    return cut


KINDS = ("search", "poll", "history", "nodes", "submit", "cancel")
DOORS = {
    "slurm": (Slurm(), "7", ("squeue", "squeue", "sacct", "sinfo", "sbatch", "scancel")),
    "pbs": (Pbs(), "7.login01", ("qselect", "qstat", "qstat", "pbsnodes", "qsub", "qdel")),
}
# The job's state, what is done for a minute or until its end, and how often each kind of question is asked.
SITUATIONS: dict[str, tuple[str, Callable[[Door], Awaitable[Any]], dict[str, int]]] = {
    "submission without an answer": ("away", Door.scale, {"submit": 1, "search": 5}),
    "waiting": ("Q", Door.look_after, {"poll": 11}),
    "waiting for an hour": ("Q", lambda door: door.look_after(3600.0), {"poll": 1}),
    "not listed": ("", Door.look_after, {"poll": 11, "history": 11}),
    "away": ("away", Door.look_after, {"poll": 11}),
    "starting": ("R", Door.look_after, {"poll": 11, "nodes": 11}),
    "running": ("R", lambda door: door.look_after(workers=1), {"poll": 1, "nodes": 1}),
    "followed log": ("R", minute(lambda door: follow_log(door.run(), door.folder / "log", 0, print)), {"poll": 11}),
    # 10 s for an end by itself, and 20 s after the first cancel
    "closed": ("R", lambda door: close_head(door.system, door.job(), print), {"poll": 20 + 82, "cancel": 2}),
    "stopped": ("R", Door.stop, {"poll": 241, "cancel": 5}),
    "dead owner": ("R", minute(Door.guard), {"search": 2, "poll": 30}),
    "dead owner, away": ("away", minute(Door.guard), {"search": 30}),
    "dead owner in sbatch": ("", lambda door: door.guard(submitting=True), {"search": 28}),
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
    VirtualTime().run(lambda: body(door), monkeypatch)
    expected = Counter[str]()
    for kind, count in questions.items():
        expected[programs[KINDS.index(kind)]] += count
    assert door.calls == expected

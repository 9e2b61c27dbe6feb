"""A run, and the fleet of a cluster that does not exist."""

from pathlib import Path
from typing import Any

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import Run
from hpcgpu.deploy.jobs.fleet import Fleet, SchedulerView
from hpcgpu.model import JobSpec, RunDocument, Settings
from hpcgpu.plan.jobs.reconcile import Policy


def make_run(folder: Path, system: BatchSystem, batch: str = "slurm", *, save: bool = True) -> Run:
    """Return a run of this object whose jobs have one worker each."""
    folder.mkdir(mode=0o700, exist_ok=True)
    settings = Settings(gpus="sim:1", shape="elastic", scheduler="job")
    run = Run.begin(RunDocument(settings=settings, shape="gang", folder=str(folder)), batch, None)
    run.system = system
    run.submitting = False
    if save:
        run.save()
    return run


class Silent:
    """A scheduler without workers that are silent."""

    async def hpcgpu_silent(self) -> list[str]:
        return []


def make_fleet(run: Run, policy: Policy, spec: JobSpec | None = None, **calls: Any) -> Fleet:
    """Return the fleet of a run without workers; ``spec`` is the request for one of its members."""
    nothing = {"scheduler": Silent, "workers": dict, "searching": bool, "changed": bool, "end": lambda: None}
    fleet = Fleet(run, policy, SchedulerView(**{**nothing, "say": lambda _: None, **calls}))
    if spec:
        fleet.manage_members(spec, fleet.policy)
    return fleet

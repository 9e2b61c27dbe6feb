"""A cluster that is none, for jobs that come and go."""

from __future__ import annotations

from typing import Any

from hpcgpu.deploy.jobs.job_loop import ClusterHooks
from hpcgpu.deploy.jobs.job_table import JobWorkers
from hpcgpu.plan.jobs.job import Job

GONE = "99999999.1"  # no process has this pid


async def nothing(*_: object) -> None:
    """Done."""


def cluster_hooks(**hooks: Any) -> ClusterHooks:
    """Return what a fleet has of its cluster: nothing, but for what is given."""
    none: dict[str, JobWorkers] = {}
    defaults = {
        **{"present": lambda: none, "retire": nothing, "remove": nothing, "write_down": lambda: None},
        **{"written_down": lambda: ((Job(id=GONE, log=""),), ()), "changed": lambda: None},
        "say": lambda _: None,
    }
    return ClusterHooks(**{**defaults, **hooks})

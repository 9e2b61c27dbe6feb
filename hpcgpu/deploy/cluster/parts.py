"""The parts of a cluster object: its classes reach each other's work through these parts alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from distributed.deploy.cluster import Cluster

from hpcgpu.deploy.cluster.last_summary import LastSummary
from hpcgpu.deploy.cluster.page import Page
from hpcgpu.deploy.cluster.progress import Progress
from hpcgpu.deploy.cluster.run import Run
from hpcgpu.deploy.cluster.session import Hooks, Session
from hpcgpu.deploy.cluster.state import State
from hpcgpu.model import Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one cluster object."""

    run: Run  # its jobs or processes
    session: Session  # folder, lease, connection
    state: State  # how it ended, or what is wrong
    progress: Progress  # prints its lines
    page: Page  # shows it in a notebook
    summary: LastSummary  # the use of its run

    @classmethod
    def of(cls, run: Run, state: State, hooks: Hooks, patience: Patience, progress: Progress) -> Self:
        """Make the parts of an object that has a run, a state and lines."""
        session = Session(run.settings, state, progress, patience, hooks)
        return cls(
            run=run, session=session, state=state, progress=progress, page=Page(), summary=LastSummary(state.kind)
        )


class ComposedCluster(Cluster):
    """distributed's cluster object, made of parts."""

    parts: Parts  # for the classes of hpcgpu; attributes for people have a name of their own
    scheduler_comm: Any  # distributed's, as scheduler_info
    scheduler_info: Any

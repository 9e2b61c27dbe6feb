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
    """The parts of one cluster object.

    Attributes
    ----------
    run : Run
        How its processes come to be.
    session : Session
        Its hold on the run: folder, lease, connection.
    state : State
        What has become of it, in words.
    progress : Progress
        Says what goes on.
    page : Page
        Shows it in a notebook.
    summary : LastSummary
        What its run has used.

    """

    run: Run
    session: Session
    state: State
    progress: Progress
    page: Page
    summary: LastSummary

    @classmethod
    def of(cls, run: Run, state: State, hooks: Hooks, patience: Patience, progress: Progress) -> Self:
        """Return the parts of an object that has a run, a state and a way to say what goes on."""
        session = Session(run.wanted.settings, state, progress, patience, hooks)
        return cls(
            run=run, session=session, state=state, progress=progress, page=Page(), summary=LastSummary(state.kind)
        )


class ComposedCluster(Cluster):
    """distributed's cluster object, made of parts.

    Attributes
    ----------
    parts : Parts
        For the classes of hpcgpu; what people need has a name of its own.

    """

    parts: Parts
    scheduler_comm: Any  # distributed's
    scheduler_info: Any  # distributed's

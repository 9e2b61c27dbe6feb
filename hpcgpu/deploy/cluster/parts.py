"""The parts of a cluster object: its classes reach each other's work through these parts alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from distributed.deploy.cluster import Cluster

from hpcgpu.deploy import workers
from hpcgpu.deploy.cluster.progress import Progress
from hpcgpu.deploy.cluster.run import ClusterRun
from hpcgpu.deploy.cluster.session import Hooks, Session
from hpcgpu.deploy.cluster.state import State
from hpcgpu.deploy.dashboard.worker_metrics import KEY
from hpcgpu.errors import JobError
from hpcgpu.model import Patience
from hpcgpu.plan.jobs.worker_names import by_number
from hpcgpu.report.summary import Summary
from hpcgpu.report.workers import WorkerFacts, read_facts
from hpcgpu.supervise import tasks
from hpcgpu.supervise.failure_log import reason_of

_ANSWER_S = 3.0
# The scheduler waits 1 s at most for the workers' last heartbeats.
_SUMMARY_S = 3.0
# A question to one worker costs the scheduler 0.8 CPU ms (8 workers on 2 cores, distributed 2026.8.0): a hundredth.
_SHORTEST_S, _PER_WORKER_S = 2.0, 0.08


class Page:
    """The facts of the workers for the page of a cluster object. The event loop's thread asks; any thread may read."""

    def __init__(self) -> None:
        self._facts: dict[str, WorkerFacts] = {}  # by address
        self._asked_s = 0.0
        self._asking: tasks.Loop | None = None
        self._show_end: Callable[[], None] | None = None

    def workers(self, present: Mapping[str, Any]) -> list[WorkerFacts]:
        """Return the facts of the present workers; of those that have not answered, the scheduler's facts."""
        shown = [
            self._facts.get(address) or read_facts(str(facts["name"]), {"node": facts["host"]}, facts.get(KEY, {}))
            for address, facts in present.items()
        ]
        return sorted(shown, key=lambda w: by_number(w.name))

    def is_due(self, count: int) -> bool:
        """Return whether the facts are old."""
        return time.monotonic() - self._asked_s >= max(_SHORTEST_S, _PER_WORKER_S * count)

    async def ask(self, scheduler: Any) -> None:  # distributed's rpc
        """Ask all workers; those that do not answer are shown by their names."""
        self._asked_s = time.monotonic()
        try:
            async with asyncio.timeout(_ANSWER_S):
                answers = await workers.ask(scheduler)
        except (OSError, TimeoutError):
            return
        self._facts = {a: facts for a, facts in answers.items() if isinstance(facts, WorkerFacts)}

    def keep(self, scheduler: Callable[[], Any], count: Callable[[], int]) -> None:
        """Ask again and again, on the event loop: a widget shows the page.

        The functions return the connection to the scheduler, and the number of workers.
        """
        if self._asking is None:

            async def ask() -> None:
                await asyncio.sleep(_SHORTEST_S)
                if self.is_due(count()):
                    await self.ask(scheduler())

            self._asking = tasks.run_forever(ask, "the questions to the workers for a notebook")

    def shown(self, show_end: Callable[[], None]) -> None:
        """Record that a widget shows the page; ``show_end`` updates it when the cluster has ended."""
        self._show_end = show_end

    def ended(self) -> None:
        """Show that the cluster has ended, if a widget shows the page."""
        if self._show_end:
            self._show_end()

    def close(self) -> None:
        """Stop asking."""
        if self._asking:
            self._asking.cancel()
        self._facts = {}


class LastSummary:
    """The newest summary from the scheduler. The event loop's thread asks; any thread may read."""

    def __init__(self, kind: str) -> None:
        self._kind = kind  # name of the cluster's class, for errors
        self._last: Summary | str = "it has not been started"

    async def ask(self, scheduler: Any) -> None:
        """Ask the scheduler (distributed's rpc, or None); an error is kept as the reason and ends nothing else."""
        if scheduler is None:
            return
        try:
            async with asyncio.timeout(_SUMMARY_S):
                self._last = Summary(**await scheduler.hpcgpu_summary())
        except Exception as e:  # of a connection that is gone, or of a scheduler that closes
            if not isinstance(self._last, Summary):
                self._last = f"its scheduler does not answer: {reason_of(e)}"

    def get(self) -> Summary:
        """Return the newest summary; raise JobError, with the reason, without one."""
        if isinstance(self._last, str):
            raise JobError(f"this {self._kind} has no summary: {self._last}")
        return self._last


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The parts of one cluster object."""

    run: ClusterRun  # its jobs or processes
    session: Session  # folder, lease, connection
    state: State  # how it ended, or what is wrong
    progress: Progress  # prints its lines
    page: Page  # shows it in a notebook
    summary: LastSummary  # the use of its run

    @classmethod
    def of(cls, run: ClusterRun, state: State, hooks: Hooks, patience: Patience, progress: Progress) -> Self:
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

"""The page of a cluster object in a notebook, and its facts: workers are asked only while it is shown."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from distributed.protocol.pickle import dumps, loads

from hpcgpu.deploy import report
from hpcgpu.plan.jobs.worker_names import by_number
from hpcgpu.plan.views.notebook import ClusterView, WorkerView, cluster_page
from hpcgpu.supervise import tasks

_ANSWER_S = 3.0
# A question to one worker costs the scheduler 0.8 CPU ms (8 workers on 2 cores, distributed 2026.8.0): a hundredth.
_SHORTEST_S, _PER_WORKER_S = 2.0, 0.08


class Page:
    """The HTML of a cluster object, and its facts. The event loop's thread asks; any thread may read."""

    def __init__(self) -> None:
        self._views: dict[str, WorkerView] = {}  # by address
        self._asked_s = 0.0
        self._asking: tasks.Loop | None = None
        self._show_end: Callable[[], None] | None = None

    def html(self, view: ClusterView, workers: Mapping[str, Any]) -> str:
        """Return the page of a view without workers, and of the scheduler's facts about its workers by address."""
        shown = [
            self._views.get(address) or WorkerView(str(facts["name"]), str(facts["host"]))
            for address, facts in workers.items()
        ]
        shown.sort(key=lambda w: by_number(w.name))
        return cluster_page(replace(view, workers=tuple(shown)))

    def is_due(self, workers: int) -> bool:
        """Return whether the facts are old."""
        return time.monotonic() - self._asked_s >= max(_SHORTEST_S, _PER_WORKER_S * workers)

    async def ask(self, scheduler: Any) -> None:  # distributed's rpc
        """Ask all workers; those that do not answer are shown by their names."""
        self._asked_s = time.monotonic()
        message = {"op": "run", "function": dumps(report.worker_view), "args": dumps(()), "kwargs": dumps({})}
        try:
            async with asyncio.timeout(_ANSWER_S):
                answers = await scheduler.broadcast(msg=message, on_error="return_pickle")
        except (OSError, TimeoutError):
            return
        self._views = {a: view for a, answer in answers.items() if (view := _read(answer)) is not None}

    def keep(self, scheduler: Callable[[], Any], workers: Callable[[], int]) -> None:
        """Ask again and again, on the event loop: a widget shows the page.

        The functions return the connection to the scheduler, and the number of workers.
        """
        if self._asking is None:

            async def ask() -> None:
                await asyncio.sleep(_SHORTEST_S)
                if self.is_due(workers()):
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
        self._views = {}


def _read(answer: Any) -> WorkerView | None:
    if isinstance(answer, bytes):
        answer = loads(answer)
    view = answer.get("result") if isinstance(answer, dict) and answer.get("status") == "OK" else None
    return view if isinstance(view, WorkerView) else None

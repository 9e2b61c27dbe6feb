"""Show how many of a script's tasks are done, in one line: in place on a terminal, else as rare lines."""

from __future__ import annotations

import time

from distributed import Scheduler
from distributed.diagnostics.plugin import SchedulerPlugin

from hpcgpu.deploy.progress import Surface, surface
from hpcgpu.supervise import tasks

_EVERY_S = 1.0
# A log gets a line for each tenth of the work, and one a minute.
_PARTS, _SELDOM_S = 10, 60.0
_LEFT = ("waiting", "queued", "no-worker", "processing")


class TaskProgress(SchedulerPlugin):
    """Reads the scheduler's counts once a second, and shows changes on ``shown_on``, by default standard error."""

    def __init__(self, scheduler: Scheduler, shown_on: Surface | None = None) -> None:
        self._scheduler, self._surface = scheduler, shown_on or surface()
        self._shown, self._part = "", -1
        self._shown_s = time.monotonic()
        self._timer = tasks.repeat(self.look, _EVERY_S, "the look at how many tasks are done")

    def look(self) -> None:
        """Show how many tasks are done, if that has changed."""
        line, done, left = _count(self._scheduler)
        part = done * _PARTS // (done + left) if done + left else -1
        is_due = part != self._part or time.monotonic() - self._shown_s >= _SELDOM_S
        if line not in ("", self._shown) and (self._surface.ticks or is_due):
            self._surface.show(line)
            self._shown, self._part, self._shown_s = line, part, time.monotonic()

    async def close(self) -> None:
        """Show the final counts; called by distributed when the scheduler closes."""
        self._timer.cancel()
        line = _count(self._scheduler)[0]
        if line != self._shown:
            self._surface.show(line)
        self._surface.end()


def _count(scheduler: Scheduler) -> tuple[str, int, int]:
    """Return the line, and how many tasks are done and left; a task that is computed again counts again."""
    prefixes = scheduler.task_prefixes.values()
    done = sum(prefix.state_counts["memory"] for prefix in prefixes)
    failed = sum(prefix.state_counts["erred"] for prefix in prefixes)
    now = {state: sum(prefix.states[state] for prefix in prefixes) for state in _LEFT}
    left = sum(now.values())
    if not done + left + failed:
        return "", 0, 0
    more = [f"{now['processing']} with workers"] if now["processing"] else []
    more += [f"{failed} failed"] if failed else []
    return ", ".join([f"tasks: {done} of {done + left + failed} done", *more]), done, left

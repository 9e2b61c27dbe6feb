"""What the jobs that come and go have of the cluster that they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcgpu.deploy.jobs.job_table import Present
from hpcgpu.deploy.jobs.record import Gone, RecordedJob
from hpcgpu.supervise import tasks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterHooks:
    """What the fleet needs of its cluster.

    Attributes
    ----------
    present : callable
        Returns the registered workers by their job's id.
    retire : callable
        Has workers hand their data to others and leave.
    remove : callable
        Has the scheduler forget workers that are gone.
    write_down : callable
        Called in a thread when jobs have come or gone.
    written_down : callable
        Called in a thread; returns the jobs that any object has written down last, and those that were gone.
    changed : callable
        Called when more is known than before.
    say : callable
        Takes a line for the user.

    """

    present: Callable[[], Mapping[str, Present]]
    retire: Callable[[Sequence[str]], Awaitable[object]]
    remove: Callable[[Sequence[str]], Awaitable[object]]
    write_down: Callable[[], None]
    written_down: Callable[[], tuple[Sequence[RecordedJob], Sequence[Gone]]]
    changed: Callable[[], None]
    say: Callable[[str], None]
    _writing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def write(self) -> None:
        """Have the jobs written down: one time after the other, each with what is known then."""
        async with self._writing:
            await tasks.in_thread(self.write_down)


class SchedulerRequests:
    """Requests to the scheduler without an answer: what comes of them is seen by the workers that are registered.

    Parameters
    ----------
    say : callable
        Takes a line for the user: a request that failed.

    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._tasks = say, tasks.Group()

    def send(self, request: Callable[[Sequence[str]], Awaitable[object]], addresses: Sequence[str]) -> None:
        """Have it done for the workers at these addresses."""
        workers = f"workers {', '.join(addresses)}"

        async def run() -> None:
            try:
                await request(addresses)
            except OSError as e:  # the scheduler is gone for the moment, which is told elsewhere
                self._say(f"{workers}: {e}")

        # the scheduler's own errors come as they are
        self._tasks.start(
            run, f"what the scheduler was to do about {workers}", lambda e: self._say(f"{workers}: {e!r}")
        )

    def cancel(self) -> None:
        """End those that are under way."""
        self._tasks.cancel()

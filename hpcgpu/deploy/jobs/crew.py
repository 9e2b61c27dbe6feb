"""What the jobs that come and go have of the cluster that they belong to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from hpcgpu.deploy.jobs.record import Gone, RecordedJob
from hpcgpu.deploy.jobs.roster import Present


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
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
        Called when jobs have come or gone.
    written_down : callable
        Returns the jobs that were written down last, by whoever, and those that were gone.
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

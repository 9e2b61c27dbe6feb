"""Questions that a batch system need not be asked."""

from __future__ import annotations

from hpcgpu.model import Command, JobSpec, Result


class Unasked:
    """A batch system that says of all requests what there is to say, and of all jobs whether they are there."""

    __slots__ = ()

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Return nothing."""
        return ()

    def force(self, result: Result) -> Command | None:
        """Return None: no node is asked to end a job."""
        return None

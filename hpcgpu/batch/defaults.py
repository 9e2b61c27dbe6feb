"""Answers of a batch system to questions that do not apply to it."""

from __future__ import annotations

from hpcgpu.model import Command, JobSpec, Offer, Result


def unasked(spec: JobSpec, *, memory: bool, cpus: bool) -> tuple[str, ...]:
    """Return a message on each part of a request for which the site's dialect has no option."""
    parts = {
        "memory=": spec.memory_per_node_bytes is not None and not memory,
        "cores_per_gpu=": spec.cpus_per_task is not None and not cpus,
    }
    return tuple(
        f"{name} is not asked of the batch system: at this site jobs get it with their GPUs or nodes"
        for name, is_given in parts.items()
        if is_given
    )


class NoNotes:
    """A batch system whose answers say enough about a request, and that needs no force to end a job."""

    __slots__ = ()

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Return no messages."""
        return ()

    def force(self, result: Result) -> Command | None:
        """Return None: ``cancel`` needs no force."""
        return None


class NoOffers:
    """A batch system that is not asked beforehand: its refusals and comments describe its nodes and limits."""

    __slots__ = ()

    def offers(self, spec: JobSpec) -> Command | None:
        """Return None: no command."""
        return None

    def read_offers(self, result: Result) -> tuple[Offer, ...]:
        """Return no offers."""
        return ()

    def test(self, script: str) -> Command | None:
        """Return None: no command checks a script (qsub submits, or does nothing)."""
        return None

    def read_test(self, result: Result) -> str:
        """Return ""."""
        return ""

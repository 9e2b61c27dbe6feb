"""Answers of a batch system to which a question does not apply."""

from __future__ import annotations

from hpcgpu.model import Command, JobSpec, Offer, Result


def unasked(spec: JobSpec, *, memory: bool, cpus: bool) -> tuple[str, ...]:
    """Return a note on each part of a request for which the site's dialect has no option."""
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
    """A batch system whose own answers say enough about a request, and that ends each job which it is told to end."""

    __slots__ = ()

    def notes(self, spec: JobSpec) -> tuple[str, ...]:
        """Return nothing."""
        return ()

    def force(self, result: Result) -> Command | None:
        """Return None: ``cancel`` needs no force."""
        return None


class NoOffers:
    """A batch system that is not asked beforehand: its refusals and comments say what it has and takes."""

    __slots__ = ()

    def offers(self, spec: JobSpec) -> Command | None:
        """Return None: it is not asked."""
        return None

    def read_offers(self, result: Result) -> tuple[Offer, ...]:
        """Return nothing."""
        return ()

    def test(self, script: str) -> Command | None:
        """Return None: it has no such question (qsub submits, or does nothing)."""
        return None

    def read_test(self, result: Result) -> str:
        """Return nothing."""
        return ""

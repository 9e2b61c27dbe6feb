"""Answers of a batch system to which a question does not apply."""

from __future__ import annotations

from hpcgpu.model import Command, JobSpec, Offer, Result


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
    """A batch system that is not asked what it has: its refusals and comments say it."""

    __slots__ = ()

    def offers(self, spec: JobSpec) -> Command | None:
        """Return None: it is not asked."""
        return None

    def read_offers(self, result: Result) -> tuple[Offer, ...]:
        """Return nothing."""
        return ()

"""What every rank knows of the run before the meeting.

A named tuple, for every rank makes it: importing dataclasses takes 15 CPU ms (Python 3.11).
"""

from __future__ import annotations

from typing import NamedTuple


class Terms(NamedTuple):
    """How the ranks meet, and from what the layout is planned; the names are those of the settings."""

    workers_per_gpu: int
    cpu_workers: int
    rendezvous: str
    death_timeout_s: float
    shape: str
    meeting: str
    launch: str
    exit_file: str
    gpus: str | None = None
    gpus_per_node: int | None = None


# The document's own; the others are settings.
OWN = frozenset({"shape", "meeting", "launch", "exit_file"})
# These stand in every document, defaults too, unless they are None.
WRITTEN = frozenset(Terms._fields) - OWN

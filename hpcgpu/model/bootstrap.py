"""The bootstrap settings: the facts of the run that each rank reads before the rendezvous.

Each rank makes them, so they are a named tuple: importing dataclasses takes 15 CPU ms (Python 3.11).
"""

from __future__ import annotations

from typing import NamedTuple


class BootstrapSettings(NamedTuple):
    """How the ranks meet, and the settings that the layout needs, under their names in Settings."""

    workers_per_gpu: int
    cpu_workers: int
    rendezvous: str
    death_timeout_s: float
    shape: str
    folder: str
    launch: str
    exit_file: str
    gpus: str | None = None
    gpus_per_node: int | None = None


# Fields of the run document; the others are settings.
OWN = frozenset({"shape", "folder", "launch", "exit_file"})
# Settings that each document has, even with default values, unless they are None.
WRITTEN = frozenset(BootstrapSettings._fields) - OWN

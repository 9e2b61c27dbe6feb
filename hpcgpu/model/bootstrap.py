"""The bootstrap settings: what each rank knows of the run before the rendezvous.

Each rank makes them, so they are a named tuple: importing dataclasses takes 15 CPU ms (Python 3.11).
"""

from __future__ import annotations

from typing import NamedTuple


class BootstrapSettings(NamedTuple):
    """How the ranks meet, and the settings on which the layout depends, under the settings' own names."""

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


# Fields of the document itself; the others are settings.
OWN = frozenset({"shape", "folder", "launch", "exit_file"})
# These are in each document, also with their default values, unless they are None.
WRITTEN = frozenset(BootstrapSettings._fields) - OWN

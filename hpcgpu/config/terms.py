"""What every rank reads of the run document before the meeting; leaders check and read the rest.

A rank that only waits would pay 20 CPU ms for making and checking all settings (Python 3.11).
"""

from __future__ import annotations

import json
from typing import NamedTuple

from hpcgpu.errors import ConfigError


class Terms(NamedTuple):
    """How the ranks meet, and from what the layout is planned; the names are those of the settings."""

    workers_per_gpu: int
    cpu_workers: int
    rendezvous: str
    death_timeout_s: float
    shape: str
    meeting: str
    launch: str
    gpus: str | None = None
    gpus_per_node: int | None = None


# These stand in every document, defaults too, unless they are None.
WRITTEN = frozenset(Terms._fields) - {"shape", "meeting", "launch"}


def read_terms(text: str) -> Terms:
    """Return the terms of a document that was rendered by :mod:`hpcgpu.config.document`.

    Raises
    ------
    ConfigError
        Not a run document.

    """
    try:
        raw = json.loads(text)
        there = {name: value for name, value in raw["settings"].items() if name in WRITTEN}
        return Terms(shape=raw["shape"], meeting=raw["meeting"], launch=raw["launch"], **there)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        from hpcgpu.config import document

        document.read(text)  # says what is wrong with it
        raise ConfigError(f"not a run document of this hpcgpu ({error}): {text[:80]!r}") from error

"""What every rank reads of the run document before the meeting; leaders check and read the rest.

A rank that only waits would pay 20 CPU ms for making and checking all settings (Python 3.11).
"""

from __future__ import annotations

import json

from hpcgpu.errors import ConfigError
from hpcgpu.model.bootstrap import OWN, WRITTEN, Terms


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
        own = {name: raw[name] for name in OWN}
        return Terms(**own, **there)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        from hpcgpu.config import document

        document.read(text)  # says what is wrong with it
        raise ConfigError(f"not a run document of this hpcgpu ({error}): {text[:80]!r}") from error

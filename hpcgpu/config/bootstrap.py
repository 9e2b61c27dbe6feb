"""Read the part of the run document that each rank needs before the rendezvous; leaders read and check the rest.

Making and checking all settings takes 20 CPU ms (Python 3.11), which a rank that only waits need not spend.
"""

from __future__ import annotations

import json

from hpcgpu.errors import ConfigError
from hpcgpu.model.allocation import OWN, WRITTEN, BootstrapSettings


def read_bootstrap_settings(text: str) -> BootstrapSettings:
    """Parse the bootstrap settings of a rendered run document; raise ConfigError for other text."""
    try:
        raw = json.loads(text)
        settings = {name: value for name, value in raw["settings"].items() if name in WRITTEN}
        fields = {name: raw[name] for name in OWN}
        return BootstrapSettings(**fields, **settings)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        from hpcgpu.config import document

        document.read(text)  # raises with the exact fault
        raise ConfigError(f"not a run document of this hpcgpu ({error}): {text[:80]!r}") from error

"""Which site this machine is, by its variables and its name."""

from __future__ import annotations

import re
from collections.abc import Mapping

import yaml

from hpcgpu.errors import ConfigError
from hpcgpu.model.site import Match

# A key at the top of a file, and all lines that belong to it. Nothing else is read: 22 files take 3 CPU ms.
_BLOCK = re.compile(r"^match:.*(?:\n(?:[ \t#].*|))*", re.MULTILINE)


def looks_like(texts: Mapping[str, str], environ: Mapping[str, str], host: str) -> tuple[str, str] | None:
    """Return the only site whose file (``texts``, by name) matches this machine, and why; None for none or several."""
    matching = {name: why for name, text in texts.items() if (why := _why(_match_of(text), environ, host))}
    return next(iter(matching.items())) if len(matching) == 1 else None


def is_here(match: Match, environ: Mapping[str, str], host: str) -> bool:
    """Return whether a site may be this machine: its file matches, or has no rule for it."""
    if not match.env and not match.host:
        return True
    return bool(_why(match, environ, host))


def _why(match: Match, environ: Mapping[str, str], host: str) -> str:
    by_name = f"the host is {host}" if match.host and re.fullmatch(match.host, host) else ""
    return next((f"{name}={value}" for name, value in match.env.items() if environ.get(name) == value), by_name)


def _match_of(text: str) -> Match:
    try:
        block = yaml.safe_load(lines[0])["match"] if (lines := _BLOCK.search(text)) else {}
        return Match(env={str(k): str(v) for k, v in block.get("env", {}).items()}, host=str(block.get("host", "")))
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ConfigError):
        return Match()  # a user's file with a mistake, reported when it is used

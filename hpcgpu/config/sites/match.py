"""Recognise the known machine that this one looks like: a hint, never a choice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from hpcgpu.model.site_facts import Match

# A key at the top of a file, and all lines that belong to it.
_BLOCK = re.compile(r"^match:.*(?:\n(?:[ \t#].*|))*", re.MULTILINE)


def looks_like(texts: Mapping[str, str], environ: Mapping[str, str], host: str) -> tuple[str, str] | None:
    """Return the only site whose file (``texts``, by name) matches this machine, and why; None for none or several."""
    # Only the match block of each file is read: 22 files take 3 CPU ms.
    matching = {name: why for name, text in texts.items() if (why := _why(text, environ, host))}
    return next(iter(matching.items())) if len(matching) == 1 else None


def is_here(match: Match, environ: Mapping[str, str], host: str) -> bool:
    """Return whether a site may be this machine: its file matches, or has no rule for it."""
    if not match.env and not match.host:
        return True
    by_name = bool(match.host) and re.fullmatch(match.host, host) is not None
    return by_name or any(environ.get(name) == value for name, value in match.env.items())


def _why(text: str, environ: Mapping[str, str], host: str) -> str:
    block = _match_of(text)
    env, pattern = block.get("env"), block.get("host")
    for name, value in (env or {}).items() if isinstance(env, dict) else ():
        if environ.get(str(name)) == str(value):
            return f"{name}={value}"
    try:
        return f"the host is {host}" if isinstance(pattern, str) and pattern and re.fullmatch(pattern, host) else ""
    except re.error:  # a user's file with a mistake, reported when it is used
        return ""


def _match_of(text: str) -> dict[str, Any]:
    match = _BLOCK.search(text)
    try:
        block = yaml.safe_load(match[0])["match"] if match else None
    except (yaml.YAMLError, KeyError, TypeError):
        return {}
    return block if isinstance(block, dict) else {}


def hint(name: str, why: str) -> str:
    """Return the hint for people, printed once."""
    return (
        f"this looks like {name} ({why}): site={name!r} (or HPCGPU_SITE={name}) knows its queues, limits and nodes. "
        "Nothing is assumed without it, and this is said once; HPCGPU_SITE=none says that you want none"
    )

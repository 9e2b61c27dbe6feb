"""Parse options of batch systems, as users and site files write them."""

from __future__ import annotations


def option_of(directive: str) -> str:
    """Parse a directive's option: ``--constraint`` of ``--constraint=gpu``, ``-l mem`` of ``-l mem=1gb``."""
    words = directive.partition("=")[0].split()
    return " ".join(words[: 2 if words[:1] == ["-l"] else 1])

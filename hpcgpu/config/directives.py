"""Options of batch systems, as users and site files write them."""

from __future__ import annotations


def option_of(directive: str) -> str:
    """Return ``--constraint`` of ``--constraint=gpu``, and ``-l filesystems`` of ``-l filesystems=home``."""
    words = directive.partition("=")[0].split()
    return " ".join(words[: 2 if words[:1] == ["-l"] else 1])

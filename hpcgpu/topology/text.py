"""Names from firmware and drivers, made safe for terminals."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text without line ends, control characters and surrounding blanks."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())

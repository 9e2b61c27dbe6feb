"""Words of firmware and drivers, as they may stand on a terminal."""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text without line ends, control characters and surrounding blanks."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())

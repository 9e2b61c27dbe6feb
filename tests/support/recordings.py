"""Recorded outputs of real batch systems, as ``docker/record.sh`` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_RECORD = re.compile(r"\$ (.*?)\n\[\w+ \w+\] \[exit (\d+)\]\n--- stdout\n(.*?)--- stderr\n?(.*)", re.S)


@dataclass(frozen=True)
class Record:
    """One command that was run, and what came of it."""

    command: str
    returncode: int
    stdout: str
    stderr: str


def records(path: Path) -> Iterator[Record]:
    """Read ``$ command`` / ``[user host] [exit n]`` / ``--- stdout`` / ``--- stderr`` / ``===`` blocks."""
    text = path.read_text(encoding="utf-8", errors="replace").removesuffix("===\n")
    for block in text.split("\n===\n"):
        if not block.strip():
            continue
        found = _RECORD.match(block)
        if not found:
            raise ValueError(f"{path}: not a record: {block[:80]!r}")
        yield Record(found[1], int(found[2]), found[3], found[4])

"""The README, the pages for those who come from another tool, and the code that stands in them."""

from __future__ import annotations

import re
import shlex

from paths import ROOT

FOLDER = ROOT / "docs" / "coming-from"
README = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
LINES = [line.partition("  #")[0].strip() for kind, text in README if kind == "bash" for line in text.splitlines()]
PAGES = {path.stem: path.read_text() for path in FOLDER.iterdir()}


def blocks(page: str, kind: str) -> list[str]:
    """Return the blocks of a kind (``python``, ``diff``, ...) of a page."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGES[page], re.S)


def after(diff: str) -> str:
    """What stands there when one has switched."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def line(start: str) -> list[str]:
    """Return the words of the first command line of the README that begins so."""
    return shlex.split(next(text for text in LINES if text.startswith(start)))

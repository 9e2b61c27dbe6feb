"""The README, the ways to start, the pages for those who come from another tool, and the code in them."""

import re
import shlex

from paths import ROOT

FOLDER = ROOT / "docs" / "coming-from"
README = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
START = re.findall(r"```(\w+)\n(.*?)```", (ROOT / "docs" / "how-to" / "start.md").read_text(), re.S)
SHELL = [text for kind, text in (*README, *START) if kind == "bash"]
LINES = [line.partition("  #")[0].strip() for text in SHELL for line in text.splitlines()]
PAGES = {path.stem: path.read_text() for path in FOLDER.iterdir()}


def blocks(page: str, kind: str) -> list[str]:
    """Return the blocks of a kind (``python``, ``diff``, ...) of a page."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGES[page], re.S)


def after(diff: str) -> str:
    """What stands there when one has switched."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def line(start: str) -> list[str]:
    """Return the words of the first command line of the README, or of the ways to start, that begins so."""
    return shlex.split(next(text for text in LINES if text.startswith(start)))

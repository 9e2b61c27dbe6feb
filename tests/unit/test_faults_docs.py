"""The documents name tests that there are; each row of a table of faults names its own."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT

PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md")), *sorted((ROOT / "tests").rglob("*.md"))]
# Pages with tables of faults, and where these begin.
FAULTS = {
    "docs/explanation/faults.md": "# ",
    "tests/README.md": "## Background work",
    "tests/data/topology/README.md": "## Other people's machines",
}
# A file, a test in it, or `::name`: another test of the file before it, in the same row or paragraph.
NAMED = re.compile(r"`((?:tests/)?(?:[\w*]+/)*test_[\w*]+\.py)?(?:::(\w+))?`")


def named(text: str) -> Iterator[tuple[str, str]]:
    """File and name of each test that a document names; either may be empty."""
    for block in re.split(r"\n\n|\n(?=\|)", text):
        path = ""
        for found in NAMED.finditer(block):
            path = found[1] or path
            if found[1] or found[2]:
                yield path, found[2] or ""


@functools.cache
def texts() -> dict[Path, str]:
    return {file: file.read_text() for file in (ROOT / "tests").rglob("test_*.py")}


def there(path: str, name: str) -> bool:
    """Whether some file of tests is so called, with its folders or without, and has such a test."""
    found = [text for file, text in texts().items() if file.match(path)] if path else []
    return any(not name or re.search(rf"^(async )?def {name}\(", text, re.M) for text in found)


def test_tests_that_are_named_exist() -> None:
    assert [(page, test) for page in PAGES for test in named(page.read_text()) if not there(*test)] == []


@pytest.mark.parametrize("page", FAULTS)
def test_every_row_names_a_test(page: str) -> None:
    text = (ROOT / page).read_text().partition(FAULTS[page])[2]
    rows = [
        line
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith(("| fault |", "| fault in |", "| seen |"))
    ]
    assert [row for row in rows if not re.search(r"`tests/[\w/]+\.py::\w+`[^|]*\|$", row)] == []
    assert len(rows) >= 10

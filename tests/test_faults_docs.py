"""The table of docs/explanation/faults.md names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "explanation" / "faults.md").read_text()
ROWS = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]
NAMED = sorted(set(re.findall(r"`(tests/\w+\.py)::(\w+)`", TEXT)))


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_a_named_test_exists(path: str, name: str) -> None:
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.M)


def test_every_row_names_a_test() -> None:
    assert [row for row in ROWS if not re.search(r"`tests/\w+\.py::\w+`[^|]*\|$", row)] == []
    assert len(ROWS) >= 10

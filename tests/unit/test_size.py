"""The budget of the repository: it only falls. A feature comes in when lines go out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import PACKAGE, TESTS


def modules(root: Path) -> Iterator[str]:
    return (p.read_text() for p in root.rglob("*.py"))


def lines(root: Path) -> int:
    return sum(text.count("\n") for text in modules(root))


def classes(root: Path) -> int:
    return sum(isinstance(node, ast.ClassDef) for text in modules(root) for node in ast.walk(ast.parse(text)))


# Lower a number as soon as there is less; never raise one.
SIZES = {
    "lines of hpcgpu": (lines(PACKAGE), 37_086),
    "lines of tests": (lines(TESTS), 37_992),
    "modules of hpcgpu": (sum(1 for _ in modules(PACKAGE)), 195),
    "classes in hpcgpu/deploy": (classes(PACKAGE / "deploy"), 95),
    "classes of clusters": (sum(classes(PACKAGE / d) for d in ("deploy/cluster", "deploy/jobs", "plan/jobs")), 27),
}


@pytest.mark.parametrize("name", SIZES)
def test_size_stays_within_the_budget(name: str) -> None:
    size, budget = SIZES[name]
    assert size <= budget, (
        f"{name}: {size:,}, {size - budget:,} more than the budget of {budget:,} in tests/unit/test_size.py. "
        "Remove as much as you add: merge what has one user, delete what nothing needs. Do not raise the budget."
    )

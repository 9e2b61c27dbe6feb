"""The budget of the repository: it only falls. A feature comes in when lines go out."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from paths import PACKAGE, TESTS
from sources import MODULES, parsed


def lines(root: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in root.rglob("*.py"))


def classes(folder: str) -> int:
    files = [path for path in MODULES if path.is_relative_to(PACKAGE / folder)]
    return sum(isinstance(node, ast.ClassDef) for path in files for node in ast.walk(parsed(path)))


# Lower a number as soon as there is less; never raise one.
SIZES = {
    "lines of hpcgpu": (lambda: lines(PACKAGE), 33_793),
    "lines of tests": (lambda: lines(TESTS), 34_966),
    "modules of hpcgpu": (lambda: len(MODULES), 125),
    "classes in hpcgpu/deploy": (lambda: classes("deploy"), 83),
    "classes of clusters": (lambda: sum(map(classes, ("deploy/cluster", "deploy/jobs", "plan/jobs"))), 25),
}


@pytest.mark.parametrize("name", SIZES)
def test_size_stays_within_the_budget(name: str) -> None:
    measure, budget = SIZES[name]
    size = measure()
    assert size <= budget, (
        f"{name}: {size:,}, {size - budget:,} more than the budget of {budget:,} in tests/unit/test_size.py. "
        "Remove as much as you add: merge what has one user, delete what nothing needs. Do not raise the budget."
    )

"""The budget: lines, modules and classes may only become fewer. Lower a number with the step that makes it true."""

from __future__ import annotations

import ast

import pytest
from paths import ROOT

# Lines of Python of the package and of the tests; modules of the package; classes that a cluster's code has.
LINES, TEST_LINES, MODULES, DEPLOY_CLASSES = 45_400, 43_600, 343, 131


def python_files(folder: str) -> list[str]:
    return [path.read_text() for path in (ROOT / folder).rglob("*.py")]


def lines(folder: str) -> int:
    return sum(text.count("\n") for text in python_files(folder))


def classes(folder: str) -> int:
    return sum(isinstance(node, ast.ClassDef) for text in python_files(folder) for node in ast.walk(ast.parse(text)))


@pytest.mark.parametrize(
    ("what", "count", "budget"),
    [
        ("lines of hpcgpu", lines("hpcgpu"), LINES),
        ("lines of tests", lines("tests"), TEST_LINES),
        ("modules of hpcgpu", len(python_files("hpcgpu")), MODULES),
        ("classes of hpcgpu/deploy", classes("hpcgpu/deploy"), DEPLOY_CLASSES),
    ],
    ids=["lines", "test-lines", "modules", "classes"],
)
def test_size_is_within_its_budget(what: str, count: int, budget: int) -> None:
    assert count <= budget, f"{count} {what}, and {budget} at most: what goes out for what comes in? (CONTRIBUTING.md)"

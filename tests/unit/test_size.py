"""The ceilings of the repository: no targets. A feature without an issue comes in when lines go out."""

import ast
from pathlib import Path

import pytest
from paths import PACKAGE, TESTS
from sources import MODULES, parsed


def lines(root: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in root.rglob("*.py"))


def docstring_lines(path: Path) -> int:
    kinds = (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    firsts = [node.body[0] for node in ast.walk(parsed(path)) if isinstance(node, kinds) and ast.get_docstring(node)]
    return sum(first.end_lineno - first.lineno + 1 for first in firsts)


def classes(folder: str) -> int:
    files = [path for path in MODULES if path.is_relative_to(PACKAGE / folder)]
    return sum(isinstance(node, ast.ClassDef) for path in files for node in ast.walk(parsed(path)))


SIZES = {
    # each has a row in decision 16
    "lines of hpcgpu beside docstrings": (lambda: lines(PACKAGE) - sum(map(docstring_lines, MODULES)), 37_850),
    "lines of tests": (lambda: lines(TESTS), 45_080),
    "classes in hpcgpu/deploy": (lambda: classes("deploy"), 90),
    "classes of clusters": (lambda: sum(map(classes, ("deploy/cluster", "deploy/jobs", "plan/jobs"))), 30),
}


@pytest.mark.parametrize("name", SIZES)
def test_size_stays_below_its_ceiling(name: str) -> None:
    measure, ceiling = SIZES[name]
    size = measure()
    assert size <= ceiling, (
        f"{name}: {size:,}, {size - ceiling:,} more than the ceiling of {ceiling:,} in tests/unit/test_size.py. "
        "Delete what nothing needs. Only a feature that users asked for raises it, by a row in decision 16."
    )

"""The folder of a test says what it needs, and which room of the package it is about."""

from __future__ import annotations

import ast
from pathlib import Path

from paths import PACKAGE, TESTS

FILES = sorted(path.relative_to(TESTS) for path in TESTS.rglob("test_*.py"))
KINDS = {"unit", "process", "lab", "pbs", "gpu", "ucx", "cupy"}
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {"support"}


def marks(file: Path) -> set[str]:
    nodes = ast.walk(ast.parse((TESTS / file).read_text()))
    names = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)}
    return names & {"pytest.mark.mpi", "pytest.mark.slurm", "pytest.mark.pbs", "pytest.mark.gpu", "pytest.mark.ucx"}


def test_the_folder_alone_gives_a_test_its_marker() -> None:
    marked = {str(file) for file in FILES if marks(file)}
    assert marked == set(), "leave the marker out, and put the test into the folder of what it needs"


def test_the_folders_mirror_the_package() -> None:
    others = {str(f) for f in FILES if f.parts[0] not in KINDS or not set(f.parts[1:-1][:1]) <= ROOMS}
    assert others == set()

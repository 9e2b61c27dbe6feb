"""The folders of tests, and what a test leaves behind."""

from __future__ import annotations

import ast
import contextlib
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import leaks
import pytest
from paths import PACKAGE, TESTS
from waiting import until

KINDS = {"unit", "process", "lab", "pbs", "gpu", "ucx", "cupy"}
ROOMS = {path.name for path in PACKAGE.iterdir() if path.is_dir()} | {"support"}


def test_folders_mirror_the_package_and_give_the_markers() -> None:
    marker = re.compile(r"pytest\.mark\.(mpi|slurm|pbs|gpu|ucx)$")
    for path in TESTS.rglob("test_*.py"):
        parts = path.relative_to(TESTS).parts
        assert parts[0] in KINDS, path
        assert set(parts[1:-1][:1]) <= ROOMS, path
        nodes = (ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute))
        assert not any(map(marker.match, nodes)), f"{path}: leave the marker out, put the test into another folder"


@contextlib.contextmanager
def child() -> Iterator[str]:
    process = subprocess.Popen(["sleep", "600"])
    until(lambda: leaks.words(process.pid), "it is another program")
    yield f"child process {process.pid}: sleep 600"
    process.kill()
    process.wait()


@contextlib.contextmanager
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"descriptor {server.fileno()}: socket:["


@pytest.mark.parametrize("made", [child, listener])
def test_leaks_of_this_process_are_named(made: Callable[[], contextlib.AbstractContextManager[str]]) -> None:
    before = leaks.Before.now()
    with made() as name:
        assert any(left.startswith(name) for left in before.left())
    assert before.left() == []


def test_leaks_of_processes_and_files_are_named_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "LIMIT_S", 2.0)
    code = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=-3, stderr=-3, start_new_session=True).pid)"
    with pytest.raises(AssertionError, match=r"left behind: process \d+: sleep 600"), leaks.no_process_left(tmp_path):
        pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not leaks.words(pid)
    monkeypatch.setattr(leaks, "LIMIT_S", 0.1)
    with pytest.raises(AssertionError, match="left behind: forgotten"), leaks.no_process_left(tmp_path) as folder:
        (folder / "forgotten").touch()
    assert not folder.exists()

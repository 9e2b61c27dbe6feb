"""The folders of tests, leaks of a test, outcomes of a session, recordings, and ``scripts/run_tests.py``."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import leaks
import pytest
from paths import PACKAGE, ROOT, SUPPORT, TESTS
from recordings import records
from waiting import scaled, until

pytest_plugins = ["pytester"]
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
    until(lambda: leaks.command_line(process.pid), "it is another program")
    yield f"child process {process.pid}: sleep 600"
    process.kill()
    process.wait()


@contextlib.contextmanager
def listener() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"descriptor {server.fileno()}: socket:["


@pytest.mark.parametrize("made", [child, listener])
def test_leaks_of_this_process_are_named(made: Callable[[], contextlib.AbstractContextManager[str]]) -> None:
    before = leaks.resources()
    with made() as name:
        assert any(left.startswith(name) for left in leaks.came_since(before))
    assert leaks.came_since(before) == []


def test_leaks_of_processes_and_files_are_named_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "LIMIT_S", 2.0)
    code = "import subprocess as s; print(s.Popen(['sleep', '600'], stdout=-3, stderr=-3, start_new_session=True).pid)"
    with pytest.raises(AssertionError, match=r"left behind: process \d+: sleep 600"), leaks.no_process_left(tmp_path):
        pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert not leaks.command_line(pid)
    monkeypatch.setattr(leaks, "LIMIT_S", 0.1)
    with pytest.raises(AssertionError, match="left behind: forgotten"), leaks.no_process_left(tmp_path) as folder:
        (folder / "forgotten").touch()
    assert not folder.exists()


SUITE = """
import pytest
def test_here(): pass
@pytest.mark.skip(reason="no Docker")
def test_lab(): pass
@pytest.mark.gpu
@pytest.mark.skip(reason="no GPU")
def test_gpu(): pass
"""
# a plugin with which a test has no outcome
LOST = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item): return True if item.name == "test_here" else None
"""


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis and its like: most of a session's time


def session(pytester: pytest.Pytester, options: Sequence[str] = ()) -> pytest.RunResult:
    pytester.makeini(f"[pytest]\nmarkers = gpu: x\ntestpaths = tests\npythonpath = {SUPPORT}\n")
    pytester.makeconftest("pytest_plugins = ['outcomes']")
    pytester.makepyfile(lost=LOST)
    pytester.syspathinsert()
    pytester.mkdir("tests").joinpath("test_it.py").write_text(SUITE)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


def test_session_fails_for_a_skip_or_no_outcome(pytester: pytest.Pytester) -> None:
    result = session(pytester, ("-n", "2", "-p", "xdist", "-p", "lost"))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*requires these, which were skipped (no Docker):"])
    result.stdout.fnmatch_lines(["collected, but neither passed, failed nor skipped: *"])
    assert "  tests/test_it.py::test_gpu" not in result.outlines


def test_session_without_ci_passes_with_a_skip(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI")
    result = session(pytester)
    assert result.ret == pytest.ExitCode.OK
    assert "skipped 1: no Docker" in result.outlines


def test_recordings_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_text("$ squeue\n[user hpc] [exit 1]\n--- stdout\nA\n--- stderr\nB\n===\n")
    (record,) = records(path)
    assert (record.command, record.returncode, record.stdout) == ("squeue", 1, "A\n")
    path.write_text("squeue\n")
    with pytest.raises(ValueError, match="not a record"):
        list(records(path))


FLAKY = """
from pathlib import Path
def test_flaky():
    if not Path("ran").exists():
        Path("ran").touch()
        raise ValueError("the first run")
def test_good(): pass
"""
BAD = "def test_bad(): raise ValueError('each run')\n"


@pytest.mark.parametrize(
    ("suite", "code", "lines"),
    [
        (FLAKY + BAD, 1, {"flaky: tests/test_it.py::test_flaky", "failed: tests/test_it.py::test_bad"}),
        ("import nowhere", 1, {"fault: other: no report: pytest was ended, or crashed"}),
    ],
    ids=["flaky and bad", "no report"],
)
def test_decide_fails_for_failures_that_come_again(tmp_path: Path, suite: str, code: int, lines: set[str]) -> None:
    for folder in ("scripts", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts/run_tests.py").write_text((ROOT / "scripts/run_tests.py").read_text())
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\n")
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['outcomes']")

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "scripts/run_tests.py", *arguments]
        return subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=scaled(60), env=os.environ)

    (tmp_path / "tests/test_it.py").write_text(suite)
    call("run", "it", "tests")
    done = call("decide", "it", *(["other"] if "nowhere" in suite else []))
    assert done.returncode == code
    assert lines <= set(done.stdout.splitlines())

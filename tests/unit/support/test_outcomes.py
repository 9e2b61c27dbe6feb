"""Outcomes of a session: required tests that are skipped, and tests without an outcome, fail it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from outcomes import is_named, read_required
from paths import SUPPORT
from recordings import records

pytest_plugins = ["pytester"]

SUITE = """
import pytest
def test_here(): pass
@pytest.mark.skip(reason="no Docker")
def test_lab(): pass
@pytest.mark.gpu
@pytest.mark.skip(reason="no GPU")
def test_gpu(): pass
"""


WORKERS, FOLDER = ("-n", "2"), ("-n", "2", "tests")


def run(pytester: pytest.Pytester, required: str, options: Sequence[str] = ()) -> pytest.RunResult:
    pytester.makeini(f"[pytest]\nmarkers = gpu: x\ntestpaths = tests\npythonpath = {SUPPORT}\n")
    pytester.makeconftest("pytest_plugins = ['outcomes']")
    pytester.mkdir("tests").joinpath("test_it.py").write_text(SUITE)
    pytester.path.joinpath("tests/required.txt").write_text(required)
    plugins = ("-p", "xdist") if options else ()
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *plugins, *options)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent))
    monkeypatch.setenv("CI", "true")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # hypothesis and its like: most of a session's time


LOST = """
import pytest
@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item): return True if item.name == "test_here" else None
"""


@pytest.mark.parametrize("options", [(), WORKERS], ids=["alone", "workers"])
def test_session_fails_for_tests_skipped_gone_or_without_outcome(
    pytester: pytest.Pytester, options: Sequence[str]
) -> None:
    pytester.makepyfile(lost=LOST)
    pytester.syspathinsert()
    result = run(pytester, "tests/*  # all\ntests/test_it.py::test_renamed\n", (*options, "-p", "lost"))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    for line in (
        "skipped 1: no Docker",
        "*requires these, which were skipped (no Docker):",
        "*requires tests/test_it.py::test_renamed: there is no such test",
        "collected, but neither passed, failed nor skipped: tests/test_it.py::test_here",
    ):
        result.stdout.fnmatch_lines([line])
    assert "  tests/test_it.py::test_lab" in result.outlines
    assert "  tests/test_it.py::test_gpu" not in result.outlines


def test_without_ci_a_skip_is_shown_only(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI")
    result = run(pytester, "tests/*\n")
    assert result.ret == pytest.ExitCode.OK
    assert "skipped 1: no Docker" in result.outlines


def test_of_another_folder_only_the_files_are_looked_for(pytester: pytest.Pytester) -> None:
    pytester.mkdir("other").joinpath("test_more.py").touch()
    wanted = "tests/test_it.py::test_here\nother/test_more.py::test_more\nother/test_gone.py::test_more\n"
    result = run(pytester, wanted, FOLDER)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*requires other/test_gone.py::test_more: there is no such test"])
    result.stdout.no_fnmatch_line("*requires other/test_more.py*")


def test_ids_with_brackets_are_plain_text() -> None:
    assert is_named("tests/a.py::t[x]", "tests/a.py::t[x]")
    assert is_named("tests/a.py::t[x]", "tests/*::t*")
    assert not is_named("tests/a.py::t[x]", "tests/b*")
    assert read_required("# all\n\ntests/*  # these\n") == ["tests/*"]


def test_a_recording_is_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    failed = "$ squeue\n[user hpc] [exit 1]\n--- stdout\nA\n--- stderr\nB\n===\n"
    path.write_text(failed + "$ true\n[user hpc] [exit 0]\n--- stdout\n--- stderr\n===\n")
    first, second = records(path)
    assert (first.command, first.returncode, first.stdout, first.stderr) == ("squeue", 1, "A\n", "B")
    assert (second.command, second.stdout, second.stderr) == ("true", "", "")
    path.write_text("squeue\n")
    with pytest.raises(ValueError, match="not a record"):
        list(records(path))

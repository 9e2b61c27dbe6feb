"""A required test that was skipped fails a CI run, with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest
from recordings import records
from required import is_named, read_required

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


def run(pytester: pytest.Pytester, required: str) -> pytest.RunResult:
    pytester.makeini("[pytest]\nmarkers = gpu: x\ntestpaths = tests\n")
    pytester.mkdir("tests").joinpath("test_it.py").write_text(SUITE)
    pytester.path.joinpath("tests/required.txt").write_text(required)
    return pytester.runpytest_subprocess("-p", "required", "-p", "no:cacheprovider")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("PYTHONPATH", str(request.path.parent))
    monkeypatch.setenv("CI", "true")


def test_a_skipped_required_test_fails_the_session_and_a_gpu_test_does_not(pytester: pytest.Pytester) -> None:
    result = run(pytester, "tests/*  # all\n")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["skipped 1: no Docker", "*requires these, which were skipped (no Docker):"])
    assert "  tests/test_it.py::test_lab" in result.outlines
    assert "  tests/test_it.py::test_gpu" not in result.outlines


def test_without_ci_a_skip_is_shown_only(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI")
    result = run(pytester, "tests/*\n")
    assert result.ret == pytest.ExitCode.OK
    assert "skipped 1: no Docker" in result.outlines


def test_a_required_test_that_is_gone_fails_the_session(pytester: pytest.Pytester) -> None:
    result = run(pytester, "tests/test_it.py::test_here\ntests/test_it.py::test_renamed\n")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*requires tests/test_it.py::test_renamed: there is no such test"])


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

"""``scripts/run_tests.py`` on a small suite: a failure that does not come again does not fail the run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from paths import ROOT, SUPPORT
from waiting import scaled

FLAKY = """
from pathlib import Path
def test_flaky():
    if not Path("ran").exists():
        Path("ran").touch()
        raise ValueError("the first run")
def test_good(): pass
"""
BAD = "def test_bad(): raise ValueError('each run')\n"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("scripts", "tests"):
        (tmp_path / folder).mkdir()
    (tmp_path / "scripts/run_tests.py").write_text((ROOT / "scripts/run_tests.py").read_text())
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {SUPPORT}\n")
    (tmp_path / "conftest.py").write_text("pytest_plugins = ['outcomes']")
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    return tmp_path


def call(checkout: Path, *arguments: str) -> tuple[int, list[str]]:
    argv = [sys.executable, "scripts/run_tests.py", *arguments]
    done = subprocess.run(argv, cwd=checkout, capture_output=True, text=True, timeout=scaled(60))
    return done.returncode, done.stdout.splitlines()


def test_decide_failure_that_does_not_come_again_passes(checkout: Path) -> None:
    (checkout / "tests/test_it.py").write_text(FLAKY)
    assert call(checkout, "run", "it", "tests")[0] == 0
    code, lines = call(checkout, "decide", "it")
    assert code == 0
    assert lines[-3:] == [
        "flaky: tests/test_it.py::test_flaky",
        "flaky tests: 1; their outputs are in build/flaky.txt",
        "2 passed, 0 failed, 0 skipped",
    ]
    first, _, second = (checkout / "build/flaky.txt").read_text().partition("--- alone")
    assert "ValueError: the first run" in first
    assert "1 passed" in second
    report = json.loads((checkout / "build/test-report.json").read_text())
    assert report["flaky"] == ["tests/test_it.py::test_flaky"]
    assert report["tests"]["it"]["tests/test_it.py::test_good"][0] == "passed"


def test_decide_failure_that_comes_again_or_no_report_fails(checkout: Path) -> None:
    (checkout / "tests/test_it.py").write_text(BAD)
    assert call(checkout, "run", "it", "tests")[0] == 0
    code, lines = call(checkout, "decide", "it", "other")
    assert code == 1
    assert "failed: tests/test_it.py::test_bad" in lines
    assert "fault: other: no report: pytest was ended, or crashed" in lines


def test_decide_with_a_module_that_fails_to_import_fails(checkout: Path) -> None:
    (checkout / "tests/test_it.py").write_text("import nowhere\n")
    assert call(checkout, "run", "it", "tests")[0] != 0
    code, lines = call(checkout, "decide", "it")
    assert code == 1
    assert any(line.startswith("fault: it: ") for line in lines)

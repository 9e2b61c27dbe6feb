"""Outcome of each collected test: a session fails for a test without one, and for a required test that is skipped.

With ``CI=true`` no test of ``tests/required.txt`` may be skipped: one test id per line, or the beginning of ids, or a
glob; ``#`` starts a comment. Tests marked ``gpu`` or ``pbs`` are never required. With pytest-xdist only the workers
collect: they send their ids to the controller. ``HPCGPU_TEST_REPORT`` names a JSON file for all outcomes, which
``scripts/run_tests.py`` reads.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

LIST = Path("tests/required.txt")
_RANK = ("", "passed", "skipped", "failed")


def read_required(text: str) -> list[str]:
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def is_named(nodeid: str, pattern: str) -> bool:
    # A parametrized id has brackets, which a glob would read as a set: compare as plain text first.
    return nodeid.startswith(pattern) or fnmatchcase(nodeid, pattern)


def is_looked_for(pattern: str, config: pytest.Config) -> bool:
    """Tell whether this session would have seen such a test: it has all, or its folder, or its file is not there."""
    if config.args_source == pytest.Config.ArgsSource.TESTPATHS:
        return True
    file = pattern.partition("::")[0]
    return file.startswith(tuple(config.args)) or (file.endswith(".py") and not (config.rootpath / file).exists())


class Outcomes:
    """Collect the outcomes of a session, and fail it for tests that may not be skipped or have no outcome."""

    def __init__(self, patterns: list[str], path: str) -> None:
        self.patterns = patterns
        self.path = path  # of the JSON file; "": none
        self.collected: set[str] = set()
        self.deselected: set[str] = set()
        self.exempt: set[str] = set()
        self.skipped: dict[str, list[str]] = defaultdict(list)  # reason -> ids
        self.outcomes: dict[str, str] = {}  # the worst of setup, call and teardown
        self.durations_s: dict[str, float] = defaultdict(float)
        self.failures: dict[str, str] = defaultdict(str)
        self.unmatched: list[str] = []  # patterns

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.collected.add(item.nodeid)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.deselected.update(item.nodeid for item in items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the ids of a worker that has ended; a worker that has crashed sends nothing."""
        output = getattr(node, "workeroutput", {})
        self.collected.update(output.get("collected", ()))
        self.deselected.update(output.get("deselected", ()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note_skip(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self._note_skip(report)
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid] = max(self.outcomes.get(report.nodeid, ""), report.outcome, key=_RANK.index)
        self.durations_s[report.nodeid] += report.duration
        if report.failed:
            sections = "".join(f"\n--- {name}\n{text}" for name, text in report.sections)
            self.failures[report.nodeid] += f"{report.longreprtext}{sections}\n"

    def _note_skip(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped:
            if not {"gpu", "pbs"}.isdisjoint(getattr(report, "keywords", ())):
                self.exempt.add(report.nodeid)
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[reason.removeprefix("Skipped: ")].append(report.nodeid)

    def broken(self) -> dict[str, list[str]]:
        """Return the required tests that were skipped, by reason."""
        return {
            reason: bad
            for reason, ids in self.skipped.items()
            if (bad := [i for i in ids if i not in self.exempt and any(is_named(i, p) for p in self.patterns)])
        }

    def without_outcome(self) -> list[str]:
        return sorted(self.collected - self.deselected - set(self.outcomes))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if (worker := getattr(session.config, "workeroutput", None)) is not None:
            worker |= {"collected": sorted(self.collected), "deselected": sorted(self.deselected)}
            return
        if not session.testsfailed:
            unmatched = [p for p in self.patterns if not any(is_named(i, p) for i in self.collected)]
            self.unmatched = [p for p in unmatched if is_looked_for(p, session.config)]
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if session.config.option.collectonly or session.shouldstop or session.shouldfail or not ended:
            self.outcomes |= dict.fromkeys(self.without_outcome(), "not run")
        faulty = not ended or bool(self.unmatched or self.broken() or self.without_outcome())
        if faulty and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        if self.path:
            tests = {i: [self.outcomes[i], round(self.durations_s[i], 3)] for i in sorted(self.outcomes)}
            report = {"python": sys.executable, "faulty": faulty, "tests": tests, "failures": self.failures}
            Path(self.path).write_text(json.dumps(report, indent=0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, ids in self.skipped.items():
            terminalreporter.line(f"skipped {len(ids)}: {reason}")
        lines = []
        for reason, ids in self.broken().items():
            lines += [f"CI=true and {LIST} requires these, which were skipped ({reason}):", *(f"  {i}" for i in ids)]
        lines += [f"CI=true and {LIST} requires {pattern}: there is no such test" for pattern in self.unmatched]
        lines += [f"collected, but neither passed, failed nor skipped: {i}" for i in self.without_outcome()]
        for line in lines:
            terminalreporter.line(line, red=True)


def pytest_configure(config: pytest.Config) -> None:
    path = config.rootpath / LIST
    in_ci = os.environ.get("CI") == "true" and path.exists()
    patterns = read_required(path.read_text()) if in_ci else []
    # Not for the sessions that tests start.
    report = os.environ.pop("HPCGPU_TEST_REPORT", "")
    config.pluginmanager.register(Outcomes(patterns, report), "hpcgpu-outcomes")

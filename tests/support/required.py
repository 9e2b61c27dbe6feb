"""With ``CI=true`` no test of ``tests/required.txt`` may be skipped: a machine that lacks a thing is not a passed test.

``required.txt`` has one test id per line, or the beginning of ids, or a glob; ``#`` starts a comment. Tests marked
``gpu`` or ``pbs`` are never required. With pytest-xdist only the workers see the tests: they tell the controller which
there are.
"""

from __future__ import annotations

import os
from collections import defaultdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

LIST = Path("tests/required.txt")


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


class Required:
    """Gathers what was skipped and why, and fails the session for what may not be."""

    def __init__(self, patterns: list[str]) -> None:
        self.patterns = patterns
        self.known: set[str] = set()
        self.exempt: set[str] = set()
        self.skipped: dict[str, list[str]] = defaultdict(list)  # reason -> ids
        self.missing: list[str] = []

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.known.add(item.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Hear from a worker that has ended; one that has crashed says nothing."""
        self.known.update(getattr(node, "workeroutput", {}).get("known", ()))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self._note(report)

    def _note(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.skipped:
            if not {"gpu", "pbs"}.isdisjoint(getattr(report, "keywords", ())):
                self.exempt.add(report.nodeid)
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.skipped[reason.removeprefix("Skipped: ")].append(report.nodeid)

    def broken(self) -> dict[str, list[str]]:
        """Return what was required and skipped, by reason."""
        return {
            reason: bad
            for reason, ids in self.skipped.items()
            if (bad := [i for i in ids if i not in self.exempt and any(is_named(i, p) for p in self.patterns)])
        }

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if (worker := getattr(session.config, "workeroutput", None)) is not None:
            worker["known"] = sorted(self.known)
            return
        if not session.testsfailed:
            unknown = [p for p in self.patterns if not any(is_named(i, p) for i in self.known)]
            self.missing = [p for p in unknown if is_looked_for(p, session.config)]
        if (self.missing or self.broken()) and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for reason, ids in self.skipped.items():
            terminalreporter.line(f"skipped {len(ids)}: {reason}")
        for reason, ids in self.broken().items():
            terminalreporter.line(f"CI=true and {LIST} requires these, which were skipped ({reason}):", red=True)
            for nodeid in ids:
                terminalreporter.line(f"  {nodeid}")
        for pattern in self.missing:
            terminalreporter.line(f"CI=true and {LIST} requires {pattern}: there is no such test", red=True)


def pytest_configure(config: pytest.Config) -> None:
    path = config.rootpath / LIST
    wanted = os.environ.get("CI") == "true" and path.exists()
    patterns = read_required(path.read_text()) if wanted else []
    config.pluginmanager.register(Required(patterns), "hpcgpu-required")

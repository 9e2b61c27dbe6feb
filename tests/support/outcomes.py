"""Outcome of each collected test: a session fails for a test without one, and with ``CI=true`` for a skipped one.

Tests marked ``gpu`` or ``pbs`` may be skipped. With pytest-xdist only the workers collect: they send their ids to the
controller. ``HPCGPU_TEST_REPORT`` names a JSON file for all outcomes, which ``scripts/run_tests.py`` reads.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_RANK = ("", "passed", "skipped", "failed")


class Outcomes:
    """Collect the outcomes of a session, and fail it for tests that may not be skipped or have no outcome."""

    def __init__(self, in_ci: bool, path: str) -> None:
        self.in_ci = in_ci
        self.path = path  # of the JSON file; "": none
        self.collected: set[str] = set()
        self.deselected: set[str] = set()
        self.exempt: set[str] = set()
        self.skipped: dict[str, list[str]] = defaultdict(list)  # reason -> ids
        self.outcomes: dict[str, str] = {}  # the worst of setup, call and teardown
        self.durations_s: dict[str, float] = defaultdict(float)
        self.failures: dict[str, str] = defaultdict(str)

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
        """Return the tests that were skipped and may not, by reason."""
        required = {reason: [i for i in ids if i not in self.exempt] for reason, ids in self.skipped.items()}
        return {reason: ids for reason, ids in required.items() if ids and self.in_ci}

    def without_outcome(self) -> list[str]:
        return sorted(self.collected - self.deselected - set(self.outcomes))

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if (worker := getattr(session.config, "workeroutput", None)) is not None:
            worker |= {"collected": sorted(self.collected), "deselected": sorted(self.deselected)}
            return
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
        if session.config.option.collectonly or session.shouldstop or session.shouldfail or not ended:
            self.outcomes |= dict.fromkeys(self.without_outcome(), "not run")
        faulty = not ended or bool(self.broken() or self.without_outcome())
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
            lines += [f"CI=true requires these, which were skipped ({reason}):", *(f"  {i}" for i in ids)]
        lines += [f"collected, but neither passed, failed nor skipped: {i}" for i in self.without_outcome()]
        for line in lines:
            terminalreporter.line(line, red=True)


def pytest_configure(config: pytest.Config) -> None:
    report = os.environ.pop("HPCGPU_TEST_REPORT", "")  # not for the sessions that tests start
    config.pluginmanager.register(Outcomes(os.environ.get("CI") == "true", report), "hpcgpu-outcomes")

"""Run pytest suites, and run a failed test once more before it decides: ``make check`` and ``make test``.

``run_tests.py run SUITE [pytest options]``
    Run pytest and write the outcomes to ``build/tests/SUITE.json``. Failed tests do not fail this command.
``run_tests.py decide SUITE ...``
    Run the failed tests of these suites again, alone and one at a time. A test that passes then is flaky; both outputs
    of all flaky tests are in ``build/flaky.txt``. Write ``build/test-report.json`` (outcomes, durations, flaky tests).
    With ``DEBIAN=sid``, of the Slurm lab, all files have the name: ``build/test-report-sid.json``.
    Exit code 1: a test failed twice, more than three tests are flaky, or a suite has no complete report.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
OF = f"-{os.environ['DEBIAN']}" if os.environ.get("DEBIAN") else ""
MOST_FLAKY = 3
# More failures than this have one cause, which a second run does not change.
MOST_RERUNS = 10
Report = dict[str, Any]  # what tests/support/outcomes.py writes


def report_path(suite: str) -> Path:
    """Return the file for the outcomes of a suite."""
    return BUILD / "tests" / f"{suite}{OF}.json"


def new_report(suite: str) -> Path:
    """Remove the report of an earlier run; name the file for the next one to pytest."""
    path = report_path(suite)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.environ["HPCGPU_TEST_REPORT"] = str(path)
    return path


def run(suite: str, options: list[str]) -> int:
    """Run a suite in this process, which a signal ends; return 0 if ``decide`` has all that it needs for a verdict."""
    path = new_report(suite)
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)  # as `python -m pytest` has it, for pytest-xdist's workers too
    code = pytest.main(["-q", *options])
    return 0 if code in (0, 1) and path.exists() else int(code) or 1


def rerun(suite: str, nodeid: str, python: str) -> tuple[bool, str]:
    """Run a failed test alone; return whether it passes, and pytest's output."""
    print(f"run_tests: once more, alone: {nodeid}", flush=True)
    path = new_report(f"{suite}-rerun")
    argv = [python, "-m", "pytest", "-q", "-rP", "-p", "no:cacheprovider", nodeid]
    output = subprocess.run(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
    tests = json.loads(path.read_text())["tests"] if path.exists() else {}
    passed = tests.get(nodeid, [""])[0] == "passed"
    if not passed:
        print(output, flush=True)
    return passed, output


def read_reports(suites: list[str]) -> tuple[dict[str, Report], list[str]]:
    """Return the report of each suite, and a line for each suite that has no complete report."""
    reports = {s: json.loads(report_path(s).read_text()) for s in suites if report_path(s).exists()}
    faults = [f"{s}: no report: pytest was ended, or crashed" for s in suites if s not in reports]
    incomplete = "required tests were skipped, or tests have no outcome: its output names them"
    return reports, faults + [f"{s}: {incomplete}" for s, report in reports.items() if report["faulty"]]


def decide(suites: list[str]) -> int:
    """Run failed tests again, and judge the suites together."""
    reports, faults = read_reports(suites)
    failures = [(suite, nodeid) for suite, report in reports.items() for nodeid in report["failures"]]
    flaky, failed, outputs = [], [], []
    for suite, nodeid in failures:
        passed, output = rerun(suite, nodeid, reports[suite]["python"]) if len(failures) <= MOST_RERUNS else (False, "")
        (flaky if passed else failed).append(nodeid)
        if passed:
            outputs.append(f"=== {nodeid}\n{reports[suite]['failures'][nodeid]}\n--- alone\n{output}\n")
    if len(flaky) > MOST_FLAKY:
        faults.append(f"{len(flaky)} tests are flaky, and at most {MOST_FLAKY} may be")
    counts = Counter(outcome for report in reports.values() for outcome, _ in report["tests"].values())
    tests = {suite: report["tests"] for suite, report in reports.items()}
    summary = {"flaky": flaky, "failed": failed, "faults": faults, "counts": counts, "tests": tests}
    (BUILD / f"test-report{OF}.json").write_text(json.dumps(summary, indent=0))
    (BUILD / f"flaky{OF}.txt").write_text("".join(outputs))
    for word, names in (("flaky", flaky), ("failed", failed), ("fault", faults)):
        print("".join(f"{word}: {name}\n" for name in names), end="")
    print(f"flaky tests: {len(flaky)}" + (f"; their outputs are in build/flaky{OF}.txt" if flaky else ""))
    print(f"{counts['passed'] + len(flaky)} passed, {len(failed)} failed, {counts['skipped']} skipped")
    return int(bool(failed or faults))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["run", suite, *options]:
            sys.exit(run(suite, options))
        case ["decide", *suites] if suites:
            sys.exit(decide(suites))
    sys.exit(__doc__)

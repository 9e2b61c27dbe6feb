"""The Slurm lab as a fixture: one for each worker of pytest-xdist, or one for all tests."""

import contextlib
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest
from lab import PATIENCE_S, WITH_ACCOUNTING, Lab, LabUnavailable

LIMIT_S = PATIENCE_S + 60  # of a test
WHY_NOT = pytest.StashKey[Exception]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests first that may take longest: at the end no worker of pytest-xdist is to wait for one of them."""
    for item in items:
        if item.get_closest_marker("slurm") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(LIMIT_S))

    def limit_s(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return mark.args[0] if mark else 0

    items.sort(key=limit_s, reverse=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build what is not built before any test's time runs: minutes on a fresh machine."""
    fixtures = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if fixtures & {"slurm_lab", "accounting_lab"} and not session.config.option.collectonly:
        try:
            Lab().build()
        except Exception as why:
            session.config.stash[WHY_NOT] = why  # for each test that wants a lab


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show how the logs of the last jobs end beside what has failed: the lab is gone when somebody reads of it."""
    report = yield
    lab = getattr(item, "funcargs", {}).get("slurm_lab")
    if report.when == "call" and report.failed and lab:
        last = "cd ~hpc; ls -t slurm-*.out */slurm-*.out 2> /dev/null | head -n 6 | xargs -r tail -n 12"
        both = lab.exec(lab.login, ["sh", "-c", f"{last}; tail -n 60 /var/log/slurm/slurmctld.log"], user="root")
        report.sections.append(("Logs of the last jobs, and of slurmctld", both.stdout))
    return report


@contextmanager
def started(lab: Lab) -> Iterator[Lab]:
    """Start a lab once. One that was up already is used and left up, as with HPCGPU_KEEP_LAB=1."""
    keep = os.environ.get("HPCGPU_KEEP_LAB") == "1" or lab.is_up()
    with contextlib.ExitStack() as stack:
        stack.callback(lab.close)
        if not keep:
            stack.enter_context(lab.down_at_the_end())
        lab.up()
        jobs = lab.jobs()
        assert not jobs, f"the Slurm lab is in use: {jobs}. End these jobs (scancel -u hpc) or 'make slurm-down'."
        lab.others = lab.processes()
        yield lab


@pytest.fixture(scope="session")
def _lab(pytestconfig: pytest.Config) -> Iterator[Lab]:
    why = pytestconfig.stash.get(WHY_NOT, None)
    if isinstance(why, LabUnavailable):
        pytest.skip(f"no Slurm lab here: {why}")
    if why:
        raise why
    with started(Lab()) as lab:
        yield lab


@contextmanager
def idle(lab: Lab) -> Iterator[Lab]:
    """The lab, idle. Whatever a test leaves behind on it, jobs or processes, fails the test."""
    yield lab
    left = lab.wait_idle()
    if left:
        lab.clean_up()
    assert not left, f"left behind on the lab: {left}"


@pytest.fixture
def slurm_lab(_lab: Lab) -> Iterator[Lab]:
    with idle(_lab) as lab:
        yield lab


@pytest.fixture
def accounting_lab(_lab: Lab) -> Iterator[Lab]:
    """Another lab, whose Slurm knows users and their limits (slurmdbd); up for one test only."""
    with started(Lab(WITH_ACCOUNTING, accounting=True)) as lab, idle(lab):
        yield lab

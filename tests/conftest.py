"""Options and fixtures of all tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from lab import Lab, LabUnavailable

LAB_START_S = 900  # the first slurm test may build the image: 2-4 minutes were measured on 2 cores


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files, then read the diff")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.import_plugin("required")
    if config.getoption("--update-golden"):
        os.environ["UPDATE_GOLDEN"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = next((item for item in items if item.get_closest_marker("slurm")), None)
    if first:
        first.add_marker(pytest.mark.timeout(LAB_START_S))


@pytest.fixture(scope="session")
def _lab() -> Iterator[Lab]:
    """Start the lab once. One that was up already is used and left up, as with HPCGPU_KEEP_LAB=1."""
    lab = Lab()
    keep = lab.is_up() or os.environ.get("HPCGPU_KEEP_LAB") == "1"
    try:
        lab.up()
    except LabUnavailable as why:
        pytest.skip(f"no Slurm lab here: {why}")
    yield lab
    if not keep:
        lab.down()


@pytest.fixture
def slurm_lab(_lab: Lab) -> Iterator[Lab]:
    """The lab, idle. Whatever a test leaves behind on it, jobs or processes, fails the test."""
    jobs = _lab.jobs()
    assert not jobs, f"the Slurm lab is in use: {jobs}. End these jobs (scancel -u hpc) or 'make slurm-down'."
    before = _lab.processes()
    yield _lab
    left = _lab.wait_idle(before)
    if left:
        _lab.clean_up(before)
    assert not left, f"left behind on the lab: {left}"

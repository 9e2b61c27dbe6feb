"""The real OpenPBS as a fixture: one for all tests, since a machine has one at most."""

from collections.abc import Iterator

import pytest
from pbs_lab import HOME, PbsLab, PbsLabUnavailable

LIMIT_S = 400  # of a test that waits for PBS to miss two nodes, one after the other


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("pbs"):
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def _lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PbsLab]:
    try:
        lab = PbsLab(tmp_path_factory.mktemp("pbs-lab"))
        lab.up()
    except PbsLabUnavailable as why:
        pytest.skip(f"no real OpenPBS here: {why}")
    try:
        yield lab
    finally:
        lab.down()


@pytest.fixture
def lab(_lab: PbsLab) -> Iterator[PbsLab]:
    """The lab, idle and whole. What a test leaves there, jobs, processes or folders, fails it."""
    yield _lab
    _lab.mend()
    _lab.wait_idle()
    for log in (HOME / "work").glob("*.o*"):
        log.unlink()

"""UCX without a GPU, in an environment of its own: ``make ucx``."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import leaks
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("distributed_ucxx") is None:
        here = [item for item in items if item.get_closest_marker("ucx")]
        for item in here:
            item.add_marker(pytest.mark.skip(reason="distributed-ucxx is not installed here: make ucx"))


@pytest.fixture(scope="module")
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A home and a temporary folder for a cluster that tests share, in which nothing may be left."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(home))
        with leaks.no_process_left(home):
            yield home

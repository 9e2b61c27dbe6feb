"""A plugin of pytest for distributed's own tests: workers of this process that are given no data have the store."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import distributed
import distributed.shuffle
import pytest
from distributed import Worker, utils_test
from distributed.utils_test import *  # noqa: F403 - the fixtures of its tests

from hpcgpu.deploy.processes.worker_plugin import SpillPlugin
from hpcgpu.spill import GpuSpillBuffer

plain, signature = Worker.__init__, inspect.signature(Worker.__init__)
store = os.environ["STORE"]
# What the tests import by name, and their certificates, are in the sources: wheels have neither.
sources = Path(os.environ["SOURCES"])
distributed.__path__.append(str(sources))
distributed.shuffle.__path__.append(str(sources / "shuffle"))
utils_test.certs_dir = str(sources / "tests")


def with_store(self: Worker, *args: Any, **kwargs: Any) -> None:
    """Make a worker with the store, unless it is given its data."""
    if signature.bind(self, *args, **kwargs).arguments.get("data") is None:
        limits = {"memory_limit": os.environ.get("LIMIT"), "jit_unspill": store == "jit", "quiet": True}
        kwargs["data"] = GpuSpillBuffer, limits
        kwargs["plugins"] = (*(kwargs.get("plugins") or ()), SpillPlugin(None))
    plain(self, *args, **kwargs)


if store != "none":
    Worker.__init__ = with_store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip slow tests."""
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="slow"))

"""A plugin of pytest for distributed's own tests, which then try a part of hpcgpu, named in the variable TRY.

``whole`` or ``jit``: workers of this process that are given no data have the spill store. ``near`` or ``far``:
connections of the tests' process copy from the peer's memory, or cut large frames into data connections, as between
nodes. ``paced``: schedulers of this process remove workers in parts. ``none``: nothing of hpcgpu.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from pathlib import Path
from typing import Any

import distributed
import distributed.comm
import distributed.deploy.local
import distributed.shuffle
import pytest
from distributed import Worker, scheduler, utils_test
from distributed.utils_test import *  # noqa: F403 - the fixtures of its tests

from hpcgpu.deploy.network import prepare
from hpcgpu.deploy.network.data_connections import in_thread, loops, thread_count
from hpcgpu.deploy.processes.removals import PacedScheduler
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.distributed.plugin import SpillPlugin

plain, signature = Worker.__init__, inspect.signature(Worker.__init__)
part = os.environ["TRY"]
# What the tests import by name, and their certificates, are in the sources: wheels have neither.
sources = Path(os.environ["SOURCES"])
distributed.__path__.append(str(sources))
for package in (distributed.comm, distributed.shuffle):
    package.__path__.append(str(sources / package.__name__.rpartition(".")[2]))
utils_test.certs_dir = str(sources / "tests")


def with_store(self: Worker, *args: Any, **kwargs: Any) -> None:
    """Make a worker with the store, unless it is given its data."""
    if signature.bind(self, *args, **kwargs).arguments.get("data") is None:
        limits = {"memory_limit": os.environ.get("LIMIT"), "jit_unspill": part == "jit", "quiet": True}
        kwargs["data"] = GpuSpillBuffer, limits
        kwargs["plugins"] = (*(kwargs.get("plugins") or ()), SpillPlugin())
    plain(self, *args, **kwargs)


async def start_threads() -> None:
    """Start all threads that copy."""
    waiting = [in_thread(started.wait) for _ in range(thread_count())]
    await asyncio.to_thread(started.wait)
    await asyncio.gather(*waiting)


if part in ("whole", "jit"):
    Worker.__init__ = with_store
elif part == "paced":
    for module in (distributed, distributed.deploy.local, scheduler, utils_test):
        module.Scheduler = PacedScheduler
elif part != "none":
    prepare("tcp://", node_copies=part == "near")
    # Threads of the process, which never end, would be leaked from the first test that needs them.
    loops()
    started = threading.Barrier(thread_count() + 1)
    asyncio.run(start_threads())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip slow tests without distributed's option for them."""
    for item in items:
        if "slow" in item.keywords and not config.getoption("--runslow", default=False):
            item.add_marker(pytest.mark.skip(reason="slow"))

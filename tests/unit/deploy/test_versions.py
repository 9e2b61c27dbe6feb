"""Versions of workers: compared once for each set of them, with distributed's answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from crowd import METRICS
from distributed import Scheduler, versions
from distributed.comm import CommClosedError
from hypothesis import given
from hypothesis import strategies as st
from waiting import when

from hpcgpu.deploy import compat

original = versions.error_message
PACKAGES = st.dictionaries(st.sampled_from(["dask", "numpy", "python", "lz4"]), st.sampled_from(["1", "2", None]))
VERSIONS = st.one_of(st.none(), st.builds(lambda packages: {"packages": packages}, PACKAGES))


class Silent:
    """A connection of a worker that says nothing more, and is closed."""

    member: asyncio.Task[None]
    peer_address = "tls://127.0.0.1:1"

    def __init__(self) -> None:
        self.welcome: dict[str, Any] = {}
        self._end = asyncio.Event()

    async def write(self, message: dict[str, Any], **_: Any) -> None:
        self.welcome = self.welcome or message

    async def read(self, **_: Any) -> Any:
        await self._end.wait()
        raise CommClosedError

    def closed(self) -> bool:
        return self._end.is_set()

    async def close(self) -> None:
        self._end.set()

    def abort(self) -> None:
        self._end.set()

    async def leave(self) -> None:
        await self.close()
        await self.member


class Counted(dict[str, Any]):
    """Packages that count their look-ups."""

    lookups = 0

    def get(self, *args: Any) -> Any:
        Counted.lookups += 1
        return super().get(*args)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    versions.error_message = original


async def join(scheduler: Scheduler, number: int, packages: dict[str, Any]) -> Silent:
    comm, name = Silent(), f"worker-{number}"
    facts: dict[str, Any] = {"status": "running", "server_id": name, "name": name, "nthreads": 1, "nanny": None}
    facts |= {"now": time.time(), "metrics": dict(METRICS), "memory_limit": 1 << 30, "local_directory": ""}
    facts |= {
        "resources": {},
        "extra": {},
        "services": {},
        "versions": {"packages": packages},
        "stimulus_id": name,
        "resolve_address": False,
    }
    comm.member = asyncio.create_task(scheduler.add_worker(comm=comm, address=f"tls://127.0.0.1:{number}", **facts))
    await when(lambda: comm.welcome)
    return comm


@pytest.mark.parametrize("shared", [False, True], ids=["distributed alone", "shared"])
async def test_join_looks_up_the_packages_of_all_workers_once(shared: bool) -> None:
    lookups = []
    async with Scheduler(dashboard_address=":0", port=0) as scheduler, AsyncExitStack() as members:
        if shared:
            compat.share_versions(scheduler)
        for number in range(1, 21):
            Counted.lookups = 0
            comm = await join(scheduler, number, Counted(dask="1", numpy="2"))
            members.push_async_callback(comm.leave)
            lookups.append(Counted.lookups)
        odd = await join(scheduler, 30, {"dask": "3"})
        members.push_async_callback(odd.leave)
        assert "Mismatched versions" in odd.welcome["warning"]
    assert (lookups[-1] == lookups[1]) is shared


@given(st.lists(VERSIONS, min_size=1, max_size=3), st.data())
def test_versions_each_once_give_distributeds_answer(kinds: list[Any], data: st.DataObject) -> None:
    workers = dict(enumerate(data.draw(st.lists(st.sampled_from(kinds), max_size=8))))
    ours, theirs = (original(kinds[0], of, kinds[-1]) for of in (compat.each_once(workers), workers))
    assert ours == theirs

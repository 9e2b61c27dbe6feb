"""Versions of workers: compared once for each set of them, with distributed's answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from distributed import Scheduler, versions
from hypothesis import given
from hypothesis import strategies as st
from silent_workers import join

from hpcgpu.deploy import compat

original = versions.error_message
PACKAGES = st.dictionaries(st.sampled_from(["dask", "numpy", "python", "lz4"]), st.sampled_from(["1", "2", None]))
VERSIONS = st.one_of(st.none(), st.builds(lambda packages: {"packages": packages}, PACKAGES))


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

"""A key is read while another thread deletes it or sets it anew: the reader gets the value that the key had."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from spill_stores import KIB, NewStore
from waiting import aside, scaled

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.proxies.proxy import unproxy
from hpcgpu.spill.storage.disk import Disk
from hpcgpu.spill.store.identity_map import Reader


@contextmanager
def read_in_the_middle(monkeypatch: pytest.MonkeyPatch, store: GpuSpillBuffer, key: Any, where: Any) -> Iterator[Any]:
    """Read a key in another thread, which is in the middle of ``where`` while inside; then its result is there."""
    inside, go_on = threading.Event(), threading.Event()
    owner, name = where
    plain = getattr(owner, name)

    def slow(*args: Any) -> Any:
        inside.set()
        assert go_on.wait(scaled(20))
        return plain(*args)

    monkeypatch.setattr(owner, name, slow)
    done = aside(lambda: store[key])
    assert inside.wait(scaled(20))
    yield done
    go_on.set()


def lowest(store: GpuSpillBuffer, keys: Any) -> Any:
    return next(key for key in keys if store._entries[key].units[0].tier < store._entries[key].units[0].top)


@pytest.mark.parametrize("change", ["deleted", "set"])
def test_a_small_value(monkeypatch: pytest.MonkeyPatch, stored: NewStore, change: str) -> None:
    store = stored(0, 2 * KIB, target=1.0)
    for i in range(40):
        store[i] = "x" * 200 + str(i)
    assert store.settle()
    key = lowest(store, range(40))
    with read_in_the_middle(monkeypatch, store, key, (Disk, "read")) as done:
        if change == "deleted":
            del store[key]
        else:
            store[key] = "another"
    assert done.result(scaled(20)) == "x" * 200 + str(key)


def test_a_small_array_on_the_device(monkeypatch: pytest.MonkeyPatch, stored: NewStore, gpu: SimGpu) -> None:
    store = stored(KIB, 100 * KIB)
    for i in range(10):
        store[i] = gpu.asarray(np.full(300, i, "u1"))
    assert store.settle()
    key = lowest(store, range(10))
    with read_in_the_middle(monkeypatch, store, key, (SimGpu, "unpack")) as done:
        del store[key]
    assert done.result(scaled(20)).get().tolist() == [key] * 300


@pytest.mark.parametrize("nbytes", [500, 20 * KIB])
def test_a_list_that_comes_up_by_parts(
    monkeypatch: pytest.MonkeyPatch, stored: NewStore, gpu: SimGpu, nbytes: int
) -> None:
    store = stored(100 * KIB, 100 * KIB, jit_unspill=True)
    store["key"] = [gpu.asarray(np.full(nbytes, i, "u1")) for i in range(2)]
    store["other"] = [gpu.asarray(np.full(nbytes, 2, "u1"))]
    with read_in_the_middle(monkeypatch, store, "key", (Reader, "_part")) as done:
        del store["key"]
    found = done.result(scaled(20))
    assert [unproxy(x).get().tolist() for x in found] == [[i] * nbytes for i in range(2)]
    del found, done
    assert store.tiers["device"] == nbytes
    store["next"] = 1
    del store["next"], store["other"]
    assert store.tiers == {"device": 0, "host": 0, "disk": 0}


def test_a_value_that_was_read_goes_with_its_key(stored: NewStore) -> None:
    """What keeps a name while it reads keeps none afterwards."""
    store = stored(0, 2 * KIB, target=1.0)
    for i in range(40):
        store[i] = "x" * 200 + str(i)
    assert store.settle()
    assert [store[i][200:] for i in range(40)] == [str(i) for i in range(40)]
    assert {entry.names for entry in store._entries.values()} == {1}
    store.clear()
    assert store.settle()
    assert store.tiers == {"device": 0, "host": 0, "disk": 0}

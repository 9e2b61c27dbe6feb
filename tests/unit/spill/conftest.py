"""All tests of the store run with a lock that tells when it is no leaf; many share a device and a small store."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lock_guard import guarded_lock
from spill_stores import KIB, NewStore, new_store

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer

stored = new_store


@pytest.fixture(autouse=True)
def _leaf_lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with guarded_lock(monkeypatch):
        yield


@pytest.fixture
def gpu() -> SimGpu:
    return SimGpu(1024 * KIB)


@pytest.fixture
def store(stored: NewStore) -> GpuSpillBuffer:
    return stored(64 * KIB, 64 * KIB)

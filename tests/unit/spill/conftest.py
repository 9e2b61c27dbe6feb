"""All tests of the store run with a lock that tells when it is no leaf; many share a device and a small store."""

import pytest
from lock_guard import leaf_lock
from spill_stores import KIB, NewStore, new_store

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer

stored, _leaf_lock = new_store, leaf_lock


@pytest.fixture
def gpu() -> SimGpu:
    return SimGpu(1024 * KIB)


@pytest.fixture
def store(stored: NewStore) -> GpuSpillBuffer:
    return stored(64 * KIB, 64 * KIB)

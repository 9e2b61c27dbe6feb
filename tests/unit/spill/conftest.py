"""All tests of the store run with a lock that tells when it is no leaf; many share a device and a small store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lock_guard import guarded_lock
from spill_stores import KIB

from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer


@pytest.fixture(autouse=True)
def _leaf_lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with guarded_lock(monkeypatch):
        yield


@pytest.fixture
def gpu() -> SimGpu:
    return SimGpu(1024 * KIB)


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Callable[..., GpuSpillBuffer]]:
    """Makes stores, which are closed at the end; then nothing of theirs is left on disk."""
    made: list[GpuSpillBuffer] = []

    def new(*arguments: Any, **keywords: Any) -> GpuSpillBuffer:
        made.append(GpuSpillBuffer(*arguments, local_directory=str(tmp_path), **keywords))
        return made[-1]

    yield new
    for store in made:
        store.close()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def store(stored: Callable[..., GpuSpillBuffer]) -> GpuSpillBuffer:
    return stored(64 * KIB, 64 * KIB)

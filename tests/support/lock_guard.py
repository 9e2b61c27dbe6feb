"""Sees to it that the spill store's lock is a leaf: who holds it copies nothing, frees nothing, calls no user code."""

import contextlib
import functools
import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from hpcgpu.sim import SimGpu
from hpcgpu.spill import proxies
from hpcgpu.spill import proxies as proxies_dask
from hpcgpu.spill.proxies import State
from hpcgpu.spill.storage import disk
from hpcgpu.spill.storage.disk import Disk, Pool, Slabs
from hpcgpu.spill.storage.lock import LeafLock
from hpcgpu.spill.store import executor, identity_map
from hpcgpu.spill.values import host_objects

# Where what must not happen under the lock is looked up when it does.
WATCHED: tuple[tuple[Any, str], ...] = (
    *((SimGpu, name) for name in ("pack", "unpack", "buffer_of", "_free", "_allocate")),
    *((Disk, name) for name in ("write", "read", "empty_bin")),
    *((Slabs, "empty"), (Pool, "trim")),
    *((disk.Pickled, name) for name in ("write", "read")),
    (identity_map, "size_of"),
    (disk, "_dumps"),
    (identity_map, "take_apart"),
    (identity_map, "held_by"),
    (host_objects, "held_by"),
    (host_objects, "_held_by_frame"),
    (identity_map, "put_together"),
    (proxies_dask, "make_proxy"),
    (proxies_dask, "release"),
    (proxies, "up"),
    (State, "load"),
    (executor, "_sizes"),
)


@contextlib.contextmanager
def guarded_lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail if anything that is watched happens under the lock of a store that is made meanwhile."""
    locks: list[LeafLock] = []
    violations: list[str] = []
    collecting = set[int]()  # the garbage collector may run anything anywhere

    def note_collection(phase: str, _: object) -> None:
        (collecting.add if phase == "start" else collecting.discard)(threading.get_ident())

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() not in collecting and any(lock.is_mine for lock in locks):
                violations.append(f"{name} under the lock:\n{''.join(traceback.format_stack(limit=12))}")
            return call(*args, **kwargs)

        return checked

    make = executor.Executor.__init__

    def make_guarded(self: executor.Executor, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.lock = LeafLock()  # of this guard: there may be two
        locks.append(self.lock)

    monkeypatch.setattr(executor.Executor, "__init__", make_guarded)
    for owner, name in WATCHED:
        plain = vars(owner)[name]
        if isinstance(plain, staticmethod):
            monkeypatch.setattr(owner, name, staticmethod(watched(name, plain.__func__)))
        else:
            monkeypatch.setattr(owner, name, watched(name, plain))
    gc.callbacks.append(note_collection)
    try:
        yield
    finally:
        gc.callbacks.remove(note_collection)
    assert not violations, violations[0]


@pytest.fixture(autouse=True)
def leaf_lock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All tests of a module that has this fixture run with such a lock."""
    with guarded_lock(monkeypatch):
        yield

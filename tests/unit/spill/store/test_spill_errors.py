"""What readers get when a value cannot be read: an error of their own, which keeps nothing of other readers."""

from __future__ import annotations

import gc
import threading
import traceback
from typing import Any

import numpy as np
import pytest
from spill_stores import KIB, NewStore
from waiting import aside, scaled, until

from hpcgpu.errors import SpillError
from hpcgpu.sim import OutOfMemoryError, SimGpu


def fails(_: Any) -> None:
    try:
        raise KeyError("the first")
    except KeyError as error:
        raise ValueError("not this one") from error


class CannotComeBack:
    """A value that can be pickled, and not be unpickled."""

    def __init__(self) -> None:
        self.array = np.zeros(50 * KIB, "u1")

    def __sizeof__(self) -> int:
        return 50 * KIB

    def __reduce__(self) -> Any:
        return fails, (self.array,)


def test_a_lost_value_keeps_nothing_of_its_readers(stored: NewStore, gpu: SimGpu) -> None:
    store = stored(0, 40 * KIB, target=1.0)
    store["lost"] = CannotComeBack()
    assert store.settle(scaled(20))

    def task() -> Any:
        workspace = gpu.empty(100 * KIB, "u1")
        return store["lost"], workspace

    texts = []
    for _ in range(3):
        try:  # not pytest.raises, which keeps the traceback
            task()
        except SpillError as error:
            texts.append("".join(traceback.format_exception(error)))
            step = error.__cause__
            while step is not None:  # what was kept
                assert step.__traceback__ is None
                step = step.__cause__
    gc.collect()
    assert gpu.used_bytes == 0
    assert store.disk.slabs.used_bytes == 0
    assert len(texts) == 3 and all("'lost' cannot be read back from disk: it cannot be unpickled" in t for t in texts)
    assert all(text.count("in task") == 1 for text in texts)


class Shared(Exception):
    """An error that cannot be made again from its arguments."""

    def __init__(self, *, code: int) -> None:
        super().__init__("it is broken")
        self.code = code


class BrokenGpu(SimGpu):
    """A device whose copies up fail, after a while."""

    error: Exception | None = None
    go_on = threading.Event()

    def unpack(self, *arguments: Any) -> Any:
        if self.error is not None:
            assert self.go_on.wait(scaled(20))
            raise self.error
        return super().unpack(*arguments)


@pytest.mark.parametrize(
    ("error", "kind"), [(OutOfMemoryError("no room"), OutOfMemoryError), (Shared(code=3), SpillError)]
)
def test_readers_of_one_value_get_an_error_each(stored: NewStore, error: Exception, kind: type) -> None:
    gpu, store = BrokenGpu(1024 * KIB), stored(100 * KIB)
    for i in range(5):
        store[i] = gpu.asarray(np.zeros(40 * KIB, "u1"))
    assert store.settle(scaled(20))
    gpu.error, gpu.go_on = error, threading.Event()
    readers = [aside(lambda: store[0]) for _ in range(3)]
    (unit,) = store._entries[0].units
    until(lambda: len(unit.waiters) == 3, "three readers wait")
    gpu.go_on.set()
    found = [done.exception(20) for done in readers]
    assert len({id(each) for each in found}) == 3
    assert {type(each) for each in found} <= {kind, type(error)}  # distributed's tblib makes such errors again, too
    for each in found:
        assert each is not None and each is not error
        assert str(error) in str(each)
        chain = [step for step in (each.__cause__, each.__context__) if step is not None]
        assert all(step.__traceback__ is None for step in chain)
    gpu.error = None
    assert store[0].get()[0] == 0

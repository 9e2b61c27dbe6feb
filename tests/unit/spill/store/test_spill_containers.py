"""The store and device arrays in containers of every kind: counted, moved, and back as they were."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hpcgpu.sim import SimArray, SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.proxies import is_proxy, unproxy

KIB = 1024
EACH = 16 * KIB


class MyList(list[Any]):
    pass


class Model:
    """As CuPy's sparse matrices: arrays in attributes, methods that hand them to compiled code."""

    def __init__(self, weights: Any) -> None:
        self.name, self.weights = "model", weights

    def total(self) -> float:
        assert type(self.weights) is SimArray
        return float(self.weights.sum().get())


def nested(x: Any) -> Any:
    for _ in range(1500):  # deeper than Python's own calls may go
        x = [x]
    return x


def unnested(x: Any) -> Any:
    while type(x) is list:
        (x,) = x
    return x


# how an array is put in, and how it is taken out
KINDS: dict[str, tuple[Any, Any]] = {
    "OrderedDict": (lambda a: OrderedDict(x=a), lambda v: v["x"]),
    "defaultdict": (lambda a: defaultdict(list, x=[a]), lambda v: v["x"][0]),
    "deque": (lambda a: deque([a], 3), lambda v: v[0]),
    "list subclass": (lambda a: MyList([a]), lambda v: v[0]),
    "namespace": (lambda a: SimpleNamespace(a=a), lambda v: v.a),
    "object": (Model, lambda v: v.weights),
    "set": (lambda a: {Model(a)}, lambda v: next(iter(v)).weights),
    "nested": (nested, unnested),
}


@pytest.fixture(params=[False, True], ids=["plain", "jit_unspill"])
def store(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GpuSpillBuffer]:
    made = GpuSpillBuffer(4 * EACH, 4 * KIB, str(tmp_path), jit_unspill=request.param)  # to disk, too
    yield made
    made.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_limit_holds_for_arrays_in_any_container(store: GpuSpillBuffer, kind: str) -> None:
    gpu = SimGpu(9 * EACH)
    put_in, take_out = KINDS[kind]
    for n in range(8):
        store[n] = put_in(gpu.asarray(np.full(EACH // 8, float(n))))
        assert store.settle()
        assert gpu.used_bytes == store.tiers["device"] <= 4 * EACH
    for n in range(8):
        value = store[n]
        assert type(value) is type(put_in(None))
        assert unproxy(take_out(value)).get()[5] == n
        del value


def test_methods_of_an_object_have_real_arrays(store: GpuSpillBuffer) -> None:
    """Only what is in containers and records comes up one by one with jit_unspill, as proxies."""
    gpu = SimGpu(9 * EACH)
    for n in range(8):
        store[n] = [Model(gpu.asarray(np.full(EACH // 8, float(n))))]
        store["list", n] = [gpu.asarray(np.full(EACH // 8, float(n)))]
        assert store.settle()
    assert [store[n][0].total() for n in range(8)] == [n * EACH / 8 for n in range(8)]
    assert all(is_proxy(store["list", n][0]) == store.jit_unspill for n in range(8))

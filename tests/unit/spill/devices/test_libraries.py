"""Objects that show device memory by ``__cuda_array_interface__``: tensors of PyTorch, buffers of RMM.

The libraries are stand-ins (``support/fake_libraries.py``); ``tests/gpu/spill/test_libraries_gpu.py`` has real ones,
``tests/cupy`` arrays of numba.
"""

import functools
import gc
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fake_libraries as fake
import numpy as np
import pytest
from spill_stores import NewStore

from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices import cuda
from hpcgpu.spill.devices.allocation_failure import AllocationFailureHook
from hpcgpu.spill.devices.cuda import CudaDevice, device_of, is_device_array
from hpcgpu.spill.devices.libraries import ArrayView, BytesView, extent_of, library_of
from hpcgpu.spill.devices.pools import TensorView
from hpcgpu.spill.proxies import asproxy, is_proxy, unproxy

KIB = 1024
EACH = 16 * KIB


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake.Gpu:
    gc.collect()
    gc.freeze()  # what other tests have left is not looked at in each of the collections here
    return fake.install(monkeypatch, 12 * EACH)


@pytest.fixture(params=[False, True], ids=["plain", "jit_unspill"])
def store(gpu: fake.Gpu, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[GpuSpillBuffer]:
    del gpu
    made = GpuSpillBuffer(4 * EACH, 4 * EACH, str(tmp_path), jit_unspill=request.param)
    yield made
    made.close()


def tensor(n: float) -> Any:
    made = sys.modules["torch"].empty(EACH // 4, dtype="float32", device=None)
    made.host()[:] = n
    return made


def buffer(n: float) -> Any:
    made = sys.modules["rmm"].DeviceBuffer(size=EACH)
    made.bytes[:] = n
    return made


def value(kind: str, n: int) -> Any:
    return tensor(n) if kind == "torch" else buffer(n)


def fill(store: GpuSpillBuffer, count: int) -> None:
    for n in range(count):
        store[n] = tensor(n)
        assert store.settle()


def used(gpu: fake.Gpu) -> int:
    gc.collect()
    CudaDevice.current(0).give_back()
    return gpu.used_bytes


def content(x: Any) -> list[float]:
    host = x.bytes if type(x) is fake.DeviceBuffer else x.host()
    return [float(v) for v in np.unique(host)]


@pytest.mark.parametrize("kind", ["torch", "rmm"])
def test_it_goes_through_every_tier(store: GpuSpillBuffer, gpu: fake.Gpu, kind: str) -> None:
    for n in range(20):
        store[n] = {"x": [value(kind, n)]} if n % 2 else value(kind, n)
        assert store.settle()
        assert used(gpu) == store.tiers["device"] <= 4 * EACH
    assert store.tiers["disk"] > 0
    expected = type(value(kind, 0))
    for n in range(20):
        found = store[n]
        found = found["x"][0] if n % 2 else found
        assert type(found) is expected  # also with jit_unspill: compiled code takes no proxies for it
        assert content(found) == [n]
        del found
    store.clear()
    assert used(gpu) == 0


def test_tensors_of_one_storage_are_one(store: GpuSpillBuffer, gpu: fake.Gpu) -> None:
    whole = tensor(0)
    whole.host()[:] = np.arange(EACH // 4)
    turned = fake.Tensor(whole.untyped_storage(), ("float32", 1, (4, 2), (2, 4)))
    store["a"], store["b"] = whole, [turned, whole]
    assert store.tiers["device"] == EACH
    expected = turned.host().copy()
    del whole, turned
    fill(store, 8)
    ups = gpu.ups
    a, (b, c) = store["a"], store["b"]
    assert gpu.ups == ups + 1
    assert a is c
    assert b.untyped_storage() is a.untyped_storage()
    np.testing.assert_array_equal(b.host(), expected)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_parameters_stay_parameters(store: GpuSpillBuffer, gpu: fake.Gpu, requires_grad: bool) -> None:
    store["p"] = sys.modules["torch"].nn.Parameter(tensor(5), requires_grad=requires_grad)
    store["leaf"] = tensor(6).requires_grad_(requires_grad)
    fill(store, 10)
    assert gpu.downs >= 2
    assert (type(store["p"]), content(store["p"])) == (fake.Parameter, [5])
    assert store["leaf"].requires_grad == requires_grad


def test_torchs_cache_is_freed_without_stored_tensors(store: GpuSpillBuffer, gpu: fake.Gpu) -> None:
    for n in range(4):
        store[n] = buffer(n)
    gpu.kept_bytes = gpu.memory_bytes - gpu.used_bytes  # a model's
    hook = CudaDevice.current(0).on_alloc_failure
    assert isinstance(hook, AllocationFailureHook)
    assert hook.evict(EACH)
    assert gpu.kept_bytes == 0
    assert store.tiers["device"] == 4 * EACH  # no value had to go


def test_an_upload_that_finds_no_memory_makes_room(store: GpuSpillBuffer, gpu: fake.Gpu) -> None:
    """Torch's error is no MemoryError."""
    fill(store, 8)
    users = [tensor(7) for _ in range(8)]
    assert [content(store[n]) for n in range(8)] == [[n] for n in range(8)]
    assert len(users) == 8


def break_off(x: Any, why: str) -> Any:
    if why == "subclass":
        return type("Mine", (fake.Tensor,), {})(x._memory, x._at)
    if why == "hooks":
        x.hook = 1
    else:
        x._indices, x._values = (lambda: np.zeros(EACH // 8, "i4"),) * 2
        setattr(x, why, {"layout": "torch.sparse_coo"}.get(why, True))
    return x


@pytest.mark.parametrize("why", ["grad", "grad_fn", "hooks", "is_quantized", "layout", "subclass", "foreign", "jax"])
def test_what_cannot_be_made_again_counts_and_is_named(
    store: GpuSpillBuffer, gpu: fake.Gpu, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    others = {"foreign": lambda: fake.Foreign(gpu, EACH), "jax": lambda: fake.ArrayImpl(EACH)}
    stays = others[why]() if why in others else break_off(tensor(1), why)
    store["stays"], store["beside"] = stays, [tensor(2), stays]
    assert store.tiers["device"] == 2 * EACH
    fill(store, 8)
    assert store.tiers["device"] <= 4 * EACH
    assert store.immovable == (1, EACH)
    kind = f"{type(stays).__module__}.{type(stays).__qualname__}"
    assert len([m for m in caplog.messages if kind in m]) == 1
    assert store["stays"] is stays
    (beside, same) = store["beside"]
    assert same is stays
    assert content(beside) == [2]


def test_jax_array_that_was_donated_is_no_device_array() -> None:
    array = fake.ArrayImpl(EACH)
    assert is_device_array(array)
    array.deleted = True
    assert not is_device_array(array)


@pytest.mark.parametrize("limit", [0.5, 4 * EACH])
def test_without_a_driver_an_object_counts_and_is_named(
    monkeypatch: pytest.MonkeyPatch, stored: NewStore, caplog: pytest.LogCaptureFixture, limit: float
) -> None:
    monkeypatch.setattr(cuda, "_made", functools.cache(cuda._made.__wrapped__))
    no_driver = RuntimeError("the library of the driver is not found")
    monkeypatch.setattr(cuda, "DriverCopies", Mock(side_effect=no_driver))
    for name in ("cupy", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    store = stored(limit, None)
    store["stays"] = [stays := fake.Pickled(EACH)]
    assert store.settle()
    assert store.tiers["device"] == EACH
    assert store.tiers["host"] < 1000
    assert store.immovable == (1, EACH)
    assert [m for m in caplog.messages if "fake_libraries.Pickled" in m] == caplog.messages
    assert "Traceback" not in caplog.text
    assert store["stays"][0] is stays


def test_peer_gets_immovable_arrays_by_their_librarys_pickle(store: GpuSpillBuffer, gpu: fake.Gpu) -> None:
    del gpu
    stays = fake.Pickled(5)
    store["mixed"] = [tensor(2), stays, np.zeros(3), stays]
    fill(store, 10)
    with store.handing_out_handles():
        handle = store["mixed"]
    packed = pickle.loads(pickle.dumps(handle.packed()))
    moved, one, host, other = packed.unpack()
    assert (content(moved), host.shape) == ([2], (3,))
    assert (type(one), one.n) == (fake.Pickled, 5)
    assert one is other
    store["arrived"] = packed
    before = store.tiers["device"]
    del store["arrived"]
    assert store.tiers["device"] == before - 5


def test_sparse_tensors_count_what_they_are_made_of(gpu: fake.Gpu) -> None:
    del gpu
    sparse = tensor(1)
    sparse.layout, sparse.untyped_storage = "torch.sparse_coo", None
    sparse._indices = sparse._values = lambda: np.zeros(100)
    device = device_of(sparse)
    assert device is not None
    assert device.buffer_of(sparse)[1] == 1600


def test_who_is_on_the_device(gpu: fake.Gpu) -> None:
    assert is_device_array(tensor(1))
    assert is_device_array(fake.Foreign(gpu, 5))
    on_host = tensor(1)
    on_host.is_cuda = False
    assert not is_device_array(on_host)
    assert device_of(on_host) is None

    class Refuses:
        @property
        def __cuda_array_interface__(self) -> Any:
            raise RuntimeError("can't get it of a CPU tensor")

    class Mapped(np.ndarray):  # as numba's: the host reads it where it is
        __cuda_array_interface__ = property(lambda _: {"shape": (3,), "typestr": "|u1", "data": (1, False)})

    assert not is_device_array(Refuses())
    assert not is_device_array(np.zeros(3).view(Mapped))
    assert not is_device_array(fake.Foreign(gpu, 0))
    assert is_device_array(np.zeros(3)) is False


def test_a_proxy_is_not_brought_up_to_be_asked(gpu: fake.Gpu) -> None:
    proxy = asproxy(buffer(1))
    assert is_proxy(proxy)
    assert library_of(type(proxy)) == ""
    assert library_of(type(unproxy(proxy))) == "rmm"


@pytest.mark.parametrize("index", [np.s_[:], np.s_[::2, 3:], np.s_[::-1], np.s_[:, ::-2], np.s_[2:2], np.s_[1, 2, ...]])
@pytest.mark.parametrize("dtype", ["f8", "i4,f8"])
def test_the_extent_of_any_layout(index: Any, dtype: str) -> None:
    """Against NumPy, whose own interface has the same fields."""
    base = np.arange(60).reshape(6, 10).astype(dtype)
    array = np.asarray(base[index])

    class Shows:
        __cuda_array_interface__ = array.__array_interface__

    found = extent_of(Shows())
    low, high = getattr(np.lib, "array_utils", np).byte_bounds(array)  # of NumPy 1: np
    assert found.nbytes == (high - low if array.size else 0)
    if array.size:
        assert found.pointer == low
        copied = np.frombuffer(base.tobytes(), "u1")[low - base.ctypes.data :][: found.nbytes]
        again = np.ndarray(found.shape, found.dtype, copied.tobytes(), found.offset, found.strides)
        np.testing.assert_array_equal(again, array)


def test_views_travel_to_peers() -> None:
    record = np.dtype([("x", "<f4"), ("n", "<i8")])
    views: list[Any] = [TensorView((2, 3), "float32", (3, 1), 4, True, False), BytesView("rmm", 100)]
    for view in (*views, ArrayView("cupy", (2, 3), record, (36, 12), 24)):
        assert pickle.loads(pickle.dumps(view)) == view

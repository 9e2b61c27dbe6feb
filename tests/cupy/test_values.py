"""Arrays of the real CuPy, numba and cuda.core in the store: what comes back is what was written."""

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cupy_arrays import filled, on_host
from distributed.protocol import deserialize, serialize
from distributed.protocol.serialize import dask_loads
from paths import SUPPORT
from spill_stores import NewStore, put
from waiting import scaled

from hpcgpu.spill.devices.cuda import device_of
from hpcgpu.spill.store.handles import ReadMode, reading
from hpcgpu.spill.store.messages import register

MIB = 1 << 20
LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "C": lambda base: base,
    "F": lambda base: base.T,
    "strided": lambda base: base[::3, 5::2],
    "reversed": lambda base: base[::-1, ::-1],
    "0-d": lambda base: base[3, 4],
    "empty": lambda base: base[:0],
    "complex": lambda base: base.view("c16"),
    "records": lambda base: base.reshape(-1).view("f8,f8"),
}
FRAMES = """
import sys
sys.modules["numba"] = None  # no extra of ours installs it
import cupy, numpy as np
from distributed.protocol import deserialize, serialize
from cupy_arrays import on_host
from hpcgpu.spill.store import messages

messages.register()
record = np.dtype([("a", "i4"), ("b", "f8")])
arrays = {
    "records": np.zeros(5, record),
    "columns first": np.asfortranarray(np.arange(12, dtype="f4").reshape(3, 4)),
    "empty": np.empty((0, 3), "c8"),
    "one": np.array([7], "i8"),
}
arrays["records"]["a"] = range(5)
for name, array in arrays.items():
    header, frames = serialize(cupy.asarray(array), serializers=("cuda",), on_error="raise")
    assert header["serializer"] == "cuda"
    assert [(type(f), f.dtype, f.ndim, f.nbytes) for f in frames] == [(cupy.ndarray, "u1", 1, array.nbytes)]
    back = deserialize(header, frames)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert not array.nbytes or back.data.ptr == frames[0].data.ptr
    assert array.nbytes == 0 or on_host(back).tobytes("K") == array.tobytes("K")
    print(name)
theirs = {"shape": (2,), "typestr": "<i4", "strides": (4,), "version": 3, "data": (0, False)}
frame = cupy.asarray(np.frombuffer(np.array([3, 4], "<i4"), "u1"))
print(on_host(messages.from_device_frame(theirs, [frame])).tolist())
"""


@pytest.mark.parametrize("non_blocking", [False, True])
def test_arrays_written_on_a_stream_come_back(new_store: NewStore, non_blocking: bool) -> None:
    import cupy

    stream, sources = cupy.cuda.Stream(non_blocking=non_blocking), [filled(MIB, i) for i in range(12)]
    store = new_store(4 * MIB)
    for i, source in enumerate(sources):
        x = cupy.empty(MIB, "u1")
        stream.wait_event(cupy.cuda.get_current_stream().record())
        x.data.copy_from_device_async(source.data, MIB, stream)
        store[i] = x
        del x
    assert store.settle(scaled(30))
    assert store.counters["device_to_host"].number >= 8
    assert all((on_host(store[i]) == i).all() for i in range(12))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_array_of_each_layout_comes_back(new_store: NewStore, layout: str) -> None:
    import cupy

    x = LAYOUTS[layout](cupy.asarray(np.arange(60_000.0).reshape(200, 300)))
    expected, store = on_host(x), new_store(MIB)
    store["x"] = x
    del x
    put(store, range(4), lambda i: filled(MIB, i))
    assert store.counters["device_to_host"].number >= 1
    back = store["x"]
    assert type(back) is cupy.ndarray
    assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(on_host(back), expected)


def test_names_of_one_array_come_back_as_one(new_store: NewStore) -> None:
    import cupy

    expected = np.arange(100_000.0).reshape(200, 500)
    x = cupy.asarray(expected)
    store = new_store(MIB)
    store["a"], store["b"], store["c"] = x, x.T, [x[::2, 3:], x]
    assert store.tiers["device"] == x.data.mem.size
    del x
    put(store, range(4), lambda i: filled(MIB // 2, i))
    assert store.counters["device_to_host"].number >= 1
    before = store.counters["host_to_device"].number
    a, b, (c, d) = store["a"], store["b"], store["c"]
    assert store.counters["host_to_device"].number == before + 1
    assert len({v.data.mem.ptr for v in (a, b, c, d)}) == 1
    for back, right in [(a, expected), (b, expected.T), (c, expected[::2, 3:]), (d, expected)]:
        np.testing.assert_array_equal(on_host(back), right)


def test_cupys_own_error_makes_room(new_store: NewStore, monkeypatch: pytest.MonkeyPatch, driver: Any) -> None:
    import cupy

    monkeypatch.setenv("FAKE_CUDA_BYTES", str(driver.count("device") + 10 * MIB))
    store = new_store(1.0)
    for i in range(12):
        store[i] = filled(2 * MIB, i)
    assert store.counters["device_to_host"].number >= 7
    assert [int(on_host(store[i])[5]) for i in range(12)] == list(range(12))
    with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
        cupy.cuda.alloc(11 * MIB)


@pytest.mark.parametrize(
    ("layout", "to_worker"), [*((k, True) for k in ("C", "F", "empty", "0-d", "records")), ("C", False), ("F", False)]
)
def test_an_array_travels_to_a_worker_or_client(layout: str, to_worker: bool) -> None:
    import cupy

    register()
    x = LAYOUTS[layout](cupy.asarray(np.arange(60.0).reshape(6, 10)))
    with reading(ReadMode(to_worker=True) if to_worker else None):
        header, frames = serialize(x, on_error="raise")
    assert header["serializer"] == ("dask" if to_worker else "pickle")  # clients have no pair of ours
    back = deserialize(header, [memoryview(bytes(frame)) for frame in frames])
    assert type(back) is cupy.ndarray
    assert (back.dtype, back.shape) == (x.dtype, x.shape)
    np.testing.assert_array_equal(on_host(back), on_host(x))


def test_an_array_of_distributeds_own_pair_arrives() -> None:
    import cupy

    register()
    sent = np.arange(6.0).reshape(2, 3)
    header = {"shape": (2, 3), "typestr": "<f8", "strides": (24, 8), "version": 3, "data": (1, False)}
    message = {"sub-header": header, "type-serialized": pickle.dumps(cupy.ndarray)}
    np.testing.assert_array_equal(on_host(dask_loads(message, [memoryview(sent.tobytes())])), sent)


def test_an_array_of_numba_comes_back(new_store: NewStore) -> None:
    from numba import cuda

    expected = np.arange(120_000.0).reshape(300, 400)
    store = new_store(MIB)
    store["x"] = cuda.to_device(np.asfortranarray(expected))
    put(store, range(3), lambda i: filled(MIB // 2, i))
    assert store.counters["device_to_host"].number >= 1
    back = store["x"]
    assert type(back).__name__ == "DeviceNDArray"
    np.testing.assert_array_equal(back.copy_to_host(), expected)


def test_a_buffer_of_cuda_core_comes_back(new_store: NewStore) -> None:
    from cuda import core

    device = core.Device(0)
    device.set_current()
    stream, store = device.create_stream(), new_store(MIB)
    buffer = device.allocate(MIB // 2, stream=stream)
    buffer.fill(7, stream=stream)
    store["x"] = buffer
    del buffer
    put(store, range(3), lambda i: filled(MIB // 2, i))
    assert store.counters["device_to_host"].number >= 1
    back = store["x"]
    gpu = device_of(back)
    assert gpu is not None
    assert set(gpu.pack([[back]], lambda nbytes: np.empty(nbytes, np.uint8))[0][0].tolist()) == {7}


def test_arrays_are_frames_of_device_memory_without_numba() -> None:
    """As UCX sends them; distributed's own functions need numba."""
    argv, env = [sys.executable, "-c", FRAMES], {**os.environ, "PYTHONPATH": str(SUPPORT)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["records", "columns first", "empty", "one", "[3, 4]"]

"""Simulated GPUs: memory is counted by buffer, every copy is counted, and dask.array's arrays stay on the device."""

import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import dask
import dask.array as da
import numpy as np
import pytest
from dask.base import tokenize
from dask.sizeof import sizeof
from distributed import Client, LocalCluster
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from programs import python
from waiting import aside, scaled, until

from hpcgpu import sim
from hpcgpu.sim import register

MIB = 1 << 20
law = settings(deadline=None)  # the machine that tests may be busy
ARRAYS = hnp.arrays(st.sampled_from(["f8", "f4", "i4", "u1", "c16"]), hnp.array_shapes(max_dims=3, max_side=5))
SLICES = st.slices(5)
BINARY = st.sampled_from([np.add, np.multiply, np.subtract, np.maximum, np.hypot, np.less, np.logaddexp])
UNARY = st.sampled_from([np.sin, np.exp, np.negative, np.isnan, np.sign, np.modf])
FLOATS, FLOATS_32 = st.floats(-9, 9), st.floats(-9, 9, width=32)
LAYOUTS: list[Callable[[np.ndarray], np.ndarray]] = [
    lambda x: x,
    lambda x: x.T,
    lambda x: np.asfortranarray(x),
    lambda x: x[::2, ::-1],
    lambda x: x[:1],
    lambda x: x[:, :1],
    lambda x: np.broadcast_to(x[0], x.shape),
]
X = np.random.default_rng(0).random((4000, 8))
OPERATIONS: dict[str, Callable[[da.Array], da.Array]] = {
    "elementwise": lambda x: da.sqrt(2 * x - x**2) + 1,
    "sum": lambda x: x.sum(),
    "mean": lambda x: x.mean(),
    "mean over rows": lambda x: x.mean(axis=0),
    "std": lambda x: x.std(),
    "max": lambda x: x.max(axis=1),
    "cumsum": lambda x: x.cumsum(axis=0),
    "matmul": lambda x: x.T @ x,
    "tensordot": lambda x: da.tensordot(x, x, axes=((0,), (0,))),
    "slicing": lambda x: x[5:100:3, ::2],
    "concatenate": lambda x: da.concatenate([x, x])[-10:],
    "stack": lambda x: da.stack([x, x + 1]).sum(axis=0),
    "qr": lambda x: abs(da.linalg.qr(x)[1]),
    "svd": lambda x: da.linalg.svd(x)[1],
    "rechunk": lambda x: x.rechunk((2000, 4)).sum(axis=1),
    "transpose": lambda x: (x + 1).T.max(axis=0),
    "fancy": lambda x: x[[1, 5, 3]],
    "mask": lambda x: x[x[:, 0] > 0.5].sum(),
    "where": lambda x: da.where(x > 0.5, x, 0).sum(),
    "einsum": lambda x: da.einsum("ij,ij->j", x, x),
    "overlap": lambda x: x.map_overlap(lambda a: a * 2, depth=1, boundary="reflect"),
    "windows": lambda x: da.lib.stride_tricks.sliding_window_view(x, 2, axis=0).sum(axis=-1),
}


@pytest.fixture
def gpu() -> Iterator[sim.SimGpu]:
    device = sim.SimGpu(64 * MIB)
    before = sim.current_gpu()
    sim.set_current_gpu(device)
    yield device
    sim.set_current_gpu(before)


def grown(a: sim.SimArray, step: str) -> sim.SimArray:
    return {"copy": a.copy, "slice": lambda: a[:1], "transpose": lambda: a.T, "add": lambda: a + a}[step]()


@law
@given(ARRAYS, st.lists(st.sampled_from(["copy", "slice", "transpose", "drop", "add"]), max_size=12))
@pytest.mark.filterwarnings("ignore:overflow")
def test_used_bytes_are_those_of_live_buffers(x: np.ndarray, steps: list[str]) -> None:
    device = sim.SimGpu(MIB)
    arrays = [device.asarray(x)]
    for step in steps:
        if step == "drop":
            del arrays[:1]
        elif arrays:
            arrays.append(grown(arrays[-1], step))
    buffers = dict(device.buffer_of(a) for a in arrays)
    assert device.used_bytes == sum(buffers.values())
    arrays.clear()
    assert device.used_bytes == 0
    assert device.peak_bytes >= x.nbytes


@law
@given(ARRAYS, SLICES, st.sampled_from("CF"))
def test_pack_and_unpack_keep_values_and_sharing(x: np.ndarray, part: slice, order: str) -> None:
    device = sim.SimGpu(MIB)
    whole = device.asarray(np.array(x, order=order))  # type: ignore[call-overload]
    names = [whole, whole[part], whole.T, whole[..., ::-1], np.broadcast_to(whole, (2, *whole.shape)), whole.real]
    names.append(np.lib.stride_tricks.sliding_window_view(whole, 1, axis=0))
    del whole
    expected = [a.get() for a in names]
    facts = [(a.dtype, a.shape, a.strides) for a in names]
    assert device.used_bytes == x.nbytes
    copies = device.d2h_copies
    ((root, views),) = device.pack([names])
    assert device.d2h_copies == copies + 1
    names.clear()
    assert device.used_bytes == 0
    views = pickle.loads(pickle.dumps(views))
    copies = device.h2d_copies
    back = device.unpack(root, views)
    assert (device.h2d_copies, device.used_bytes) == (copies + 1, x.nbytes)
    assert len({device.buffer_of(a) for a in back}) == 1
    assert [(a.dtype, a.shape, a.strides) for a in back] == facts
    for a, b in zip(back, expected, strict=True):
        np.testing.assert_array_equal(a.get(), b)
    back[0][...] = 0  # all others show its memory
    assert not any(a.get().any() for a in back)


def same(found: object, expected: object) -> None:
    if isinstance(expected, tuple):
        assert isinstance(found, tuple)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
        return
    assert type(found) is sim.SimArray
    np.testing.assert_array_equal(found.get(), expected)  # type: ignore[arg-type]
    assert found.dtype == expected.dtype  # type: ignore[attr-defined]


@law
@given(BINARY, UNARY, hnp.arrays("f8", (3, 4), elements=FLOATS), hnp.arrays("f4", 4, elements=FLOATS_32))
def test_ufuncs_are_numpys(binary: np.ufunc, unary: np.ufunc, a: np.ndarray, b: np.ndarray) -> None:
    device = sim.SimGpu(MIB)
    da, db = device.asarray(a), device.asarray(b)
    same(binary(da, db), binary(a, b))
    same(binary(da, 2.0), binary(a, 2.0))
    same(binary(np.float32(2), db), binary(np.float32(2), b))
    same(binary.outer(da, db), binary.outer(a, b))
    same(unary(da[::-1]), unary(a[::-1]))
    same(np.add.reduce(da, axis=0), np.add.reduce(a, axis=0))
    same(np.maximum.accumulate(da, axis=1), np.maximum.accumulate(a, axis=1))
    da *= 3
    same(da, a * 3)
    assert device.h2d_copies == 2


@law
@given(BINARY, st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS), st.sampled_from(["f8", "f4", "i8", "?"]))
def test_large_results_have_numpys_layout(
    binary: np.ufunc, first: Callable[[np.ndarray], np.ndarray], second: Callable[[np.ndarray], np.ndarray], kind: str
) -> None:
    """They lie in memory that was used before, which numpy does not choose."""
    device = sim.SimGpu(64 * MIB)
    x = np.arange(160 * 160.0).reshape(160, 160) % 7
    a, b = first(x), second(x.astype(kind))
    try:
        expected = binary(a, b)
    except (TypeError, ValueError) as e:
        with pytest.raises(type(e)):
            binary(device.adopt(a), device.adopt(b))
        return
    found = binary(device.adopt(a), device.adopt(b))
    same(found, expected)
    assert found.strides == expected.strides
    assert found.base is None
    same(binary(found, 2), binary(expected, 2))


@pytest.mark.parametrize(
    "cross",
    [
        np.asarray,
        lambda d: np.array([d]),
        lambda d: d + np.ones(4),
        lambda d: np.ones(4) + d,
        lambda d: np.concatenate([d, np.ones(4)]),
        lambda d: np.add(d, 1, out=np.ones(4)),
        lambda d: np.copyto(np.ones(4), d),
        lambda d: memoryview(d),
        lambda d: d.__setitem__(slice(None), np.ones(4)),
    ],
)
def test_nothing_crosses_unasked(gpu: sim.SimGpu, cross: object) -> None:
    d = gpu.asarray(np.arange(4.0))
    with pytest.raises(TypeError):
        cross(d)  # type: ignore[operator]
    assert (gpu.h2d_copies, gpu.d2h_copies) == (1, 0)


@pytest.mark.parametrize(
    "name", ["get", "tolist", "tobytes", "repr", "dumps", "tokenize", "float", "bool", "save", "savez", "array2string"]
)
def test_each_way_down_counts_as_a_copy(gpu: sim.SimGpu, name: str) -> None:
    d = gpu.asarray(np.arange(4.0))
    assert gpu.asarray(d) is d
    ways = {"repr": repr, "dumps": pickle.dumps, "tokenize": tokenize, "array2string": np.array2string}
    ways |= {"float": lambda d: float(d[0]), "bool": lambda d: bool(d[0]), "save": lambda d: np.save(io.BytesIO(), d)}
    ways["savez"] = lambda d: np.savez(io.BytesIO(), name=d)
    ways.get(name, lambda d: getattr(d, name)())(d)
    nbytes = d.nbytes if name not in ("float", "bool") else 8
    assert (gpu.h2d_copies, gpu.h2d_bytes, gpu.d2h_copies, gpu.d2h_bytes) == (1, 32, 1, nbytes)


def test_numpys_like_uploads(gpu: sim.SimGpu) -> None:
    d = gpu.asarray(np.ones(3))
    assert type(np.asarray(np.arange(4), like=d)) is sim.SimArray
    assert gpu.h2d_copies == 2
    assert type(np.zeros(3, like=d)) is sim.SimArray
    assert np.asarray(d, like=d).get().tolist() == [1, 1, 1]
    assert gpu.h2d_copies == 2


@pytest.mark.parametrize("kind", ["O", "U2", "M8[s]", "m8[s]", "g", "f8,i4"])
def test_a_gpu_holds_numbers_only(gpu: sim.SimGpu, kind: str) -> None:
    with pytest.raises(ValueError, match="Unsupported dtype"):
        gpu.asarray(np.zeros(2, kind))
    with pytest.raises(ValueError, match="Unsupported dtype"):
        gpu.asarray(np.zeros(2)).astype(kind)
    assert gpu.used_bytes == 0


def test_too_much_is_refused_with_cupys_kind_of_error(gpu: sim.SimGpu) -> None:
    held = gpu.empty(40 * MIB, "u1")
    with pytest.raises(sim.OutOfMemoryError, match="Out of memory allocating 41,943,040 bytes") as refused:
        gpu.empty(40 * MIB, "u1")
    assert isinstance(refused.value, MemoryError)
    with pytest.raises(MemoryError):
        held + 1
    assert gpu.used_bytes == 40 * MIB


def test_it_is_tried_as_long_as_others_take_the_room(gpu: sim.SimGpu) -> None:
    held = [gpu.empty(40 * MIB, "u1")]
    asked: list[int] = []

    def make_room(nbytes: int) -> bool:
        asked.append(nbytes)
        held.clear()
        if len(asked) < 3:  # another thread, before this one is back
            held.append(gpu.empty(40 * MIB, "u1"))
        return True

    gpu.on_alloc_failure = make_room
    assert gpu.empty(50 * MIB, "u1").nbytes == 50 * MIB
    assert asked == [50 * MIB] * 3


def test_pickle_is_a_copy_down_and_one_up(gpu: sim.SimGpu) -> None:
    d = gpu.asarray(np.arange(6.0).reshape(2, 3)[:, ::2])
    again = pickle.loads(pickle.dumps(d))
    np.testing.assert_array_equal(again.get(), d.get())
    assert again.__hpcgpu_device__ is gpu
    assert (gpu.h2d_copies, gpu.d2h_copies) == (2, 3)
    turned = gpu.asarray(np.asfortranarray(np.ones((3, 4))))
    assert pickle.loads(pickle.dumps(turned)).strides == turned.strides


def test_use_is_published_to_other_processes(tmp_path: Path) -> None:
    path = tmp_path / "usage"
    device = sim.SimGpu(MIB, usage_file=path)
    held = device.empty(1000, "u1")
    assert sim.read_usage_bytes(path) == 1000
    code = "import sys; from hpcgpu.sim import read_usage_bytes as r; print(r(sys.argv[1]))"
    assert python(code, path).stdout == "1000\n"
    del held
    assert sim.read_usage_bytes(path) == device.used_bytes == 0
    assert sim.read_usage_bytes(tmp_path / "none") == 0


def address(array: sim.SimArray) -> int:
    return int(array._host.__array_interface__["data"][0])


def test_freed_memory_is_reused_without_other_views() -> None:
    """New pages are slow; CuPy's pool uses a GPU's memory again, too."""
    device = sim.SimGpu(64 * MIB)
    x = np.arange(MIB / 8).reshape(64, -1)
    whole = device.asarray(x)
    first, row = address(whole), whole[3]
    ((root, views),) = device.pack([[whole]])
    del whole
    (other,) = device.unpack(root, views)
    assert address(other) != first
    np.testing.assert_array_equal(row.get(), x[3])
    del row
    again = device.asarray(-x.T)
    assert address(again) == first
    assert again.strides == (-x.T).strides
    np.testing.assert_array_equal(again.get(), -x.T)
    np.testing.assert_array_equal(other.get(), x)


def test_kept_memory_is_published_and_never_adds_to_a_full_gpu(tmp_path: Path) -> None:
    device = sim.SimGpu(8 * MIB, usage_file=tmp_path / "usage")
    held = [device.asarray(np.zeros(MIB, "u1")) for _ in range(6)]
    held.clear()
    assert device.used_bytes == 0
    assert sim.read_usage_bytes(tmp_path / "usage") == 2 * MIB  # a quarter
    held.append(device.empty(7 * MIB, "u1"))
    held.append(device.empty(MIB // 2, "u1"))
    assert sim.read_usage_bytes(tmp_path / "usage") <= 8 * MIB


def test_threads_lose_no_byte(tmp_path: Path) -> None:
    device = sim.SimGpu(64 * MIB, usage_file=tmp_path / "usage")

    def work() -> None:
        a = device.asarray(np.ones(1000))
        for _ in range(300):
            a = a + 1

    for done in [aside(work) for _ in range(4)]:
        done.result(scaled(60))
    assert sim.read_usage_bytes(tmp_path / "usage") == device.used_bytes == 0


def test_the_base_of_a_view_is_the_array_whose_memory_it_shows(gpu: sim.SimGpu) -> None:
    """As CuPy's: distributed copies views before it sends them, and would send their bases else."""
    x = gpu.asarray(np.arange(12.0).reshape(3, 4))
    for owner in (x, x + 1, x.copy(), x[1:].copy(), gpu.empty(3), np.concatenate([x, x])):
        assert owner.base is None
    windows = np.lib.stride_tricks.sliding_window_view(x, 2, axis=0)
    for view in (x[1:], x[1:][:1], x.T, x.reshape(4, 3), windows):
        assert view.base.shape == x.shape
        assert np.shares_memory(view.base, x)
        assert view.base.base is None
    back, rows = gpu.unpack(*gpu.pack([[x, x[1:]]])[0])
    assert (back.base, rows.base) == (None, None)
    assert rows[1:].base.shape == (2, 4)
    assert gpu.buffer_of(rows[1:]) == gpu.buffer_of(back)


# --- in dask.array; between workers they travel in two copies


def on_device() -> da.Array:
    return da.from_array(X, chunks=(1000, 8)).map_blocks(sim.asarray)


def expected(name: str) -> np.ndarray:
    return np.asarray(OPERATIONS[name](da.from_array(X, chunks=(1000, 8))).compute(scheduler="sync"))


@pytest.fixture
def dask_gpu(gpu: sim.SimGpu) -> sim.SimGpu:
    register()
    return gpu


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two workers that exchange bytes: over inproc:// an array would go to the other as it is."""
    register()
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    in_memory = dask.config.set({"distributed.worker.memory.spill": False})
    with in_memory, LocalCluster(**options, protocol="tcp://") as cluster, Client(cluster) as client:
        yield client


@pytest.mark.parametrize("name", OPERATIONS)
def test_dask_array_stays_on_the_device(dask_gpu: sim.SimGpu, name: str) -> None:
    x = OPERATIONS[name](on_device())
    assert type(x._meta) is sim.SimArray
    copies = dask_gpu.d2h_copies
    found = x.compute(scheduler="threads")
    assert type(found) is sim.SimArray
    assert dask_gpu.d2h_copies == copies
    np.testing.assert_allclose(found.get(), expected(name), rtol=1e-9)


@pytest.mark.parametrize("name", OPERATIONS)
def test_on_a_cluster(dask_gpu: sim.SimGpu, client: Client, name: str) -> None:
    found = client.compute(OPERATIONS[name](on_device())).result(timeout=scaled(60))
    assert type(found) is sim.SimArray
    np.testing.assert_allclose(found.get(), expected(name), rtol=1e-9)


def test_random_blocks_are_made_on_the_device(dask_gpu: sim.SimGpu) -> None:
    x = da.random.RandomState(1, RandomState=sim.RandomState).random_sample((1000, 4), chunks=100)
    assert type(x._meta) is sim.SimArray
    found = x.compute(scheduler="threads")
    assert (type(found), dask_gpu.h2d_copies, dask_gpu.d2h_copies) == (sim.SimArray, 0, 0)
    same = da.random.RandomState(1).random_sample((1000, 4), chunks=100)
    np.testing.assert_array_equal(found.get(), same.compute(scheduler="sync"))


@pytest.mark.parametrize("mix", [np.add, lambda a, b: a + b, lambda a, b: np.concatenate([a, b])])
def test_device_and_dask_arrays_mix(dask_gpu: sim.SimGpu, mix: Callable[..., da.Array]) -> None:
    d, x = dask_gpu.asarray(X), on_device()
    for one, two in ((d, x), (x, d)):
        lazy = mix(one, two)
        assert type(lazy) is da.Array
        np.testing.assert_array_equal(lazy.compute(scheduler="sync").get(), mix(X, X))


@pytest.mark.parametrize(
    "host", [X, np.asfortranarray(X), X[:, ::2], X.T[::3], X[:1, :1], X.astype("f4")], ids=lambda a: str(a.strides)
)
def test_travel_is_one_copy_down_and_one_up(dask_gpu: sim.SimGpu, client: Client, host: np.ndarray) -> None:
    one, two = client.scheduler_info()["workers"]
    d = dask_gpu.asarray(host)
    a = client.submit(lambda: d.copy(), workers=[one], pure=False)
    client.submit(lambda a: a.nbytes, a, workers=[one]).result(timeout=scaled(60))
    up, down = dask_gpu.h2d_copies, dask_gpu.d2h_copies
    b = client.submit(lambda a: (type(a) is sim.SimArray, a.sum() == 0), a, workers=[two])
    client.submit(lambda b: b[0], b, workers=[two]).result(timeout=scaled(60))
    assert (dask_gpu.h2d_copies, dask_gpu.d2h_copies) == (up + 1, down + 1)
    np.testing.assert_array_equal(a.result(timeout=scaled(60)).get(), host)


def test_nothing_stays_on_the_device(dask_gpu: sim.SimGpu, client: Client) -> None:
    u, s, _ = client.persist(da.linalg.svd(on_device()))
    assert s.compute().shape == (8,)
    assert dask_gpu.used_bytes >= X.nbytes
    del u, s, _
    until(lambda: dask_gpu.used_bytes == 0, "the workers have heard of the keys to be released")


def test_dask_knows_the_size(dask_gpu: sim.SimGpu) -> None:
    assert sizeof(dask_gpu.asarray(X)) == X.nbytes

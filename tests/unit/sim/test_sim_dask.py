"""Simulated arrays in dask.array: they stay on the device, and between workers they travel in two copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import dask
import dask.array as da
import numpy as np
import pytest
from dask.sizeof import sizeof
from distributed import Client, LocalCluster
from waiting import scaled, until

from hpcgpu import sim
from hpcgpu.sim import register

MIB = 1 << 20
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


def on_device() -> da.Array:
    return da.from_array(X, chunks=(1000, 8)).map_blocks(sim.asarray)


def expected(name: str) -> np.ndarray:
    return np.asarray(OPERATIONS[name](da.from_array(X, chunks=(1000, 8))).compute(scheduler="sync"))


@pytest.fixture
def gpu() -> Iterator[sim.SimGpu]:
    register()
    device = sim.SimGpu(64 * MIB)
    before = sim.current_gpu()
    sim.set_current_gpu(device)
    yield device
    sim.set_current_gpu(before)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    """Two workers that exchange bytes: over inproc:// an array would go to the other as it is."""
    register()
    with (
        dask.config.set({"distributed.worker.memory.spill": False}),
        LocalCluster(
            n_workers=2, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=None
        ) as cluster,
        Client(cluster) as client,
    ):
        yield client


@pytest.mark.parametrize("name", OPERATIONS)
def test_dask_array_stays_on_the_device(gpu: sim.SimGpu, name: str) -> None:
    x = OPERATIONS[name](on_device())
    assert type(x._meta) is sim.SimArray
    copies = gpu.d2h_copies
    found = x.compute(scheduler="threads")
    assert type(found) is sim.SimArray
    assert gpu.d2h_copies == copies
    np.testing.assert_allclose(found.get(), expected(name), rtol=1e-9)


@pytest.mark.parametrize("name", OPERATIONS)
def test_on_a_cluster(gpu: sim.SimGpu, client: Client, name: str) -> None:
    found = client.compute(OPERATIONS[name](on_device())).result(timeout=scaled(60))
    assert type(found) is sim.SimArray
    np.testing.assert_allclose(found.get(), expected(name), rtol=1e-9)


def compressed(x: da.Array) -> da.Array:
    seed = da.random.RandomState(3, RandomState=sim.RandomState)
    return da.linalg.svd_compressed(x, k=8, n_power_iter=2, seed=seed)[1]


def test_svd_compressed_with_random_numbers_of_the_device(gpu: sim.SimGpu, client: Client) -> None:
    right = np.linalg.svd(X, compute_uv=False)
    copies = gpu.d2h_copies
    found = compressed(on_device()).compute(scheduler="sync")
    assert gpu.d2h_copies == copies
    np.testing.assert_allclose(found.get(), right, rtol=1e-8)
    np.testing.assert_allclose(
        client.compute(compressed(on_device())).result(timeout=scaled(60)).get(), right, rtol=1e-8
    )


def test_random_blocks_are_made_on_the_device(gpu: sim.SimGpu) -> None:
    x = da.random.RandomState(1, RandomState=sim.RandomState).random_sample((1000, 4), chunks=100)
    assert type(x._meta) is sim.SimArray
    found = x.compute(scheduler="threads")
    assert (type(found), gpu.h2d_copies, gpu.d2h_copies) == (sim.SimArray, 0, 0)
    same = da.random.RandomState(1).random_sample((1000, 4), chunks=100)
    np.testing.assert_array_equal(found.get(), same.compute(scheduler="sync"))


@pytest.mark.parametrize("mix", [np.add, lambda a, b: a + b, lambda a, b: np.concatenate([a, b])])
def test_device_and_dask_arrays_mix(gpu: sim.SimGpu, mix: Callable[..., da.Array]) -> None:
    d, x = gpu.asarray(X), on_device()
    for one, two in ((d, x), (x, d)):
        lazy = mix(one, two)
        assert type(lazy) is da.Array
        np.testing.assert_array_equal(lazy.compute(scheduler="sync").get(), mix(X, X))


@pytest.mark.parametrize(
    "host", [X, np.asfortranarray(X), X[:, ::2], X.T[::3], X[:1, :1], X.astype("f4")], ids=lambda a: str(a.strides)
)
def test_travel_is_one_copy_down_and_one_up(gpu: sim.SimGpu, client: Client, host: np.ndarray) -> None:
    one, two = client.scheduler_info()["workers"]
    d = gpu.asarray(host)
    a = client.submit(lambda: d.copy(), workers=[one], pure=False)
    client.submit(lambda a: a.nbytes, a, workers=[one]).result(timeout=scaled(60))
    up, down = gpu.h2d_copies, gpu.d2h_copies
    b = client.submit(lambda a: (type(a) is sim.SimArray, a.sum() == 0), a, workers=[two])
    client.submit(lambda b: b[0], b, workers=[two]).result(timeout=scaled(60))
    assert (gpu.h2d_copies, gpu.d2h_copies) == (up + 1, down + 1)
    np.testing.assert_array_equal(a.result(timeout=scaled(60)).get(), host)


def test_nothing_stays_on_the_device(gpu: sim.SimGpu, client: Client) -> None:
    u, s, _ = client.persist(da.linalg.svd(on_device()))
    assert s.compute().shape == (8,)
    assert gpu.used_bytes >= X.nbytes
    del u, s, _
    until(lambda: gpu.used_bytes == 0, "the workers have heard of the keys to be released")


def test_dask_knows_the_size(gpu: sim.SimGpu) -> None:
    assert sizeof(gpu.asarray(X)) == X.nbytes

"""JAX itself, on the CPU: what its arrays count, and that they reach other workers."""

from typing import Any

from dask.sizeof import sizeof
from distributed import Client

from hpcgpu import LocalGPUCluster
from hpcgpu.spill.devices.cuda import is_device_array
from hpcgpu.spill.devices.libraries import library_of


def nbytes_of(key: str, dask_scheduler: Any) -> int:
    return dask_scheduler.tasks[key].nbytes


def described(x: Any) -> tuple:
    return x.shape, str(x.dtype), float(x[9, 9])


def ones(dtype: str) -> Any:
    import jax.numpy as jnp

    return jnp.ones((1000, 100), dtype)


def test_jax_arrays_count_their_bytes_and_move_between_workers() -> None:
    with LocalGPUCluster(gpus="sim:2", nthreads=1) as cluster, Client(cluster) as client:
        first, second = sorted(client.scheduler_info()["workers"])
        for dtype, nbytes in (("float32", 400_000), ("bfloat16", 200_000)):
            array = client.submit(ones, dtype, workers=first, pure=False)
            assert client.submit(sizeof, array, workers=second, pure=False).result() == nbytes
            assert client.submit(described, array, workers=second, pure=False).result() == ((1000, 100), dtype, 1)
            assert client.run_on_scheduler(nbytes_of, array.key) == nbytes


def test_jax_arrays_class_is_found_by_its_name() -> None:
    array = ones("bfloat16")
    assert (library_of(type(array)), is_device_array(array)) == ("jax", False)  # it is on the CPU
    array.delete()
    assert not is_device_array(array)

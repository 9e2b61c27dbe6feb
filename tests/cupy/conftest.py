"""CuPy, numba, cuda.core and RMM themselves without a GPU, in an environment of their own: ``make cupy``."""

import ctypes
import gc
import os
from collections.abc import Iterator

import fake_cuda
import pytest
import real_cupy
from spill_stores import new_store as new_store


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not real_cupy.is_here():
        for item in items:
            if item.get_closest_marker("cupy"):
                item.add_marker(pytest.mark.skip(reason="CuPy's runtime is not replaced here: make cupy"))


@pytest.fixture(scope="session")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> fake_cuda.Standin:
    folder = tmp_path_factory.mktemp("driver")
    os.environ["LD_LIBRARY_PATH"] = fake_cuda.compiled(folder)["LD_LIBRARY_PATH"]  # of processes that start from now on
    ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)  # whoever asks for it by its name gets this one
    return fake_cuda.Standin()


@pytest.fixture(autouse=True)
def driver(_driver: fake_cuda.Standin, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.Standin]:
    """The driver of this process; after each test CuPy's pools are empty, and no call fails any more."""
    import cupy

    yield _driver
    monkeypatch.undo()
    _driver.mend()
    gc.collect()
    cupy.cuda.Device(0).synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    cupy.get_default_pinned_memory_pool().free_all_blocks()

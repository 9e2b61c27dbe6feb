"""The store's laws on a real GPU, through CuPy."""

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
from spill_stores import NewStore, put
from waiting import scaled

from hpcgpu.spill import GpuSpillBuffer

MIB = 1 << 20
SCRIPT = """
import cupy
import numpy as np
from distributed import Client


def make(i):
    return [cupy.asarray(np.full(8 << 20, i, "u1"))]


def last(value):
    return int(value[0][-1])


if __name__ == "__main__":
    with Client() as client:
        values = client.map(make, range(24))
        print(sum(client.gather(client.map(last, values))))
        print(sum(client.gather(client.map(last, values, pure=False))))
        found = client.gather(values[5:7])
        print([type(array) is cupy.ndarray and int(array[-1]) for (array,) in found])
        array = client.submit(lambda value: value[0], values[7]).result()  # numba is not needed for it
        print(type(array) is cupy.ndarray and int(array[-1]))
        spilled = [worker["metrics"]["spilled_bytes"]["disk"] for worker in client.scheduler_info()["workers"].values()]
        print(max(spilled) > 0)  # of several GPUs one may have got no work
"""


@pytest.fixture
def cupy() -> Iterator[Any]:
    module = pytest.importorskip("cupy", reason="no CuPy here")
    try:
        module.cuda.runtime.getDeviceCount()
    except module.cuda.runtime.CUDARuntimeError as why:
        pytest.skip(f"no GPU here: {why}")
    yield module


@pytest.fixture
def store(cupy: Any, new_store: NewStore) -> GpuSpillBuffer:
    return new_store(8 * MIB, 8 * MIB)


def used(cupy: Any) -> int:
    gc.collect()
    return int(cupy.get_default_memory_pool().used_bytes())


def test_every_tier_is_used_and_values_are_right(cupy: Any, store: GpuSpillBuffer) -> None:
    before = used(cupy)
    put(store, range(40), lambda i: {"x": [cupy.full((512, 256), i), np.full(10, i)]})
    assert 0 < store.tiers["device"] <= 8 * MIB
    assert used(cupy) - before == store.tiers["device"]
    assert store.tiers["disk"] > 0
    for i in range(40):
        value = store[i]["x"]
        assert type(value[0]) is cupy.ndarray
        assert int(value[0].sum()) == 512 * 256 * i
        assert value[1][9] == i
    del value
    store.clear()
    assert used(cupy) == before


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("unspill", ["--jit-unspill", "--no-jit-unspill"])
def test_a_script_that_knows_nothing_of_hpcgpu(tmp_path: Path, unspill: str) -> None:
    (path := tmp_path / "script.py").write_text(SCRIPT)
    argv = [sys.executable, "-m", "hpcgpu", "run", "--device-memory-limit", "32MiB", unspill, str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(120), env=ranks.environment())
    assert done.returncode == 0, done.stderr
    total = str(sum(range(24)))
    assert done.stdout.split("\n")[-6:-1] == [total, total, "[5, 6]", "7", "True"]

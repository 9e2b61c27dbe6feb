"""Values on a GPU in a checkpoint: written by a worker's writer, and loaded with a GPU and without one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cupy_arrays import DeviceBuffer, content, filled, frame_class, on_host
from spill_stores import NewStore
from waiting import scaled

from hpcgpu.checkpoint import values
from hpcgpu.checkpoint.segments import Chunk, Index
from hpcgpu.checkpoint.writer import Writer
from hpcgpu.errors import ConfigError

MIB = 1 << 20
CHUNK = Chunk("run", (0, 0))


@pytest.fixture
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Callable[[], Any]]:
    """Write the value of data, and return what loads it."""

    def save(data: Any) -> Callable[[], Any]:
        folder: Path = tmp_path_factory.mktemp("run")
        writer = Writer(data, folder, "w")
        writer.put("x", CHUNK)
        assert writer.flush(scaled(30)).unsaved == {}
        writer.close()
        (index := Index(folder)).refresh()
        return lambda: values.load(str(folder), CHUNK, index.chunks[CHUNK])

    return save


@pytest.mark.parametrize("has_store", [True, False])
def test_saved_cupy_array_is_numpys_where_no_gpu_is(
    saved: Any, new_store: NewStore, monkeypatch: pytest.MonkeyPatch, has_store: bool
) -> None:
    data = new_store(4 * MIB) if has_store else {}
    data["x"] = filled(MIB, 7).view("i4").reshape(512, -1)
    source = on_host(data["x"])
    load = saved(data)
    assert on_host(load()).tolist() == source.tolist()
    monkeypatch.setattr(values, "has_gpu", lambda: False)
    assert type(here := load()) is np.ndarray
    assert (here.dtype, here.tolist()) == (source.dtype, source.tolist())


def test_saved_cudf_frame_comes_back_on_a_gpu_only(
    saved: Any, new_store: NewStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, buffers = new_store(4 * MIB), (DeviceBuffer(1000), DeviceBuffer(77))
    for memory, value in zip(buffers, (7, 9), strict=True):
        memory.memory.copy_from_device(filled(memory.size, value).data, memory.size)
    store["x"] = frame_class(monkeypatch)(*buffers, label=b"name")
    load = saved(store)
    assert (content(again := load()), again.label) == ([(1000, {7}), (77, {9})], b"name")
    monkeypatch.setattr(values, "has_gpu", lambda: False)
    with pytest.raises(ConfigError, match="objects of cudf, and there is no GPU"):
        load()

"""Values on a GPU, as a worker's writer writes them, loaded with a GPU and without one."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
from cupy_arrays import DeviceBuffer, content, filled, frame_class, on_host
from spill_stores import NewStore
from waiting import scaled

from hpcgpu.checkpoint import values
from hpcgpu.checkpoint.segments import Chunk, Index
from hpcgpu.checkpoint.writer import Writer
from hpcgpu.errors import ConfigError


def saved(data: Any, folder: Any) -> Any:
    """Write what data has, and return what loads it."""
    writer, chunk = Writer(data, folder, "w"), Chunk("run", (0, 0))
    writer.put("x", chunk)
    assert writer.flush(scaled(30)).unsaved == {}
    writer.close()
    (index := Index(folder)).refresh()
    return lambda: values.load(str(folder), chunk, index.chunks[chunk])


@pytest.mark.parametrize("has_store", [True, False])
def test_saved_cupy_array_is_numpys_without_gpu(tmp_path_factory: Any, new_store: NewStore, has_store: bool) -> None:
    data = new_store(4 << 20) if has_store else {}
    data["x"] = filled(1 << 20, 7).view("i4").reshape(512, -1)
    load, source = saved(data, tmp_path_factory.mktemp("run")), on_host(data["x"])
    assert on_host(load()).tolist() == source.tolist()
    with mock.patch.object(values, "has_gpu", lambda: False):
        here = load()
    assert (type(here), here.dtype, here.tolist()) == (np.ndarray, source.dtype, source.tolist())


def test_saved_cudf_frame_needs_a_gpu(tmp_path_factory: Any, new_store: NewStore, monkeypatch: Any) -> None:
    store, memory = new_store(4 << 20), DeviceBuffer(1000)
    memory.memory.copy_from_device(filled(1000, 7).data, 1000)
    store["x"] = frame_class(monkeypatch)(memory, label=b"name")
    load = saved(store, tmp_path_factory.mktemp("run"))
    assert (content(again := load()), again.label) == ([(1000, {7})], b"name")
    with mock.patch.object(values, "has_gpu", lambda: False), pytest.raises(ConfigError, match="objects of cudf, and"):
        load()

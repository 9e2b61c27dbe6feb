"""Arrays of CuPy to the device and back without a kernel; cuDF's options and spill manager uncompiled."""

import functools
import importlib
import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcgpu.spill.devices.cuda import CudaDevice


def filled(nbytes: int, value: int) -> Any:
    import cupy

    return cupy.asarray(np.full(nbytes, value, "u1"))


def on_host(array: Any) -> np.ndarray:
    """Copy the whole memory that an array lies in, and show the array there: CuPy has a kernel for other layouts."""
    import cupy

    memory, offset = array.data.mem, array.data.ptr - array.data.mem.ptr
    if not array.size:
        return np.empty(array.shape, array.dtype)
    cupy.cuda.Device(0).synchronize()
    whole = cupy.ndarray((memory.size,), "u1", cupy.cuda.MemoryPointer(memory, 0)).get()
    return np.ndarray(array.shape, array.dtype, whole, offset, array.strides)


def last_of(*arrays: Any) -> list[int]:
    return [int(on_host(array)[-1]) for array in arrays]


def package(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a package ``cudf`` with the real modules ``options`` and ``core.buffer``, until the test ends."""
    try:
        folder = Path(str(importlib.metadata.distribution("cudf-cu13").locate_file("cudf")))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("no cuDF here")
    for name in [name for name in sys.modules if name.partition(".")[0] == "cudf"]:
        monkeypatch.delitem(sys.modules, name)

    def stand_in(name: str, **names: Any) -> Any:
        module = types.ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    domain = object()  # NVTX is not looked at, nor what is compiled of libcudf
    annotate = types.SimpleNamespace(domain=domain)
    stand_in("nvtx", annotate=lambda *_, **__: annotate, nvtx=types.SimpleNamespace(dummy_domain=domain))
    stand_in("pylibcudf", column=types.SimpleNamespace(is_c_contiguous=lambda *_: True))
    made = stand_in("cudf", __path__=[str(folder)])
    options = importlib.import_module("cudf.options")
    made.get_option, made.set_option = options.get_option, options.set_option
    importlib.import_module("cudf.core.buffer")
    return made


class DeviceBuffer:
    """Memory of CuPy's, as RMM shows its own."""

    def __init__(self, size: int) -> None:
        import cupy

        self.memory, self.size = cupy.cuda.alloc(size), size
        self.ptr = int(self.memory.ptr)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"data": (self.ptr, False), "shape": (self.size,), "strides": None, "typestr": "|u1", "version": 3}


def content(values: Any) -> list[tuple[int, set[int]]]:
    """Return of each buffer its size, and which bytes it has."""
    copies = CudaDevice.current(0).copies
    roots = [copies.to_host(b.ptr, b.nbytes, lambda n: np.empty(n, "u1")) for b in values.buffers if b.nbytes]
    return [(root.nbytes, set(root.tolist())) for root in roots]


def frame_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a class of buffers with cuDF's own serialization, until the test ends."""
    import rmm

    monkeypatch.setattr(rmm, "DeviceBuffer", DeviceBuffer)
    cudf = package(monkeypatch)

    class Values(sys.modules["cudf.core.abc"].Serializable):  # type: ignore[name-defined,misc]
        __module__, __qualname__ = "cudf.core.series", "Values"

        def __init__(self, *buffers: Any, label: bytes) -> None:
            self.buffers, self.label = [cudf.core.buffer.as_buffer(b) for b in buffers], label
            column = functools.partial(types.SimpleNamespace, null_mask=lambda: None, children=tuple)
            self._columns = [column(data=lambda b=b: b) for b in self.buffers]

        def memory_usage(self) -> int:
            return sum(b.nbytes for b in self.buffers)

        def serialize(self) -> tuple[dict[str, Any], list[Any]]:
            return {}, [*self.buffers, memoryview(self.label)]

        @classmethod
        def deserialize(cls, header: dict[str, Any], frames: list[Any]) -> Any:
            return cls(*frames[:-1], label=bytes(frames[-1]))

    monkeypatch.setitem(sys.modules, Values.__module__, types.SimpleNamespace(Values=Values))  # type: ignore[arg-type]
    return Values

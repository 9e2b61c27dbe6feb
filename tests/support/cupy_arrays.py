"""Arrays of CuPy to the device and back without a kernel; cuDF's options and spill manager uncompiled."""

import importlib
import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest


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

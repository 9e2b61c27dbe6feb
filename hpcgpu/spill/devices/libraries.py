"""The library of a device array, by the name of its class: so no library is imported for it."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import wrapt

from hpcgpu.spill.devices import cudf

# Compiled code may get objects of these libraries, and takes no proxies for them.
UNPROXIED = frozenset({"torch", "numba", "rmm", "other"})
LIBRARIES = ("cuda", "cupy", "torch", "numba", "rmm", "other")  # whose arrays the store finds by address


@functools.lru_cache(256)
def library_of(kind: Any) -> str:  # a class; mypy takes type for what cannot be hashed
    """Return the library of a class of device arrays; "" if its objects hold no device memory."""
    # "device": the objects have their device in __hpcgpu_device__; "cuda": of cuda.core; "other": they show device
    # memory by __cuda_array_interface__, but the store cannot make such objects
    if issubclass(kind, wrapt.BaseObjectProxy):
        return ""  # access would bring its object up
    if hasattr(kind, "__hpcgpu_device__"):
        return "device"
    root = kind.__module__.partition(".")[0]
    if kind.__name__ == "ndarray" and root == "cupy":  # "cupy", "cupy._core.core"
        return "cupy"
    # cuda-core 1.2.2 says "cuda.core._memory._buffer", versions before 1.0 "cuda.core.experimental._memory..."
    if kind.__name__ == "Buffer" and kind.__module__.startswith("cuda.core."):
        return "cuda"
    if cudf.is_cudf_type(kind):
        return "cudf"
    if any(b.__name__ == "Tensor" and b.__module__.partition(".")[0] == "torch" for b in kind.__mro__):
        return "torch"  # subclasses, too: the adapter rejects those that it cannot move
    if kind.__name__ == "DeviceNDArray" and root == "numba":  # numba.cuda.cudadrv.devicearray
        return "numba"
    if kind.__name__ == "DeviceBuffer" and root == "rmm":  # rmm.pylibrmm.device_buffer
        return "rmm"
    # numba's mapped and managed arrays are NumPy arrays, too: the host can read them in their memory
    return "other" if hasattr(kind, "__cuda_array_interface__") and not issubclass(kind, np.ndarray) else ""


class Extent(NamedTuple):
    """The memory of an array, by its ``__cuda_array_interface__``."""

    pointer: int  # the first byte
    nbytes: int  # from the first byte to the last one
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in bytes
    dtype: np.dtype[Any]
    offset: int  # of the element with all indices 0, in bytes from ``pointer``; not 0 if a stride is negative


def extent_of(x: Any) -> Extent:
    """Return the memory of an array (CUDA Array Interface, versions 0 to 3)."""
    interface = x.__cuda_array_interface__
    shape, typestr = tuple(interface["shape"]), interface["typestr"]
    dtype = np.dtype(interface["descr"] if typestr[1] == "V" and interface.get("descr") else typestr)
    strides = interface.get("strides")
    if strides is None:
        strides = [dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    strides = tuple(int(s) for s in strides)
    begin = int(interface["data"][0] or 0)
    if 0 in shape or not begin:
        return Extent(begin, 0, shape, strides, dtype, 0)
    spans = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    before = -sum(s for s in spans if s < 0)
    nbytes = before + sum(s for s in spans if s > 0) + dtype.itemsize
    return Extent(begin - before, nbytes, shape, strides, dtype, before)


def is_on_device(x: Any) -> bool:
    """Tell whether an object that may show device memory shows some now: torch's objects in host memory do not."""
    try:
        return extent_of(x).nbytes > 0
    except Exception:  # each library has its own: AttributeError, TypeError, RuntimeError
        return False

"""The library of a device array: by the name of its class, so that no library is imported for it."""

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
    """Return the library of a class of device arrays.

    Returns
    -------
    str
        ``device``: the objects tell it themselves (``__hpcgpu_device__``). ``cupy``, ``cuda`` (cuda.core), ``cudf``,
        ``torch``, ``numba``, ``rmm``. ``other``: they show device memory by ``__cuda_array_interface__``, and the store
        cannot make one. Empty: no device memory.

    """
    if issubclass(kind, wrapt.BaseObjectProxy):
        return ""  # to look at it would bring its object up
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
        return "torch"  # subclasses, too: the adapter tells which it cannot move
    if kind.__name__ == "DeviceNDArray" and root == "numba":  # numba.cuda.cudadrv.devicearray
        return "numba"
    if kind.__name__ == "DeviceBuffer" and root == "rmm":  # rmm.pylibrmm.device_buffer
        return "rmm"
    # numba's mapped and managed arrays are NumPy arrays, too: the host can read them in their memory
    return "other" if hasattr(kind, "__cuda_array_interface__") and not issubclass(kind, np.ndarray) else ""


class Extent(NamedTuple):
    """The memory of an array, by its ``__cuda_array_interface__``. Immutable; any thread may make it.

    Attributes
    ----------
    pointer, nbytes : int
        The memory from the first byte to the last one.
    shape, strides : tuple of int
        In elements, and in bytes.
    dtype : dtype
        NumPy's.
    offset : int
        Of the element with all indices 0, in bytes from ``pointer``; not 0 if a stride is negative.

    """

    pointer: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int


def extent_of(x: Any) -> Extent:
    """Return the memory of an array (CUDA Array Interface, versions 0 to 3)."""
    told = x.__cuda_array_interface__
    shape, typestr = tuple(told["shape"]), told["typestr"]
    dtype = np.dtype(told["descr"] if typestr[1] == "V" and told.get("descr") else typestr)
    strides = told.get("strides")
    if strides is None:
        strides = [dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    strides = tuple(int(s) for s in strides)
    begin = int(told["data"][0] or 0)
    if 0 in shape or not begin:
        return Extent(begin, 0, shape, strides, dtype, 0)
    spans = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
    before = -sum(s for s in spans if s < 0)
    return Extent(
        begin - before, before + sum(s for s in spans if s > 0) + dtype.itemsize, shape, strides, dtype, before
    )


def is_on_device(x: Any) -> bool:
    """Tell whether an object that may show device memory shows some now; torch's do not in host memory."""
    try:
        return extent_of(x).nbytes > 0
    except Exception:  # AttributeError, TypeError, RuntimeError: each library has its own way to say no
        return False

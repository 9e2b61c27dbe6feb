"""A GPU whose memory is the host's, and as much of PyTorch and RMM as the store asks for on it."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hpcgpu.spill.devices.cuda import CudaDevice

_FIELDS = {"float32": "f4", "float64": "f8", "uint8": "u1"}
_installed: list[CudaDevice] = []


class Gpu:
    """Its memory, counted."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes, self.used_bytes, self.idle_bytes = memory_bytes, 0, 0
        self.downs = self.ups = 0
        self.kept_bytes = 0  # of torch's cache, of which no tensor is stored

    free_bytes = property(lambda self: self.memory_bytes - self.used_bytes)
    trim = lambda self, nbytes: 0  # noqa: E731
    synchronize = lambda self: None  # noqa: E731 - all is done at once

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        root = empty(nbytes)
        ctypes.memmove(root.ctypes.data, pointer, nbytes)
        self.downs += 1
        return root

    def to_host_each(self, extents: Any, empty: Callable[[int], np.ndarray]) -> list[np.ndarray]:
        return [self.to_host(*extent, empty) if extent[1] else empty(0) for extent in extents]

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> None:
        assert after == 0
        ctypes.memmove(pointer, root.ctypes.data, root.nbytes)
        self.ups += 1


class Memory:
    """An allocation; freed with the last one that holds it. CuPy's pointers, RMM's buffers and the like look so."""

    def __init__(self, gpu: Gpu, nbytes: int, error: type[Exception] = MemoryError) -> None:
        self.gpu, self.size, self.bytes = gpu, 0, np.zeros(nbytes, "u1")
        if gpu.used_bytes + gpu.kept_bytes + nbytes > gpu.memory_bytes:
            raise error(f"{nbytes} bytes")
        self.size = nbytes
        gpu.used_bytes += nbytes
        self.ptr = self.bytes.ctypes.data if nbytes else 0

    def __del__(self) -> None:
        self.gpu.used_bytes -= self.size

    data_ptr = lambda self: self.ptr  # noqa: E731
    nbytes = lambda self: self.size  # noqa: E731


class OutOfMemoryError(RuntimeError):
    """As torch's: no MemoryError."""


class Tensor:
    is_quantized, is_cuda, layout = False, True, "torch.strided"
    grad: Any
    grad_fn: Any
    grad = grad_fn = _backward_hooks = None

    __slots__ = ("__dict__", "__weakref__", "_at", "_memory", "requires_grad")

    def __init__(self, memory: Memory, at: tuple[str, int, tuple[int, ...], tuple[int, ...]]) -> None:
        self._memory, self._at, self.requires_grad = memory, at, False

    dtype = property(lambda self: self._at[0])
    shape = property(lambda self: self._at[2])
    device = property(lambda _: types.SimpleNamespace(index=0))
    storage_offset = lambda self: self._at[1]  # noqa: E731
    stride = lambda self: self._at[3]  # noqa: E731
    untyped_storage = lambda self: self._memory  # noqa: E731
    data_ptr = lambda self: self._memory.ptr  # noqa: E731
    is_conj = is_neg = lambda _: False  # noqa: E731
    __cuda_array_interface__ = property(lambda _: {})

    def set_(self, storage: Memory, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self._memory, self._at = storage, (self.dtype, offset, shape, strides)

    def requires_grad_(self, requires: bool) -> Tensor:
        self.requires_grad = requires
        return self

    def host(self) -> np.ndarray:
        dtype = np.dtype(_FIELDS[self.dtype])
        strides = [n * dtype.itemsize for n in self.stride()]
        return np.ndarray(self.shape, dtype, self._memory.bytes.data, self.storage_offset() * dtype.itemsize, strides)


class Parameter(Tensor):
    __slots__ = ()


def torch(gpu: Gpu) -> Any:
    """Return the module."""
    Tensor.__module__, Parameter.__module__ = "torch", "torch.nn.parameter"

    def empty(n: int, *, dtype: str, device: Any) -> Tensor:
        del device
        nbytes = n * np.dtype(_FIELDS[dtype]).itemsize
        return Tensor(Memory(gpu, nbytes, OutOfMemoryError), (dtype, 0, (n,), (1,)))

    def parameter(tensor: Tensor, requires_grad: bool) -> Tensor:
        return Parameter(tensor._memory, tensor._at).requires_grad_(requires_grad)

    cuda = types.SimpleNamespace(
        OutOfMemoryError=OutOfMemoryError,
        current_stream=lambda _: types.SimpleNamespace(cuda_stream=0),
        memory_allocated=lambda _: gpu.used_bytes,
        memory_reserved=lambda _: gpu.used_bytes + gpu.kept_bytes,
        empty_cache=lambda: setattr(gpu, "kept_bytes", 0),
    )
    names: dict[str, Any] = {**{name: name for name in _FIELDS}, "empty": empty, "cuda": cuda, "Tensor": Tensor}
    names |= {"device": lambda *_: None, "nn": types.SimpleNamespace(Parameter=parameter)}
    names |= {"no_grad": contextlib.nullcontext, "inference_mode": contextlib.nullcontext}
    return _module("torch", names)


class DeviceBuffer(Memory):
    """As RMM's."""

    __module__ = "rmm.pylibrmm.device_buffer"
    __cuda_array_interface__ = property(lambda _: {})


def _shown(nbytes: int, pointer: int) -> dict[str, Any]:
    return {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class Foreign:
    """An array of a library that hpcgpu does not know."""

    def __init__(self, gpu: Gpu, n: int) -> None:
        self._memory = Memory(gpu, n)

    __cuda_array_interface__ = property(lambda self: _shown(self._memory.size, self._memory.ptr))


class Pickled:
    """An array of another such library, which can be pickled."""

    def __init__(self, n: int) -> None:
        self.n = n

    __cuda_array_interface__ = property(lambda self: _shown(self.n, id(self)))


def _module(name: str, names: dict[str, Any]) -> Any:
    made = types.ModuleType(name)
    vars(made).update(names)
    return made


class Pool:
    """What the device's own memory is taken from, in place of CuPy's pool and of the driver's."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def allocate(self, nbytes: int) -> tuple[Memory, int, int]:
        from hpcgpu.spill.devices.allocation_failure import with_room

        memory = with_room(_installed[0], nbytes, lambda: Memory(self._gpu, nbytes), _installed[0].give_back)
        return memory, memory.ptr, 0

    used_bytes = lambda self: 0  # noqa: E731 - torch counts all
    give_back = lambda self: None  # noqa: E731


def current(number: int) -> CudaDevice:
    """Return the device, in place of CudaDevice.current: pickled devices find it by this name."""
    return _installed[number]


def install(patch: pytest.MonkeyPatch, memory_bytes: int) -> Gpu:
    """Let this process have such a GPU and these libraries."""
    gpu = Gpu(memory_bytes)
    device = CudaDevice(0, gpu)
    pool: Any = Pool(gpu)
    device.kinds |= {"cuda": pool, "cupy": pool}
    patch.setattr("fake_libraries._installed", [device])
    patch.setattr(CudaDevice, "current", staticmethod(current))
    rmm = _module("rmm", {"DeviceBuffer": lambda size: DeviceBuffer(gpu, size)})
    for name, module in {"torch": torch(gpu), "rmm": rmm}.items():
        patch.setitem(sys.modules, name, module)
    return gpu


class ArrayImpl:
    """JAX's bfloat16 on a GPU, or what was donated: then it has no devices."""

    __module__ = "jaxlib._jax"

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.deleted = nbytes, False

    def is_deleted(self) -> bool:
        return self.deleted

    def devices(self) -> set[Any]:
        if self.deleted:
            raise RuntimeError("Array has been deleted")
        return {_JAX_GPU}

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        raise AttributeError("__cuda_array_interface__ is not supported for bfloat16 buffers.")


_JAX_GPU = type("Device", (), {"platform": "gpu"})()

"""CuPy's arrays and torch's tensors: each library has a pool of device memory, and can copy without cuda.bindings.

Together: a pool keeps memory that other libraries may need, and gives it back when the store asks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices.allocation_failure import attached_gpu, with_room
from hpcgpu.spill.devices.device import Copies, Kind
from hpcgpu.spill.devices.libraries import ArrayView
from hpcgpu.spill.storage.disk import ImmovableError

_SPARSE = {
    "torch.sparse_coo": ("_indices", "_values"),
    **dict.fromkeys(("torch.sparse_csr", "torch.sparse_bsr"), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys(("torch.sparse_csc", "torch.sparse_bsc"), ("ccol_indices", "row_indices", "values")),
}


class NoCopies(Copies):
    """Stands in if no library can copy: there is no driver, or no library. Objects on the device count, and stay.

    The size is unknown. So each object is above the limit, is tried at once, and is named.
    """

    memory_bytes = free_bytes = 1

    def __init__(self, why: str, may_pass: bool = False) -> None:
        self._why, self.may_pass = why, may_pass

    def synchronize(self) -> None:
        """Do nothing: no array comes up, so that no copy is kept."""

    def to_host(self, *_: object) -> NoReturn:
        raise SpillError(f"device memory cannot be copied here: {self._why}")

    def to_device(self, *_: object) -> NoReturn:
        self.to_host()


class CupyCopies(Copies):
    """Copies by CuPy."""

    # not through CuPy's page-locked pool: it rounds up to a power of two, so it could lock twice the host tier, and
    # it has no limit (CuPy 14.2, pinned_memory.pyx)

    def __init__(self, number: int) -> None:
        import cupy

        self._number, self._cuda, self._runtime = number, cupy.cuda, cupy.cuda.runtime
        with cupy.cuda.Device(number):
            self.memory_bytes = int(cupy.cuda.runtime.memGetInfo()[1])

    @property
    def free_bytes(self) -> int:
        with self._cuda.Device(self._number):
            return int(self._runtime.memGetInfo()[0])

    def synchronize(self) -> None:
        self._cuda.Device(self._number).synchronize()

    def _copy_down(self, root: np.ndarray, pointer: int) -> None:
        with self._cuda.Device(self._number):
            self._runtime.memcpy(root.ctypes.data, pointer, root.nbytes, self._runtime.memcpyDeviceToHost)

    def _copy_up(self, root: np.ndarray, pointer: int) -> None:
        with self._cuda.Device(self._number):
            self._runtime.memcpy(pointer, root.ctypes.data, root.nbytes, self._runtime.memcpyHostToDevice)


class TorchCopies(Copies):
    """Copies by torch, without CuPy."""

    def __init__(self, number: int) -> None:
        import torch  # type: ignore[import-not-found] # of no extra of ours

        self._number, self._torch = number, torch
        self.memory_bytes = int(torch.cuda.get_device_properties(number).total_memory)

    @property
    def free_bytes(self) -> int:
        return int(self._torch.cuda.mem_get_info(self._number)[0])

    def synchronize(self) -> None:
        self._torch.cuda.synchronize(self._number)

    def _copy_down(self, root: np.ndarray, pointer: int) -> None:
        self._torch.from_numpy(root).copy_(self._tensor_at(pointer, root.nbytes))

    def _copy_up(self, root: np.ndarray, pointer: int) -> None:
        source = root if root.flags.writeable else root.copy()  # torch warns about read-only arrays
        self._tensor_at(pointer, root.nbytes).copy_(self._torch.from_numpy(source))

    def _tensor_at(self, pointer: int, nbytes: int) -> Any:
        return self._torch.as_tensor(_Bytes(pointer, nbytes), device=self._torch.device("cuda", self._number))


class _Bytes:
    """Device memory, for torch."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = interface


def evict_on_failure() -> None:
    """Let failing allocations of CuPy's present allocator make the stores evict: user code and cuDF may set another."""
    import cupy

    allocate = cupy.cuda.get_allocator()
    if getattr(allocate, "func", None) is not _allocate_or_evict:
        with contextlib.suppress(ValueError):  # inside using_allocator; the next array comes from outside
            cupy.cuda.set_allocator(functools.partial(_allocate_or_evict, allocate))


def _allocate_or_evict(allocate: Callable[[int], Any], nbytes: int) -> Any:
    try:
        return allocate(nbytes)
    except MemoryError:
        import cupy

        device = attached_gpu(cupy.cuda.runtime.getDevice())
        if device is None:  # no store has values on it
            raise
        return with_room(device, nbytes, lambda: allocate(nbytes), device.give_back)


class CupyArrays(Kind):
    """CuPy's arrays on one device, in CuPy's pool, where failing allocations of all threads make the store evict."""

    def __init__(self, device: Any) -> None:
        import cupy

        super().__init__(device)
        self._cupy = cupy
        evict_on_failure()
        with cupy.cuda.Device(device.number):
            pool = cupy.get_default_memory_pool()
            if device.reserve_bytes and not pool.get_limit():  # nor has CUPY_GPU_MEMORY_LIMIT set one
                pool.set_limit(size=device.memory_bytes - device.reserve_bytes)

    def extent_of(self, array: Any) -> tuple[int, int]:
        evict_on_failure()
        return int(array.data.mem.ptr), int(array.data.mem.size)

    def view_of(self, array: Any) -> ArrayView:
        return ArrayView("cupy", array.shape, array.dtype, array.strides, int(array.data.ptr - array.data.mem.ptr))

    def allocate(self, nbytes: int) -> tuple[Any, int, int]:
        """Allocate on the calling thread's stream of CuPy, where freed memory may still be in use."""
        cuda = self._cupy.cuda
        with cuda.Device(self.device.number):
            pointer = cuda.alloc(nbytes)
            return pointer, int(pointer.ptr), int(cuda.get_current_stream().ptr)

    def array_of(self, memory: Any, view: ArrayView) -> Any:
        with self._cupy.cuda.Device(self.device.number):
            return self._cupy.ndarray(view.shape, view.dtype, memory + view.offset, view.strides)

    def used_bytes(self) -> int:
        with self._cupy.cuda.Device(self.device.number):
            return int(self._cupy.get_default_memory_pool().used_bytes())

    def give_back(self) -> bool:
        with self._cupy.cuda.Device(self.device.number):  # a pool has an arena for each device
            return any([self._emptied(pool) for pool in self._pools()])

    def _pools(self) -> list[Any]:
        """Return CuPy's own pool, and the one whose allocator a user has set."""
        allocate = self._cupy.cuda.get_allocator()
        allocate = allocate.args[0] if getattr(allocate, "func", None) is _allocate_or_evict else allocate
        pools = [self._cupy.get_default_memory_pool(), getattr(allocate, "__self__", None)]
        return [pool for i, pool in enumerate(pools) if hasattr(pool, "free_all_blocks") and pool not in pools[:i]]

    def _emptied(self, pool: Any) -> bool:
        if not pool.free_bytes():
            return False
        # cudaFree waits for the device, and a pool frees under its lock: a thread that allocates would wait for kernels
        self.device.copies.synchronize()
        before = pool.total_bytes()
        pool.free_all_blocks()
        return bool(pool.total_bytes() < before)


class TensorView(NamedTuple):
    """The layout of a tensor in its storage; strides and offset in elements, as in torch."""

    shape: tuple[int, ...]
    dtype: Any
    strides: tuple[int, ...]
    offset: int
    is_parameter: bool
    requires_grad: bool
    library: str = "torch"


class Tensors(Kind):
    """Tensors on one device, in memory of torch's allocator, which may be RMM's, on the calling thread's stream."""

    kind = "cuda"

    def __init__(self, device: Any) -> None:
        import torch

        super().__init__(device)
        self._number, self._torch = device.number, torch

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and bytes of the tensor's storage; for a sparse tensor an id, and the bytes of its parts."""
        parts = _SPARSE.get(str(array.layout))
        if parts is not None:
            return id(array), sum(int(getattr(array, name)().nbytes) for name in parts)
        storage = array.untyped_storage()
        return int(storage.data_ptr()), int(storage.nbytes())

    def view_of(self, array: Any) -> TensorView:
        """Return the layout of the tensor in its storage; ImmovableError if it is more than its numbers."""
        if why := _why_immovable(array):
            raise ImmovableError(array, TypeError(why))
        layout = tuple(array.shape), array.dtype, tuple(array.stride()), int(array.storage_offset())
        return TensorView(*layout, _is_parameter(type(array)), bool(array.requires_grad))

    def allocate(self, nbytes: int) -> tuple[Any, int, int]:
        """Allocate on the calling thread's stream of torch."""
        torch = self._torch

        def new() -> Any:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device=torch.device(self.kind, self._number))
            except torch.cuda.OutOfMemoryError as e:  # a RuntimeError
                raise MemoryError(str(e)) from e

        memory = with_room(self.device, nbytes, new, self.device.give_back)
        return memory, int(memory.data_ptr()), int(torch.cuda.current_stream(self._number).cuda_stream)

    def array_of(self, memory: Any, view: TensorView) -> Any:
        torch = self._torch
        with torch.inference_mode(False), torch.no_grad():  # the task may have switched these in its thread
            tensor = torch.empty(0, dtype=view.dtype, device=memory.device)
            tensor.set_(memory.untyped_storage(), view.offset, view.shape, view.strides)
        if view.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=view.requires_grad)
        return tensor.requires_grad_(view.requires_grad)

    def used_bytes(self) -> int:
        try:
            return int(self._torch.cuda.memory_allocated(self._number))
        except RuntimeError:  # a pluggable allocator, such as RMM's, does not count for torch
            return 0

    def give_back(self) -> bool:
        """Free the memory that torch keeps, since other libraries cannot use it; return whether there was any."""
        cuda = self._torch.cuda
        try:
            before = cuda.memory_reserved(self._number)
            cuda.empty_cache()
            return bool(cuda.memory_reserved(self._number) < before)
        except RuntimeError:  # as in used_bytes
            return False


def _is_parameter(kind: type) -> bool:
    return kind.__name__ == "Parameter" and kind.__module__ == "torch.nn.parameter"


def _why_immovable(tensor: Any) -> str:
    """Return the property of a tensor that its numbers do not restore; "" without such a property."""
    kind: type = type(tensor)
    if not _is_parameter(kind) and (kind.__name__ != "Tensor" or kind.__module__ != "torch"):
        return "it is of a subclass of torch.Tensor"
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
        return "it is sparse or quantized"
    if tensor.grad_fn is not None or tensor.grad is not None:
        return "it has a gradient, or is a step to one; detach() gives the numbers alone"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a conjugate or a negative that torch has not computed; resolve_conj() and resolve_neg() do"
    if tensor._backward_hooks or vars(tensor):
        return "it has hooks or attributes"
    return ""

"""PyTorch's tensors (torch 2.1 and later), by storage, which several tensors may share; torch is imported late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from hpcgpu.spill.devices import Gpu, ImmovableError, Kind, PlainCopies
from hpcgpu.spill.devices.allocation_failure import with_room

_SPARSE = {
    "torch.sparse_coo": ("_indices", "_values"),
    **dict.fromkeys(("torch.sparse_csr", "torch.sparse_bsr"), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys(("torch.sparse_csc", "torch.sparse_bsc"), ("ccol_indices", "row_indices", "values")),
}


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

    def __init__(self, device: Gpu) -> None:
        import torch  # type: ignore[import-not-found] # of no extra of ours

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
        return TensorView(
            tuple(array.shape),
            array.dtype,
            tuple(array.stride()),
            int(array.storage_offset()),
            _is_parameter(type(array)),
            bool(array.requires_grad),
        )

    def allocate(self, device: Gpu, nbytes: int) -> tuple[Any, int, int]:
        """Allocate on the calling thread's stream of torch."""
        torch = self._torch

        def new() -> Any:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device=torch.device(self.kind, self._number))
            except torch.cuda.OutOfMemoryError as e:  # a RuntimeError
                raise MemoryError(str(e)) from e

        memory = with_room(device, nbytes, new, device.give_back)
        return memory, int(memory.data_ptr()), self._stream()

    def _stream(self) -> int:
        return int(self._torch.cuda.current_stream(self._number).cuda_stream)

    def array_of(self, memory: Any, view: TensorView) -> Any:
        """Return a tensor in allocated memory."""
        torch = self._torch
        with torch.inference_mode(False), torch.no_grad():  # the task may have switched these in its thread
            tensor = torch.empty(0, dtype=view.dtype, device=memory.device)
            tensor.set_(memory.untyped_storage(), view.offset, view.shape, view.strides)
        if view.is_parameter:
            return torch.nn.Parameter(tensor, requires_grad=view.requires_grad)
        return tensor.requires_grad_(view.requires_grad)

    def used_bytes(self, device: Gpu) -> int:
        """Return the bytes that tensors hold; 0 if torch does not allocate them itself."""
        try:
            return int(self._torch.cuda.memory_allocated(device.number))
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
    is_parameter = _is_parameter(kind)
    if not is_parameter and (kind.__name__ != "Tensor" or kind.__module__ != "torch"):
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


class TorchCopies(PlainCopies):
    """Copies by torch, without cuda.bindings and CuPy; each waits for the whole device."""

    def __init__(self, number: int) -> None:
        import torch

        self._number, self._torch = number, torch
        self.memory_bytes = int(torch.cuda.get_device_properties(number).total_memory)

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that the driver can give."""
        return int(self._torch.cuda.mem_get_info(self._number)[0])

    def synchronize(self) -> None:
        """Wait for the work of all streams."""
        self._torch.cuda.synchronize(self._number)

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return a copy of device memory."""
        root = empty(nbytes)
        self.synchronize()
        if nbytes:
            self._torch.from_numpy(root).copy_(self._tensor_at(pointer, nbytes))
        return root

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> None:
        """Copy to device memory."""
        del after
        self.synchronize()
        source = root if root.flags.writeable else root.copy()  # torch warns about read-only arrays
        self._tensor_at(pointer, root.nbytes).copy_(self._torch.from_numpy(source))
        self.synchronize()

    def _tensor_at(self, pointer: int, nbytes: int) -> Any:
        return self._torch.as_tensor(_Bytes(pointer, nbytes), device=self._torch.device("cuda", self._number))


class _Bytes:
    """Device memory, for torch."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3}
        self.__cuda_array_interface__ = interface

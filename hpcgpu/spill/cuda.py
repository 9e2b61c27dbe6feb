"""A CUDA device, as the store takes devices, and Buffers of cuda.core on it.

Checked against cuda-core 1.2.2. CuPy's arrays are in :mod:`hpcgpu.spill.cupy`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill import cudf
from hpcgpu.spill.copies import DriverCopies
from hpcgpu.spill.pressure import with_room


class Copies(Protocol):
    """Copies between a device and host memory, finished when they return; used by several threads."""

    memory_bytes: int

    @property
    def idle_bytes(self) -> int:
        """Page-locked host memory that waits for the next copy."""

    def trim(self) -> int:
        """Give that memory back to the system; return how much."""

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return a copy of device memory, after all work that the device has been given."""

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> None:
        """Copy to device memory that was allocated on the stream ``after``, when that has come so far."""


class Kind(Protocol):
    """The arrays of one library."""

    def extent_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return address and bytes of the array's allocation."""

    def view_of(self, array: Any) -> Any:  # noqa: ANN401
        """Return how the array lies in its allocation; it can be pickled."""

    def allocate(self, device: CudaDevice, nbytes: int) -> tuple[Any, int, int]:
        """Return new device memory, its address and the stream on which it was allocated."""

    def array_of(self, memory: Any, view: Any) -> Any:  # noqa: ANN401
        """Return an array in memory that was allocated."""

    def used_bytes(self, device: CudaDevice) -> int:
        """Return the bytes that the library's arrays hold."""


class CudaDevice:
    """One CUDA device, for the arrays of every library that the store knows."""

    def __init__(self, number: int, copies: Copies) -> None:
        self.number, self.copies = number, copies
        self.memory_bytes = copies.memory_bytes
        self.name = f"CUDA device {number}"
        self.on_alloc_failure: Callable[[int], bool] | None = None
        self.kinds: dict[str, Kind] = {}

    @classmethod
    def current(cls, number: int) -> CudaDevice:
        """Return the one object for a device."""
        with _MAKING:
            return _made(number)

    @property
    def used_bytes(self) -> int:
        """Bytes that arrays hold."""
        return sum(kind.used_bytes(self) for kind in tuple(self.kinds.values()))

    def kind(self, name: str) -> Kind:
        """Return the arrays of a library; the first time it is told of the device."""
        with _MAKING:
            if name not in self.kinds:
                if name == "cupy":
                    from hpcgpu.spill.cupy import CupyArrays

                    self.kinds[name] = CupyArrays(self)
                else:
                    self.kinds[name] = CoreBuffers(self.copies)
            return self.kinds[name]

    def buffer_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return an id of the array's allocation, valid while it lives, and its bytes."""
        if cudf.is_cudf(array):
            return cudf.CudfObjects().buffer_of(array)
        pointer, nbytes = self._kind_of(array).extent_of(array)
        # two Buffers of cuda.core may begin at one address and be of different sizes
        return pointer << 64 | nbytes, nbytes

    def pack(self, arrays: Sequence[Any], empty: Callable[[int], np.ndarray]) -> tuple[np.ndarray, list[Any]]:
        """Copy the one allocation that all the arrays share to the host."""
        if cudf.is_cudf(arrays[0]):
            return cudf.CudfObjects().pack(arrays, empty)
        kind = self._kind_of(arrays[0])
        pointer, nbytes = kind.extent_of(arrays[0])
        root = self.copies.to_host(pointer, nbytes, empty) if nbytes else np.empty(0, np.uint8)
        return root, [kind.view_of(array) for array in arrays]

    def unpack(self, root: np.ndarray, views: Sequence[Any]) -> list[Any]:
        """Copy a packed allocation to the device and return its arrays."""
        if isinstance(views[0], cudf.CudfView):
            return cudf.CudfObjects().unpack(root, views)
        kind = self.kind(views[0].library)
        memory, pointer, stream = kind.allocate(self, root.nbytes)
        if root.nbytes:
            self.copies.to_device(root, pointer, stream)
        return [kind.array_of(memory, view) for view in views]

    def _kind_of(self, array: Any) -> Kind:  # noqa: ANN401
        return self.kind(type(array).__module__.partition(".")[0])

    def __reduce__(self) -> tuple[Callable[[int], CudaDevice], tuple[int]]:
        return CudaDevice.current, (0,)  # CUDA_VISIBLE_DEVICES names the receiving worker's own GPU first


class BufferView(NamedTuple):
    """A Buffer is its allocation as a whole."""

    nbytes: int
    library: str = "cuda"


class _Memory:
    """Memory of a Buffer that came up again, from the device's current pool."""

    def __init__(self, copies: DriverCopies, nbytes: int) -> None:
        self._copies, self.nbytes = copies, nbytes
        with copies.context():
            self.pointer = int(copies.call("cuMemAllocAsync", nbytes, copies.up_stream)) if nbytes else 0

    def __del__(self) -> None:
        if not getattr(self, "pointer", 0):
            return
        try:
            with self._copies.context():
                # users' kernels run on other streams than the one on which it was allocated
                self._copies.call("cuCtxSynchronize")
                self._copies.call("cuMemFreeAsync", self.pointer, self._copies.up_stream)
        except SpillError:  # the process ends, and its driver has gone before
            return


class CoreBuffers:
    """Buffers of cuda.core in device memory; their ``memory_resource`` is None when they have come up again.

    Raises
    ------
    SpillError
        There is no cuda.bindings.

    """

    def __init__(self, copies: Copies) -> None:
        if not isinstance(copies, DriverCopies):
            raise SpillError(
                "Buffers of cuda.core cannot be moved without cuda.bindings; install cuda-core[cu12 or cu13]"
            )
        self._copies = copies

    def extent_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return address and bytes."""
        return int(array.handle), int(array.size)

    def view_of(self, array: Any) -> BufferView:  # noqa: ANN401
        """Return how many bytes it has."""
        return BufferView(int(array.size))

    def allocate(self, device: CudaDevice, nbytes: int) -> tuple[_Memory, int, int]:
        """Allocate on the stream of copies to the device."""
        memory = with_room(device, nbytes, lambda: _Memory(self._copies, nbytes), self._wait)
        return memory, memory.pointer, int(self._copies.up_stream)

    def _wait(self) -> None:
        with self._copies.context():
            self._copies.call("cuCtxSynchronize")  # what was freed on other streams is free then

    def array_of(self, memory: _Memory, view: BufferView) -> Any:  # noqa: ANN401
        """Return a Buffer that keeps the memory alive."""
        from cuda.core import Buffer

        return Buffer.from_handle(memory.pointer, view.nbytes, owner=memory)

    def used_bytes(self, device: CudaDevice) -> int:
        """Return what is used of the device's current memory pool, from which cuda.core allocates by default."""
        del device
        copies = self._copies
        attribute = copies.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
        with copies.context():
            return int(
                copies.call("cuMemPoolGetAttribute", copies.call("cuDeviceGetMemPool", copies.handle), attribute)
            )


_MAKING = threading.RLock()


@functools.cache
def _made(number: int) -> CudaDevice:
    try:
        copies: Copies = DriverCopies(number)
    except ImportError:  # CuPy alone brings no cuda.bindings
        from hpcgpu.spill.cupy import CupyCopies

        copies = CupyCopies(number)
    return CudaDevice(number, copies)

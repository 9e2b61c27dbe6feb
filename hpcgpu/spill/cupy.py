"""CuPy's arrays, as the store takes devices, and on their way to other processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hpcgpu.spill.pressure import with_room
from hpcgpu.spill.reading import reader

if TYPE_CHECKING:
    from hpcgpu.spill.cuda import CudaDevice


class View(NamedTuple):
    """How an array lies in its buffer."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    offset: int
    library: str = "cupy"


class CupyArrays:
    """CuPy's arrays on one device, in CuPy's memory pool, whose failing allocations make the store evict."""

    def __init__(self, device: CudaDevice) -> None:
        import cupy

        self._device = device
        self._allocate = cupy.cuda.get_allocator()
        cupy.cuda.set_allocator(self._allocate_or_evict)

    def extent_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return address and size of the array's allocation."""
        return int(array.data.mem.ptr), int(array.data.mem.size)

    def view_of(self, array: Any) -> View:  # noqa: ANN401
        """Return how the array lies in its allocation."""
        return View(array.shape, array.dtype, array.strides, int(array.data.ptr - array.data.mem.ptr))

    def allocate(self, device: CudaDevice, nbytes: int) -> tuple[Any, int, int]:
        """Allocate on the calling thread's stream of CuPy, on which freed memory may still be in use."""
        import cupy

        with cupy.cuda.Device(device.number):
            pointer = cupy.cuda.alloc(nbytes)
            return pointer, int(pointer.ptr), int(cupy.cuda.get_current_stream().ptr)

    def array_of(self, memory: Any, view: View) -> Any:  # noqa: ANN401
        """Return an array in memory that was allocated."""
        import cupy

        with cupy.cuda.Device(self._device.number):
            return cupy.ndarray(view.shape, view.dtype, memory + view.offset, view.strides)

    def used_bytes(self, device: CudaDevice) -> int:
        """Return the bytes that arrays hold in CuPy's pool."""
        import cupy

        with cupy.cuda.Device(device.number):
            return int(cupy.get_default_memory_pool().used_bytes())

    def _allocate_or_evict(self, nbytes: int) -> Any:  # noqa: ANN401
        import cupy

        free = cupy.get_default_memory_pool().free_all_blocks
        return with_room(self._device, nbytes, lambda: self._allocate(nbytes), free)


class CupyCopies:
    """Copies by CuPy and its page-locked pool, where there is no cuda.bindings; each waits for the whole device."""

    def __init__(self, number: int) -> None:
        import cupy

        self._number = number
        with cupy.cuda.Device(number):
            self.memory_bytes = int(cupy.cuda.runtime.memGetInfo()[1])

    @property
    def idle_bytes(self) -> int:
        """Page-locked memory that waits in CuPy's pool, which tells the number of its blocks alone: 0 or 1."""
        import cupy

        return int(cupy.get_default_pinned_memory_pool().n_free_blocks() > 0)

    def trim(self) -> int:
        """Give that memory back to the system; how much is not known."""
        import cupy

        cupy.get_default_pinned_memory_pool().free_all_blocks()
        return 0

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return a copy of device memory, in page-locked memory."""
        del empty
        import cupy

        root = np.frombuffer(cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
        with cupy.cuda.Device(self._number) as device:
            device.synchronize()  # the copy waits for no kernel on a non-blocking stream
            cupy.cuda.runtime.memcpy(root.ctypes.data, pointer, nbytes, cupy.cuda.runtime.memcpyDeviceToHost)
        return root

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> None:
        """Copy to device memory."""
        del after
        import cupy

        with cupy.cuda.Device(self._number) as device:
            device.synchronize()
            cupy.cuda.runtime.memcpy(pointer, root.ctypes.data, root.nbytes, cupy.cuda.runtime.memcpyHostToDevice)
            device.synchronize()  # CUDA may return before a copy from ordinary memory has arrived


def register(dask_serialize: Any, dask_deserialize: Any) -> None:  # noqa: ANN401
    """Let CuPy's arrays travel: between workers as their bytes, elsewhere as CuPy pickles them.

    distributed's own pair needs numba or RMM, and fails without, also in a client that knows nothing of this one
    (distributed 2026.8.0, ``protocol/cupy.py``). Where something asks for its ``cuda`` family first (UCX), and numba is
    there, its pair takes the place of this one: both read what the other one writes.

    Parameters
    ----------
    dask_serialize, dask_deserialize : Dispatch
        Those of ``distributed.protocol.serialize``. CuPy is imported when the first array comes.

    """

    def add() -> None:
        import cupy

        dask_serialize.register(cupy.ndarray, serialize)
        dask_deserialize.register(cupy.ndarray, deserialize)

    dask_serialize.register_lazy("cupy", add)
    dask_deserialize.register_lazy("cupy", add)


def serialize(array: Any) -> tuple[dict[str, Any], list[memoryview]]:  # noqa: ANN401
    """Return how an array is laid out, and its bytes in host memory; what is not contiguous is made so.

    Raises
    ------
    NotImplementedError
        It is not for a worker: distributed pickles it.

    """
    import cupy

    from hpcgpu.spill.cuda import CudaDevice

    with cupy.cuda.Device(array.device.id) as device:
        who = reader()
        if who is None or not who.to_worker:
            device.synchronize()  # on whichever stream it is written; CuPy's copy waits for the current one alone
            raise NotImplementedError
        if not (array.flags.c_contiguous or array.flags.f_contiguous):
            array = cupy.ascontiguousarray(array)
        root = np.empty(0, np.uint8)
        if array.nbytes:
            root = CudaDevice.current(array.device.id).copies.to_host(int(array.data.ptr), array.nbytes, _empty)
    layout = {"shape": array.shape, "strides": array.strides, "typestr": array.dtype.str}
    return {**layout, "dtype": pickle.dumps(array.dtype)}, [root.data]  # bfloat16 and records have no typestr


def deserialize(header: dict[str, Any], frames: list[Any]) -> Any:  # noqa: ANN401
    """Return the array, on this process's current device."""
    import cupy

    from hpcgpu.spill.cuda import CudaDevice

    root = np.frombuffer(frames[0], np.uint8) if frames else np.empty(0, np.uint8)
    dtype = pickle.loads(header["dtype"]) if "dtype" in header else np.dtype(header["typestr"])
    device = CudaDevice.current(int(cupy.cuda.runtime.getDevice()))
    (array,) = device.unpack(root, [View(tuple(header["shape"]), dtype, tuple(header["strides"]), 0)])
    return array


def _empty(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)

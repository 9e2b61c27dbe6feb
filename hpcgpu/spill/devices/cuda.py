"""A CUDA device, as the store uses devices, Buffers of cuda.core (1.2.2) on it, and the device of any array."""

from __future__ import annotations

import functools
import operator
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hpcgpu.errors import SpillError
from hpcgpu.spill.devices.allocation_failure import on_event_loop, with_room
from hpcgpu.spill.devices.copies import DriverCopies
from hpcgpu.spill.devices.device import Copies, Device, Kind
from hpcgpu.spill.devices.libraries import (
    LIBRARIES,
    BytesView,
    CudfObjects,
    CudfView,
    Immovable,
    JaxArrays,
    NumbaArrays,
    RmmBuffers,
    is_cudf,
    is_on_device,
    library_of,
    spills_itself,
)
from hpcgpu.spill.devices.pools import CupyArrays, CupyCopies, NoCopies, Tensors, TorchCopies
from hpcgpu.spill.storage.disk import ImmovableError

_MAKING = threading.RLock()
_LOOK_S = 1.0


class CudaDevice:
    """One CUDA device, for the arrays of all supported libraries; :meth:`current` returns it to all stores."""

    def __init__(self, number: int, copies: Copies) -> None:
        self.number = number
        self._use(copies)
        self.name = f"CUDA device {number}"
        self.on_alloc_failure: Callable[[int], bool] | None = None
        self.kinds: dict[str, Kind] = {}
        self.waste = deque[int]()  # addresses of memory that went on an event loop: to free it waits for the device

    @classmethod
    def current(cls, number: int) -> CudaDevice:
        """Return the object for a device."""
        with _MAKING:
            return _made(number)

    def _use(self, copies: Copies) -> None:
        self._copies, self._looked_s = copies, time.monotonic()
        self.memory_bytes = copies.memory_bytes
        # cuBLAS, cuFFT, NCCL, UCX, kernels: a process that fills the device with arrays first gets none of them
        # (cupy #3935, "CUBLAS_STATUS_NOT_INITIALIZED")
        self.reserve_bytes = min(max(2**30, self.memory_bytes * 3 // 100), self.memory_bytes // 8)

    @property
    def copies(self) -> Copies:
        """Makes the copies; tries a driver that refused again: a killed worker may still be on the GPU."""
        made = self._copies
        if isinstance(made, NoCopies) and made.may_pass and time.monotonic() - self._looked_s >= _LOOK_S:
            self._use(_copies(self.number))
        return self._copies

    @property
    def used_bytes(self) -> int:
        return sum(kind.used_bytes() for kind in tuple(self.kinds.values()))

    def kind(self, name: str) -> Kind:
        """Return the adapter for the arrays of a library; made at the first call."""
        with _MAKING:
            if name not in self.kinds:
                self.kinds[name] = _KINDS.get(name, Immovable)(self)
            return self.kinds[name]

    def empty_bin(self) -> None:
        """Free the memory in the bin; called by the spill thread, and threads whose allocations fail."""
        try:
            while True:
                _free(self.copies, self.waste.popleft())
        except IndexError:  # it is empty
            return

    def give_back(self, *, if_short: bool = False) -> bool:
        """Free the memory that each library keeps, also torch for a model: the other libraries cannot use it."""
        self.empty_bin()
        if if_short and self.copies.free_bytes >= self.reserve_bytes:
            return False
        if "torch" in sys.modules:
            self.kind("torch")
        return any([kind.give_back() for kind in tuple(self.kinds.values())])

    def synchronize(self) -> None:
        self.copies.synchronize()

    def buffer_of(self, array: Any) -> tuple[int, int]:
        if is_cudf(array):
            return CudfObjects(self).buffer_of(array)
        kind: type = type(array)
        library = library_of(kind)
        pointer, nbytes = self.kind(library).extent_of(array)
        # Two Buffers of cuda.core may have one address and different sizes. An array of one library in another's memory
        # is a buffer of its own: both move down, and are two when they are back.
        return (LIBRARIES.index(library) << 64 | pointer) << 64 | nbytes, nbytes

    def pack(
        self, groups: Sequence[Sequence[Any]], empty: Callable[[int], np.ndarray]
    ) -> list[tuple[np.ndarray, list[Any]]]:
        """Copy allocations to the host, after one wait for the device; cuDF copies its own."""
        views, extents = [], []
        for arrays in groups:
            first: type = type(arrays[0])
            if not is_cudf(arrays[0]):
                kind = self.kind(library_of(first))
                views.append([kind.view_of(array) for array in arrays])  # raises if one cannot be moved
                extents.append(kind.extent_of(arrays[0]))
        roots = self.copies.to_host_each(extents, empty) if extents else []
        plain = iter(zip(roots, views, strict=True))
        return [CudfObjects(self).pack(arrays, empty) if is_cudf(arrays[0]) else next(plain) for arrays in groups]

    def unpack(self, root: np.ndarray, views: Sequence[Any]) -> list[Any]:
        if isinstance(views[0], CudfView):
            return CudfObjects(self).unpack(root, views)
        kind = self.kind(views[0].library)
        memory, pointer, stream = kind.allocate(root.nbytes)
        if root.nbytes:
            self.copies.to_device(root, pointer, stream)
        return [kind.array_of(memory, view) for view in views]

    def __reduce__(self) -> tuple[Callable[[int], CudaDevice], tuple[int]]:
        return CudaDevice.current, (0,)  # CUDA_VISIBLE_DEVICES names the receiving worker's own GPU first


class _Memory:
    """Memory of a Buffer that came back up, from the device's current pool if it has one."""

    def __init__(self, copies: DriverCopies, nbytes: int, waste: deque[int]) -> None:
        self._copies, self._waste, self.nbytes, self.pointer = copies, waste, nbytes, 0
        if nbytes:
            ways = ("cuMemAllocAsync", nbytes, copies.up_stream) if copies.has_pools else ("cuMemAlloc", nbytes)
            with copies.context():
                self.pointer = int(copies.call(*ways))

    def __del__(self) -> None:
        if not self.pointer:
            return
        if on_event_loop():
            self._waste.append(self.pointer)
        else:
            _free(self._copies, self.pointer)


def _free(copies: Any, pointer: int) -> None:  # DriverCopies: others free nothing here
    try:
        with copies.context():
            # users' kernels run on other streams than that of the allocation
            copies.synchronize()
            if copies.has_pools:
                copies.call("cuMemFreeAsync", pointer, copies.up_stream)
            else:
                copies.call("cuMemFree", pointer)
    except SpillError:  # the process ends, and the driver has ended before
        return


class CoreBuffers(Kind):
    """Buffers of cuda.core in device memory; a Buffer that came back up has ``memory_resource`` None."""

    def __init__(self, device: Any) -> None:
        super().__init__(device)
        copies = device.copies
        if not isinstance(copies, DriverCopies):
            raise SpillError(
                "Buffers of cuda.core cannot move without cuda.bindings; install cuda-core[cu12] or [cu13]"
            )
        self._copies = copies

    def extent_of(self, array: Any) -> tuple[int, int]:
        return int(array.handle), int(array.size)

    def view_of(self, array: Any) -> BytesView:
        return BytesView("cuda", int(array.size))

    def allocate(self, nbytes: int) -> tuple[_Memory, int, int]:
        """Allocate on the stream of the copies to the device."""
        device = self.device
        memory = with_room(device, nbytes, lambda: _Memory(self._copies, nbytes, device.waste), device.give_back)
        return memory, memory.pointer, int(self._copies.up_stream)

    def array_of(self, memory: _Memory, view: BytesView) -> Any:
        """Return a Buffer that keeps the memory alive."""
        from cuda.core import Buffer

        return Buffer.from_handle(memory.pointer, view.nbytes, owner=memory)

    def used_bytes(self) -> int:
        """Return the bytes in use of the device's current memory pool: cuda.core allocates from it by default."""
        copies = self._copies
        if not copies.has_pools:
            return 0
        attribute = copies.driver.CUmemPool_attribute.CU_MEMPOOL_ATTR_USED_MEM_CURRENT
        with copies.context():
            pool = copies.call("cuDeviceGetMemPool", copies.handle)
            return int(copies.call("cuMemPoolGetAttribute", pool, attribute))

    def give_back(self) -> bool:
        """Wait for frees on other streams, then return False: the driver itself takes the memory from its pools."""
        self._copies.synchronize()
        return False


_KINDS = {
    "cuda": CoreBuffers,
    "cupy": CupyArrays,
    "torch": Tensors,
    "numba": NumbaArrays,
    "rmm": RmmBuffers,
    "jax": JaxArrays,
}


@functools.cache
def _made(number: int) -> CudaDevice:
    return CudaDevice(number, _copies(number))


def _copies(number: int) -> Copies:
    why, may_pass = [], False
    for make in (DriverCopies, CupyCopies, TorchCopies):
        try:
            return make(number)
        except MemoryError:  # later the device may have some
            raise
        # CuPy does not install cuda.bindings, nor does torch before 2.10; without a driver each has an error of its own
        except Exception as e:
            why.append(f"{type(e).__name__}: {e}")
            may_pass |= isinstance(e, SpillError)  # the driver's
    return NoCopies("; ".join(why), may_pass)


def device_of(x: Any) -> Device | None:
    """Return the device of an array; None for an object that is no device array."""
    kind: type = type(x)
    library = library_of(kind)
    if library == "device":
        device: Device = x.__hpcgpu_device__
        return device
    if not is_device_array(x):
        return None
    # arrays of other libraries do not name it: they are on the current device, which is the worker's own
    number = {"cupy": "device.id", "cuda": "device_id", "torch": "device.index"}.get(library)
    return CudaDevice.current(operator.attrgetter(number)(x) if number else 0)


def is_device_array(x: Any) -> bool:
    """Tell whether an object lies in device memory, and the store moves it, or counts it."""
    kind: type = type(x)
    library = library_of(kind)
    if not library:
        return False  # nearly all
    if library == "cudf":
        return not spills_itself()
    if library == "cuda":
        return bool(x.size) and not x.is_mapped and not x.is_host_accessible  # in device memory of this process
    if library == "torch":
        return bool(x.is_cuda)
    if library == "jax":
        return not x.is_deleted() and any(device.platform != "cpu" for device in x.devices())
    return library != "other" or is_on_device(x)


def is_immovable(array: Any) -> bool:
    """Tell whether an array cannot be made again from bytes; then a peer gets it as its library pickles it."""
    kind: type = type(array)
    if always_moves(kind):
        return False
    try:
        CudaDevice.current(0).kind(library_of(kind)).view_of(array)
    except ImmovableError:
        return True
    return False


def always_moves(kind: type) -> bool:
    """Tell whether no array of a class is, or becomes, immovable."""
    return library_of(kind) not in ("torch", "other", "jax")


def is_left_to_cudf(x: Any) -> bool:
    """Tell whether cuDF itself spills an object."""
    return is_cudf(x) and spills_itself()

"""A simulated GPU: its memory, its streams' order, and the arrays on it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from hpcgpu.model.allocation import DEFAULT_BYTES
from hpcgpu.sim.array import COUNTER_BYTES, NUMBERS, Blocks, SimArray, buffer_of, bytes_of, host_of, map_usage, root_of
from hpcgpu.sim.array import read_usage_bytes as read_usage_bytes

# Freed memory up to this fraction (1/4) is kept for reuse.
_KEPT = 4
_current: SimGpu | None = None
_choosing = threading.Lock()


class OutOfMemoryError(MemoryError):
    """An allocation beyond the device's size, as CuPy's ``cupy.cuda.memory.OutOfMemoryError``."""


class Allocation:
    """One buffer of the device; arrays that are views of each other share one."""

    __slots__ = ("__weakref__", "gpu", "nbytes")

    def __init__(self, gpu: SimGpu, nbytes: int) -> None:
        self.gpu, self.nbytes = gpu, nbytes

    def __del__(self) -> None:
        self.gpu._free(self.nbytes)


class View(NamedTuple):
    """The layout of an array in its buffer."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]
    offset: int


class SimGpu:
    """A simulated GPU.

    Parameters
    ----------
    memory_bytes, uuid, pci : int, str, str
        Its size and its names.
    usage_file : path, optional
        The file in which other processes find its use of the host's memory
        (``hpcgpu.sim.read_usage_bytes``): used bytes, and freed memory that is kept to be used again.

    Attributes
    ----------
    used_bytes, peak_bytes : int
        Memory that arrays hold now, and the most that they held.
    h2d_copies, d2h_copies, h2d_bytes, d2h_bytes : int
        Copies from and to the host.
    on_alloc_failure : callable or None
        Called with the wanted bytes before an allocation is refused; if it returns True, the allocation is tried again.

    """

    def __init__(
        self,
        memory_bytes: int,
        *,
        uuid: str = "GPU-SIM-0",
        pci: str = "ffff:00:00.0",
        usage_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.memory_bytes, self.uuid, self.pci = memory_bytes, uuid, pci
        self.peak_bytes = self.h2d_copies = self.d2h_copies = self.h2d_bytes = self.d2h_bytes = 0
        self.on_alloc_failure: Callable[[int], bool] | None = None
        self._used = 0
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()
        self._allocations = weakref.WeakValueDictionary[int, Allocation]()
        self._blocks = Blocks(memory_bytes // _KEPT, lambda: self._free(0))
        self._usage = None if usage_file is None else map_usage(usage_file)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"simulated GPU {self.uuid}"

    @property
    def used_bytes(self) -> int:
        """Bytes of all live buffers."""
        self._settle()
        return self._used

    def asarray(self, x: Any) -> SimArray:  # whatever numpy takes
        """Copy an array from the host to the device; return an array of this device as it is.

        Raises
        ------
        OutOfMemoryError
            The device has no room.

        """
        if isinstance(x, SimArray) and buffer_of(x).gpu is self:
            return x
        host = x.get() if isinstance(x, SimArray) else np.asarray(x)
        _check(host.dtype)
        device = self.empty_as(np.empty_like(host, subok=False))
        np.copyto(host_of(device), host)
        self._count("h2d", host.nbytes)
        return device

    def empty_as(self, like: np.ndarray) -> SimArray:
        """Return an array with undefined contents, of a contiguous array's dtype, shape and strides."""
        memory, allocation = self._memory(like.nbytes)
        return SimArray(np.ndarray(like.shape, like.dtype, memory, 0, like.strides), allocation)

    def empty(self, shape: int | tuple[int, ...], dtype: Any = np.float64) -> SimArray:
        """Return an array with undefined contents."""
        like = np.empty(shape, dtype)
        _check(like.dtype)
        return self.empty_as(like)

    def adopt(self, result: np.ndarray) -> SimArray:
        """Make a device array of a computation's result, without a copy."""
        return SimArray(result, self.allocation_of(result))

    def allocation_of(self, result: np.ndarray) -> Allocation:
        """Return the buffer of an array's memory; a new one is counted."""
        root = root_of(result)
        allocation = self._allocations.get(id(root))
        if allocation is None:
            _check(root.dtype)
            allocation = self._register(root, self._allocate(root.nbytes))
        return allocation

    def buffer_of(self, array: SimArray) -> tuple[int, int]:
        """Return an id of the array's buffer, valid while it lives, and the buffer's bytes."""
        buffer = buffer_of(array)
        return id(buffer), buffer.nbytes

    def synchronize(self) -> None:
        """Do nothing: the work of a simulated GPU is done when its call returns."""

    def give_back(self, *, if_short: bool = False) -> bool:
        """Free the memory that is kept for reuse; return False, since it counts as free in any case."""
        if not if_short:
            self._blocks.shrink(0)
        return False

    def pack(self, groups: Sequence[Sequence[SimArray]], empty: Any = None) -> list[tuple[np.ndarray, list[View]]]:
        """Copy the one buffer of each group of arrays to the host, once, with each array's layout in it."""
        packed = []
        for arrays in groups:
            root = root_of(host_of(arrays[0]))
            start, hosts = _address(root), map(host_of, arrays)
            views = [View(a.shape, a.dtype.str, a.strides, _address(a) - start if a.size else 0) for a in hosts]
            copy = empty(root.nbytes) if empty else np.empty(root.nbytes, np.uint8)
            np.copyto(copy, bytes_of(root))
            self._count("d2h", root.nbytes)
            packed.append((copy, views))
        return packed

    def unpack(self, root: np.ndarray, views: Sequence[View]) -> list[SimArray]:
        """Copy a packed buffer to the device, once; return its arrays."""
        device, allocation = self._memory(root.nbytes)
        np.copyto(device, root)
        self._count("h2d", root.nbytes)
        return [SimArray(np.ndarray(v.shape, v.dtype, device, v.offset, v.strides), allocation) for v in views]

    def to_host(self, host: np.ndarray, order: Literal["C", "F", "A"] = "C") -> np.ndarray:
        """Copy an array's data to the host."""
        self._count("d2h", host.nbytes)
        return host.copy(order)

    def _memory(self, nbytes: int) -> tuple[np.ndarray, Allocation]:
        """Return memory of a new buffer, uint8 of shape (nbytes,), not cleared."""
        memory = self._blocks.take(nbytes)  # first: a block that is kept need not go to make room for this one
        return memory, self._register(memory, self._allocate(nbytes))

    def _allocate(self, nbytes: int) -> Allocation:
        while True:
            with self._lock:
                self._settle_locked()
                used = self._used
                if used + nbytes <= self.memory_bytes:
                    self._used += nbytes
                    self.peak_bytes = max(self.peak_bytes, self._used)
                    self._publish()
                    allocation = Allocation(self, nbytes)
                    break
            if self.on_alloc_failure is None or not self.on_alloc_failure(nbytes):
                raise OutOfMemoryError(
                    f"Out of memory allocating {nbytes:,} bytes (allocated so far: {used:,} bytes, limit set to: "
                    f"{self.memory_bytes:,} bytes) on the {self.name}"
                )
            # there is room, unless another thread has taken it
        self._blocks.shrink(self.memory_bytes - used - nbytes)
        return allocation

    def _register(self, root: np.ndarray, allocation: Allocation) -> Allocation:
        # No lock: an array drops its allocation before its memory, so an id leaves the dict before it is used again.
        self._allocations[id(root)] = allocation
        return allocation

    def _free(self, nbytes: int) -> None:
        self._freed.append(nbytes)
        self._settle()

    def _settle(self) -> None:
        # It never waits: the garbage collector may free an array while this thread holds the lock. The thread that
        # holds the lock looks here again after it has released it.
        while self._freed and self._lock.acquire(blocking=False):
            try:
                self._settle_locked()
            finally:
                self._lock.release()

    def _settle_locked(self) -> None:
        while self._freed:
            self._used -= self._freed.popleft()
        self._publish()

    def _publish(self) -> None:
        if self._usage is not None:
            self._usage[:] = (self._used + self._blocks.nbytes).to_bytes(COUNTER_BYTES, "little")

    def _count(self, way: str, nbytes: int) -> None:
        if nbytes:  # not for dask, which infers types by calls with empty arrays
            with self._lock:
                setattr(self, f"{way}_copies", getattr(self, f"{way}_copies") + 1)
                setattr(self, f"{way}_bytes", getattr(self, f"{way}_bytes") + nbytes)
            self._settle()

    def __repr__(self) -> str:
        return f"SimGpu({self.uuid}, used {self.used_bytes:,} of {self.memory_bytes:,} bytes)"

    def __reduce__(self) -> tuple[Callable[[], SimGpu], tuple[()]]:
        """Unpickle as the GPU of the other process: a GPU does not travel."""
        return current_gpu, ()

    def __dask_tokenize__(self) -> tuple[str, str]:
        return "SimGpu", self.uuid


def _check(dtype: np.dtype) -> None:
    if dtype.char not in NUMBERS:
        raise ValueError(f"Unsupported dtype {dtype}: a GPU holds numbers only")


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def current_gpu() -> SimGpu:
    """Return this process's simulated GPU; a process without one, such as a client, gets one of 256 MiB."""
    global _current  # noqa: PLW0603 - as a CUDA device, it is one per process
    with _choosing:
        if _current is None:
            _current = SimGpu(DEFAULT_BYTES, uuid="GPU-SIM-client")
        return _current


def set_current_gpu(gpu: SimGpu) -> None:
    """Make this GPU the process's own."""
    global _current  # noqa: PLW0603
    _current = gpu


def asarray(x: Any) -> SimArray:  # whatever numpy takes
    """Copy to the simulated GPU of the calling process: ``x.map_blocks(hpcgpu.sim.asarray)``."""
    return current_gpu().asarray(x)


class RandomState:
    """Random numbers made on the device, for ``da.random.RandomState(seed, RandomState=hpcgpu.sim.RandomState)``."""

    def __init__(self, seed: Any = None) -> None:  # as numpy's
        self._numpy = np.random.RandomState(seed)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        draw = getattr(self._numpy, name)

        def on_device(*args: Any, **kwargs: Any) -> Any:
            drawn = draw(*args, **kwargs)
            return current_gpu().adopt(drawn) if isinstance(drawn, np.ndarray) else drawn

        return on_device

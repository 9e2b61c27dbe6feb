"""The interface of a GPU to the store, and of the libraries whose arrays lie on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from hpcgpu.errors import SpillError


class ImmovableError(Exception):
    """A value cannot be pickled, or an array cannot be copied down; ``kind`` names its type.

    Devices and :mod:`hpcgpu.spill.values` raise it in the thread that copies; Executor does not try again.
    """

    def __init__(self, value: object, why: Exception) -> None:
        super().__init__(repr(why))
        self.kind = f"{type(value).__module__}.{type(value).__qualname__}"


class Device(Protocol):
    """The interface of a GPU to the store; simulated GPUs and CUDA devices look alike to it.

    Thread-safe: readers, the spill thread and threads that allocate call it at the same time, never under the store's
    lock. Any call may take as long as a copy, and may raise what the device's library raises.

    Attributes
    ----------
    memory_bytes : int
        Of the whole device.
    on_alloc_failure : callable or None
        The device calls it in the thread that allocates, with the missing bytes; if true, it tries again.

    """

    memory_bytes: int
    on_alloc_failure: Callable[[int], bool] | None

    @property
    def used_bytes(self) -> int:
        """Bytes that arrays hold."""

    def buffer_of(self, array: Any) -> tuple[int, int]:
        """Return an id of the array's buffer, valid while it lives, and the buffer's bytes; views share both."""

    def synchronize(self) -> None:
        """Wait for all work that the device has got so far, on all streams."""

    def give_back(self, *, if_short: bool = False) -> bool:
        """Free the memory that libraries keep to use it again, and return whether there was any.

        ``if_short``: only if the driver has little left.
        """

    def pack(self, arrays: Sequence[Any], empty: Callable[[int], np.ndarray]) -> tuple[np.ndarray, list[Any]]:
        """Copy the buffer that the arrays share to the host, once.

        Parameters
        ----------
        arrays : sequence
            At least one, all of one buffer, of any shapes, strides and dtypes.
        empty : callable
            Takes a number of bytes; returns host memory, an array of shape (bytes,) and dtype uint8. A device that
            needs a kind of memory of its own does not use it.

        Returns
        -------
        ndarray of shape (nbytes,) and dtype uint8
            The buffer; the copy is finished.
        list
            The layout of each array in it; can be pickled.

        Raises
        ------
        ImmovableError
            It can never be copied.

        """

    def pack_each(
        self, groups: Sequence[Sequence[Any]], empty: Callable[[int], np.ndarray]
    ) -> list[tuple[np.ndarray, list[Any]]]:
        """Copy several small buffers to the host, with as few waits for the device as possible."""

    def unpack(self, root: np.ndarray, views: Sequence[Any]) -> list[Any]:
        """Copy a packed buffer to the device, once, and return its arrays.

        Raises
        ------
        MemoryError
            There is no room, even after ``on_alloc_failure``.

        """


class Copies(Protocol):
    """Copies between a device and host memory; a copy is finished when its call returns.

    Thread-safe. Host memory is an array of shape (nbytes,) and dtype uint8.

    Attributes
    ----------
    memory_bytes : int
        Of the whole device.

    """

    memory_bytes: int

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that the driver can give."""

    @property
    def idle_bytes(self) -> int:
        """Page-locked host memory that waits for the next copy."""

    def trim(self) -> int:
        """Give that memory back to the system; return its bytes."""

    def synchronize(self) -> None:
        """Wait for all work that the device has got so far, on all streams."""

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return a copy of device memory, made after all work that the device has got so far."""

    def to_host_each(self, extents: Sequence[tuple[int, int]], empty: Callable[[int], np.ndarray]) -> list[np.ndarray]:
        """Return copies of several allocations, by address and bytes."""

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> None:
        """Copy to device memory that was allocated on the stream ``after``, once that stream has come so far."""


class Kind(Protocol):
    """The arrays of one library on one device.

    Only the device calls it, in any thread, in several at once. If a library does not allow that, its class here must
    prevent it.
    """

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and bytes of the array's allocation."""

    def view_of(self, array: Any) -> Any:
        """Return the layout of the array in its allocation; it can be pickled."""

    def allocate(self, device: Gpu, nbytes: int) -> tuple[Any, int, int]:
        """Return new device memory, its address, and the stream of the allocation."""

    def array_of(self, memory: Any, view: Any) -> Any:
        """Return an array in allocated memory."""

    def used_bytes(self, device: Gpu) -> int:
        """Return the bytes that the library's arrays hold."""

    def give_back(self) -> bool:
        """Free the memory that the library keeps, so that others can use it; return whether there was any."""


class Gpu(Device, Protocol):
    """A CUDA device, as the adapters for libraries see it; thread-safe, as :class:`Device`.

    ``number`` is as CUDA counts in this process; ``reserve_bytes`` are for those that allocate by the driver; ``waste``
    are addresses of memory that the spill thread is to free.
    """

    number: int
    waste: deque[int]
    reserve_bytes: int

    @property
    def copies(self) -> Copies:
        """Makes the copies of all libraries."""

    def kind(self, name: str) -> Kind:
        """Return the adapter for the arrays of a library."""


class NoCopies:
    """Stands in where no library can copy: cuda.bindings is there without a driver, or nothing is.

    Objects that show device memory count, and stay. Thread-safe: it does not change.
    """

    # Nobody knows. So each object is above the limit, is tried at once, and is named.
    memory_bytes = free_bytes = 1
    idle_bytes = 0

    def __init__(self, why: str, may_pass: bool = False) -> None:
        self._why, self.may_pass = why, may_pass

    def trim(self) -> int:
        """Return 0: there is no pool."""
        return 0

    def synchronize(self) -> None:
        """Do nothing: nothing comes up, so that no copy is kept."""

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> NoReturn:
        """Raise SpillError."""
        del pointer, nbytes, empty
        raise SpillError(f"nothing here can copy device memory: {self._why}")

    def to_host_each(self, extents: Sequence[tuple[int, int]], empty: Callable[[int], np.ndarray]) -> NoReturn:
        """Raise SpillError."""
        self.to_host(*extents[0], empty)

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> NoReturn:
        """Raise SpillError."""
        del root, after
        self.to_host(pointer, 0, np.empty)

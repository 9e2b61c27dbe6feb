"""The interfaces of a GPU to the store, and of the libraries whose arrays lie on it.

Together: an adapter implements the three of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


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

    def pack(
        self, groups: Sequence[Sequence[Any]], empty: Callable[[int], np.ndarray]
    ) -> list[tuple[np.ndarray, list[Any]]]:
        """Copy buffers to the host, each once, with as few waits for the device as possible.

        Parameters
        ----------
        groups : sequence
            For each buffer at least one array, all of that buffer, of any shapes, strides and dtypes.
        empty : callable
            Takes a number of bytes; returns host memory, an array of shape (bytes,) and dtype uint8. A device that
            needs a kind of memory of its own does not use it.

        Returns
        -------
        list
            For each buffer its bytes, an array of shape (nbytes,) and dtype uint8, and the layouts of the arrays in it,
            which can be pickled. The copies are finished.

        Raises
        ------
        ImmovableError
            One of them can never be copied.

        """

    def unpack(self, root: np.ndarray, views: Sequence[Any]) -> list[Any]:
        """Copy a packed buffer to the device, once, and return its arrays.

        Raises
        ------
        MemoryError
            There is no room, even after ``on_alloc_failure``.

        """


class Copies:
    """Copies between a device and host memory; a copy is finished when its call returns.

    Thread-safe. Host memory is an array of shape (nbytes,) and dtype uint8. A subclass either overrides all methods, or
    copies ordinary host memory, which is not kept, by ``_copy_down`` and ``_copy_up``: each copy waits for the device.
    """

    memory_bytes: int  # of the whole device
    _copy_down: Callable[[np.ndarray, int], None]
    _copy_up: Callable[[np.ndarray, int], None]

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that the driver can give."""
        raise NotImplementedError

    @property
    def idle_bytes(self) -> int:
        """Page-locked host memory that waits for the next copy."""
        return 0

    def trim(self, nbytes: float = math.inf) -> int:
        """Give ``nbytes`` of that memory, or all that there is, back to the system; return its bytes."""
        return 0

    def synchronize(self) -> None:
        """Wait for all work that the device has got so far, on all streams."""
        raise NotImplementedError

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return a copy of device memory, made after all work that the device has got so far."""
        root = empty(nbytes)
        self.synchronize()  # a copy waits for no kernel on a non-blocking stream
        if nbytes:
            self._copy_down(root, pointer)
        return root

    def to_host_each(self, extents: Sequence[tuple[int, int]], empty: Callable[[int], np.ndarray]) -> list[np.ndarray]:
        """Return copies of several allocations, by address and bytes."""
        return [self.to_host(*extent, empty) for extent in extents]

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> None:
        """Copy to device memory that was allocated on the stream ``after``, once that stream has come so far."""
        self.synchronize()
        self._copy_up(root, pointer)
        self.synchronize()  # CUDA may return before a copy from ordinary memory is complete


class Kind:
    """The arrays of one library on one device, which calls it in any thread, in several at once."""

    def __init__(self, device: Any) -> None:  # a CudaDevice
        self.device = device

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and bytes of the array's allocation."""
        raise NotImplementedError

    def view_of(self, array: Any) -> Any:
        """Return the layout of the array in its allocation; it can be pickled."""
        raise NotImplementedError

    def allocate(self, nbytes: int) -> tuple[Any, int, int]:
        """Return new device memory, its address, and the stream of the allocation."""
        raise NotImplementedError

    def array_of(self, memory: Any, view: Any) -> Any:
        """Return an array in allocated memory."""
        raise NotImplementedError

    def used_bytes(self) -> int:
        """Return the bytes that the library's arrays hold; 0 if it does not count, or another library counts them."""
        return 0

    def give_back(self) -> bool:
        """Free the memory that the library keeps, so that others can use it; return whether there was any."""
        return False

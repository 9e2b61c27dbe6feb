"""What the store needs of a GPU, and a GPU of the libraries whose arrays lie on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np


class Device(Protocol):
    """What the store needs of a GPU; a simulated one and a CUDA device look alike to it.

    Thread-safe: readers, the spill thread and threads that allocate call it at the same time, never under the store's
    lock. Any call may take as long as a copy, and raise what the device's library raises.

    Attributes
    ----------
    memory_bytes : int
        Of the whole device.
    on_alloc_failure : callable or None
        Called by the device, in the thread that allocates, with the bytes that it lacks; true: it may try again.

    """

    memory_bytes: int
    on_alloc_failure: Callable[[int], bool] | None

    @property
    def used_bytes(self) -> int:
        """Bytes that arrays hold."""

    def buffer_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return an id of the array's buffer, valid while it lives, and the buffer's bytes; views share both."""

    def pack(self, arrays: Sequence[Any], empty: Callable[[int], np.ndarray]) -> tuple[np.ndarray, list[Any]]:
        """Copy the buffer that the arrays share to the host, once.

        Parameters
        ----------
        arrays : sequence
            Of one buffer, one at least, of any shapes, strides and dtypes.
        empty : callable
            Gives room in host memory: of bytes, an array of shape (bytes,) and dtype uint8. A device that needs memory
            of a kind of its own does not use it.

        Returns
        -------
        ndarray of shape (nbytes,) and dtype uint8
            The buffer; the copy is finished.
        list
            For each array how it lies there; can be pickled.

        Raises
        ------
        ImmovableError
            It can never be copied.

        """

    def pack_each(
        self, groups: Sequence[Sequence[Any]], empty: Callable[[int], np.ndarray]
    ) -> list[tuple[np.ndarray, list[Any]]]:
        """Copy several small buffers to the host, and wait for the device as seldom as can be."""

    def unpack(self, root: np.ndarray, views: Sequence[Any]) -> list[Any]:
        """Copy a packed buffer to the device, once, and return its arrays, as they were.

        Raises
        ------
        MemoryError
            There is no room, though ``on_alloc_failure`` was asked.

        """


class Copies(Protocol):
    """Copies between a device and host memory, finished when they return.

    Thread-safe. Host memory is an array of shape (nbytes,) and dtype uint8.

    Attributes
    ----------
    memory_bytes : int
        Of the whole device.

    """

    memory_bytes: int

    @property
    def idle_bytes(self) -> int:
        """Page-locked host memory that waits for the next copy."""

    def trim(self) -> int:
        """Give that memory back to the system; return how much."""

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return a copy of device memory, after all work that the device has been given."""

    def to_host_each(self, extents: Sequence[tuple[int, int]], empty: Callable[[int], np.ndarray]) -> list[np.ndarray]:
        """Return copies of several, by address and bytes."""

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> None:
        """Copy to device memory that was allocated on the stream ``after``, when that has come so far."""


class Kind(Protocol):
    """The arrays of one library on one device.

    Called by the device alone, in any thread, in several at once: what a library does not allow there is for its class
    here to prevent.
    """

    def extent_of(self, array: Any) -> tuple[int, int]:  # noqa: ANN401
        """Return address and bytes of the array's allocation."""

    def view_of(self, array: Any) -> Any:  # noqa: ANN401
        """Return how the array lies in its allocation; it can be pickled."""

    def allocate(self, device: Gpu, nbytes: int) -> tuple[Any, int, int]:
        """Return new device memory, its address and the stream on which it was allocated."""

    def array_of(self, memory: Any, view: Any) -> Any:  # noqa: ANN401
        """Return an array in memory that was allocated."""

    def used_bytes(self, device: Gpu) -> int:
        """Return the bytes that the library's arrays hold."""

    def give_back(self) -> None:
        """Give back to the device what the library keeps to be used again."""


class Gpu(Device, Protocol):
    """A CUDA device, as the classes of the libraries see it; thread-safe, as :class:`Device`.

    Attributes
    ----------
    number : int
        Of the device, as CUDA counts in this process.
    copies : Copies
        All libraries' copies go through it.

    """

    number: int
    copies: Copies

    def kind(self, name: str) -> Kind:
        """Return the arrays of a library."""

    def give_back(self) -> None:
        """Give back what each library keeps to be used again."""

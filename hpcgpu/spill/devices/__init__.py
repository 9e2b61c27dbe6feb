"""Device memory: of simulated GPUs, and of CUDA's libraries. Arrays are identified and copied here.

Here is the interface of a GPU to the store, and of the libraries whose arrays lie on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np

from hpcgpu.errors import SpillError


class ImmovableError(Exception):
    """A value cannot be pickled, or an array cannot be copied down; ``kind`` names its type. It is final."""

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


class Kind:
    """The arrays of one library on one device, which calls it in any thread, in several at once."""

    def __init__(self, device: Gpu) -> None:
        del device

    def extent_of(self, array: Any) -> tuple[int, int]:
        """Return address and bytes of the array's allocation."""
        raise NotImplementedError

    def view_of(self, array: Any) -> Any:
        """Return the layout of the array in its allocation; it can be pickled."""
        raise NotImplementedError

    def allocate(self, device: Gpu, nbytes: int) -> tuple[Any, int, int]:
        """Return new device memory, its address, and the stream of the allocation."""
        raise NotImplementedError

    def array_of(self, memory: Any, view: Any) -> Any:
        """Return an array in allocated memory."""
        raise NotImplementedError

    def used_bytes(self, device: Gpu) -> int:
        """Return the bytes that the library's arrays hold; 0 if it does not count, or another library counts them."""
        del device
        return 0

    def give_back(self) -> bool:
        """Free the memory that the library keeps, so that others can use it; return whether there was any."""
        return False


class Gpu(Device, Protocol):
    """A CUDA device, as the adapters for libraries see it; thread-safe, as :class:`Device`."""

    number: int  # as CUDA counts in this process
    waste: deque[int]  # addresses of memory that the spill thread is to free
    reserve_bytes: int  # for libraries that allocate by the driver

    @property
    def copies(self) -> Copies:
        """Makes the copies of all libraries."""

    def kind(self, name: str) -> Kind:
        """Return the adapter for the arrays of a library."""


class PlainCopies:
    """Copies from and to ordinary host memory, one after the other: it keeps none."""

    idle_bytes = 0

    def trim(self) -> int:
        """Return 0: there is no pool."""
        return 0

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> np.ndarray:
        """Return a copy of device memory."""
        raise NotImplementedError

    def to_host_each(self, extents: Sequence[tuple[int, int]], empty: Callable[[int], np.ndarray]) -> list[np.ndarray]:
        """Return copies of several allocations."""
        return [self.to_host(*extent, empty) for extent in extents]


class NoCopies(PlainCopies):
    """Stands in if no library can copy: there is no driver, or no library. Objects on the device count, and stay."""

    # The size is unknown. So each object is above the limit, is tried at once, and is named.
    memory_bytes = free_bytes = 1

    def __init__(self, why: str, may_pass: bool = False) -> None:
        self._why, self.may_pass = why, may_pass

    def synchronize(self) -> None:
        """Do nothing: no array comes up, so that no copy is kept."""

    def to_host(self, pointer: int, nbytes: int, empty: Callable[[int], np.ndarray]) -> NoReturn:
        """Raise SpillError."""
        del pointer, nbytes, empty
        raise SpillError(f"device memory cannot be copied here: {self._why}")

    def to_device(self, root: np.ndarray, pointer: int, after: int) -> NoReturn:
        """Raise SpillError."""
        del root, after
        self.to_host(pointer, 0, np.empty)


# After these errors of the driver a process can do nothing more on its GPU (NVIDIA: "leaves the process in an
# inconsistent state", "the context cannot be used anymore"; cuda-bindings 13.5). The runtime has the same numbers.
_LASTING = frozenset({214, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810})
# The attribute with the number, by library.
_NUMBERS = {"hpcgpu": "status", "cupy_backends": "status", "torch": "error_code", "numba": "code"}


class DriverError(SpillError):
    """A call of the driver fails; ``status`` is CUDA's number for it."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


def is_lasting(error: BaseException | None) -> bool:
    """Tell whether an error of the driver, or of a library, means that this process can use its GPU no more."""
    number = _NUMBERS.get(type(error).__module__.partition(".")[0])
    return number is not None and getattr(error, number, 0) in _LASTING

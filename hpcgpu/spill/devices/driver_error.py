"""Errors of CUDA's driver, which pass or last, and the stand-in for copies where no library can make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np

from hpcgpu.errors import SpillError

# After these a process can do nothing more on its GPU (NVIDIA: "leaves the process in an inconsistent state", "the
# context cannot be used anymore"; cuda-bindings 13.5). The driver's numbers are the runtime's, too.
_LASTING = frozenset({214, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810})
# The attribute with that number, by library.
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

"""Errors of CUDA's driver: which pass, and which last."""

from __future__ import annotations

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

"""The device of an array: what carries ``__hpcgpu_device__`` says it itself, libraries of CUDA have adapters."""

from __future__ import annotations

import operator
from typing import Any

from hpcgpu.spill.devices import cudf
from hpcgpu.spill.devices.libraries import UNPROXIED, is_on_device, library_of
from hpcgpu.spill.devices.protocols import Device
from hpcgpu.spill.storage.pickled import ImmovableError


def device_of(x: Any) -> Device | None:  # noqa: ANN401
    """Return the device on which an object lives; None for what is no device array."""
    kind: type = type(x)
    library = library_of(kind)
    if library == "device":
        device: Device = x.__hpcgpu_device__
        return device
    if not is_device_array(x):
        return None
    from hpcgpu.spill.devices.cuda import CudaDevice

    # of the others none says it: they are on the current device, which is the worker's own
    number = {"cupy": "device.id", "cuda": "device_id", "torch": "device.index"}.get(library)
    return CudaDevice.current(operator.attrgetter(number)(x) if number else 0)


def is_device_array(x: Any) -> bool:  # noqa: ANN401
    """Tell whether an object lies in device memory, and is the store's to move, or to count."""
    kind: type = type(x)
    library = library_of(kind)
    if not library:
        return False  # nearly all
    if library == "cudf":
        return not cudf.spills_itself()
    if library == "cuda":
        return _is_movable(x)
    if library == "torch":
        return bool(x.is_cuda)
    return library != "other" or is_on_device(x)


def is_immovable(array: Any) -> bool:  # noqa: ANN401
    """Tell whether an array cannot be made again from bytes; a peer gets it as its library pickles it."""
    kind: type = type(array)
    library = library_of(kind)
    if library not in ("torch", "other"):
        return False
    from hpcgpu.spill.devices.cuda import CudaDevice

    try:
        CudaDevice.current(0).kind(library).view_of(array)
    except ImmovableError:
        return True
    return False


def always_moves(kind: type) -> bool:
    """Tell a class of whose arrays none is, or becomes, immovable."""
    return library_of(kind) not in ("torch", "other")


def is_unproxied(kind: type) -> bool:
    """Tell a class for whose objects compiled code takes no proxies: they come up with the value that they are in."""
    return library_of(kind) in UNPROXIED


def is_left_to_cudf(x: Any) -> bool:  # noqa: ANN401
    """Tell an object that cuDF itself spills."""
    return cudf.is_cudf(x) and cudf.spills_itself()


def _is_movable(buffer: Any) -> bool:  # noqa: ANN401
    """Tell whether a Buffer of cuda.core is in memory of a device, and of this process."""
    return bool(buffer.size) and not buffer.is_mapped and not buffer.is_host_accessible

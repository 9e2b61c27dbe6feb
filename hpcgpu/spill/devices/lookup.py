"""The device of an array, by its ``__hpcgpu_device__`` or by an adapter for its library."""

from __future__ import annotations

import operator
from typing import Any

from hpcgpu.spill.devices import Device, ImmovableError
from hpcgpu.spill.devices.libraries import UNPROXIED, is_on_device, library_of
from hpcgpu.spill.devices.rapids import is_cudf, spills_itself


def device_of(x: Any) -> Device | None:
    """Return the device of an array; None for an object that is no device array."""
    kind: type = type(x)
    library = library_of(kind)
    if library == "device":
        device: Device = x.__hpcgpu_device__
        return device
    if not is_device_array(x):
        return None
    from hpcgpu.spill.devices.cuda import CudaDevice

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
    return library != "other" or is_on_device(x)


def is_immovable(array: Any) -> bool:
    """Tell whether an array cannot be made again from bytes; then a peer gets it as its library pickles it."""
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
    """Tell whether no array of a class is, or becomes, immovable."""
    return library_of(kind) not in ("torch", "other")


def is_unproxied(kind: type) -> bool:
    """Tell whether compiled code takes no proxies for objects of a class: these come up together with their value."""
    return library_of(kind) in UNPROXIED


def is_left_to_cudf(x: Any) -> bool:
    """Tell whether cuDF itself spills an object."""
    return is_cudf(x) and spills_itself()

"""The CUDA driver in this process, by libcuda alone: its first device, and the devices on which it has a context."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any, NamedTuple

from hpcgpu.errors import LaunchError

_WITHOUT_MEANING = b"an unknown error"
# After these errors a process can do nothing more on its GPU (NVIDIA: "leaves the process in an inconsistent state",
# "the context cannot be used anymore"; cuda-bindings 13.5).
LASTING = frozenset({214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
_UNKNOWN = 999  # "an unknown internal error": lasting if a plain question gets it, too


class FirstDevice(NamedTuple):
    """Device 0 of this process, and what the process has opened beside it."""

    uuid: str  # GPU-…; of a MIG slice that of its GPU
    others: tuple[int, ...]  # numbers of other devices on which this process has a context


def first_device() -> FirstDevice | None:
    """Return device 0, without a context; None: this machine has no driver. LaunchError: the driver refuses."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, number, name = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
    _call(driver, "cuInit", 0)
    _call(driver, "cuDeviceGetCount", ctypes.byref(count))
    _call(driver, "cuDeviceGet", ctypes.byref(number), 0)
    _call(driver, "cuDeviceGetUuid", name, number)
    others = tuple(i for i in range(1, count.value) if _has_context(driver, i))
    return FirstDevice(f"GPU-{uuid.UUID(bytes=bytes(name))}", others)


def make_context() -> None:
    """Make the context of device 0 that all libraries share, and this thread's current one; or raise LaunchError."""
    driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    _call(driver, "cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    _call(driver, "cuCtxSetCurrent", context)


def lasting_error() -> str:
    """Ask the driver for free memory of device 0; return its error if this process can use the device no more, or "".

    Libraries raise errors without CUDA's number (RMM, cuDF), or of their own: the driver repeats a lasting one. The
    process makes no context for it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return ""
    flags, active, context, sizes = ctypes.c_uint(), ctypes.c_int(), ctypes.c_void_p(), (ctypes.c_size_t * 2)()
    code = driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
    if not code and active.value and not (code := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)):
        if not (code := driver.cuCtxPushCurrent_v2(context)):
            # "may also return error codes from previous, asynchronous launches" (driver API 13)
            code = driver.cuMemGetInfo_v2(ctypes.byref(sizes, 0), ctypes.byref(sizes, ctypes.sizeof(ctypes.c_size_t)))
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(0)
    return _name_of(driver, code) if code in LASTING or code == _UNKNOWN else ""


def _has_context(driver: Any, number: int) -> bool:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    _call(driver, "cuDevicePrimaryCtxGetState", number, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def _call(driver: Any, name: str, *arguments: object) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        raise LaunchError(f"the CUDA driver refuses this process: {name} returned {code} ({_name_of(driver, code)})")


def _name_of(driver: Any, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(text))
    return (text.value or _WITHOUT_MEANING).decode()

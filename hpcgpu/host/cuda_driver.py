"""The CUDA driver in this process, by libcuda alone: its first device, and the devices on which it has a context."""

from __future__ import annotations

import ctypes
import uuid
from typing import Any, NamedTuple

from hpcgpu.errors import LaunchError

_WITHOUT_MEANING = b"an unknown error"


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


def _has_context(driver: Any, number: int) -> bool:
    flags, active = ctypes.c_uint(), ctypes.c_int()
    _call(driver, "cuDevicePrimaryCtxGetState", number, ctypes.byref(flags), ctypes.byref(active))
    return bool(active.value)


def _call(driver: Any, name: str, *arguments: object) -> None:
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        meaning = (text.value or _WITHOUT_MEANING).decode()
        raise LaunchError(f"the CUDA driver refuses this process: {name} returned {code} ({meaning})")

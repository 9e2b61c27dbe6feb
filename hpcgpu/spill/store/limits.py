"""The options of a store, read like the configuration's."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hpcgpu.model.limit import NODE_MEMORY, Limit, read_device_limit, read_disk_limit, read_host_limit, read_part
from hpcgpu.model.plain import read_flag, read_option, read_text

_WHERE = "keyword {} of GpuSpillBuffer"


def read_limits(device: object, host: object, target: object, disk: object) -> tuple[Limit, int, int]:
    """Return the device's limit, the bytes of the host tier and those of the disk tier; 0: no limit.

    A store does not know how much of the node its process may use, nor how many processes share it: ``"auto"`` means no
    limit (distributed watches the process), and a fraction is an error.
    """
    limit = _read("device_memory_limit", device, read_device_limit)
    memory = _read("memory_limit", host, read_host_limit)
    host_bytes = memory.bytes_of(0, f"memory_limit={memory!r} (set by {_WHERE.format('memory_limit')})", NODE_MEMORY)
    part = _read("target", target, read_part)
    return (
        limit,
        max(int(host_bytes * part), 1) if host_bytes and part else 0,
        _read("max_spill", disk, read_disk_limit),
    )


def read_flags(**flags: object) -> tuple[bool, ...]:
    """Return the flags, in their order; None is off."""
    return tuple(_read(name, False if value is None else value, read_flag) for name, value in flags.items())


def read_folder(folder: str | os.PathLike[str] | None) -> str | None:
    """Return ``local_directory``; None if it is not given."""
    return None if folder is None else _read("local_directory", folder, read_text)


def _read(name: str, value: object, read: Callable[[Any], Any]) -> Any:
    return read_option(name, value, _WHERE.format(name), read)

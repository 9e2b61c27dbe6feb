"""The options of a store, read as the configuration reads them."""

from __future__ import annotations

import os

from hpcgpu.model.limit import NODE_MEMORY, Limit, read_device_limit, read_disk_limit, read_host_limit, read_part
from hpcgpu.model.plain import read_flag, read_option, read_text

_WHERE = "keyword {} of GpuSpillBuffer"


def read_limits(device: object, host: object, target: object, disk: object) -> tuple[Limit, int, int]:
    """Return the device's limit, the bytes of the host tier and those of the disk tier; 0 is no limit.

    A store does not know how much of the node its process may use, nor how many processes share it: ``"auto"`` is no
    limit (distributed watches the process), and a fraction is an error.
    """
    name = "memory_limit"
    limit = read_option("device_memory_limit", device, _WHERE.format("device_memory_limit"), read_device_limit)
    asked = read_option(name, host, _WHERE.format(name), read_host_limit)
    host_bytes = asked.bytes_of(0, f"{name}={asked!r} (set by {_WHERE.format(name)})", NODE_MEMORY)
    part = read_option("target", target, _WHERE.format("target"), read_part)
    room_bytes = max(int(host_bytes * part), 1) if host_bytes and part else 0
    return limit, room_bytes, read_option("max_spill", disk, _WHERE.format("max_spill"), read_disk_limit)


def read_flags(**given: object) -> tuple[bool, ...]:
    """Return the flags, in the given order; None is off."""
    said = {name: False if value is None else value for name, value in given.items()}
    return tuple(read_option(name, value, _WHERE.format(name), read_flag) for name, value in said.items())


def read_folder(given: str | os.PathLike[str] | None) -> str | None:
    """Return ``local_directory``; None if nothing is given."""
    name = "local_directory"
    return None if given is None else read_option(name, given, _WHERE.format(name), read_text)

"""What Dask's configuration says of a worker's memory, looked at before anything is started."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpcgpu.model.limit import read_disk_limit, read_part
from hpcgpu.model.plain import read_option

_SECTION = "distributed.worker.memory"
_READ: Mapping[str, Callable[[object], float]] = {
    **dict.fromkeys(("target", "spill", "pause", "terminate"), read_part),
    "max-spill": read_disk_limit,
}


def check() -> None:
    """Read the options that the store and the watch over a worker's process take.

    Raises
    ------
    ConfigError
        One of them is no limit.

    """
    import dask.config

    said = dask.config.get(_SECTION, None) or {}
    for name, read in _READ.items():
        read_option(f"{_SECTION}.{name}", said.get(name), "Dask's configuration", read)

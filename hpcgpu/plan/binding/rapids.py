"""The parts of RMM and cuDF that a worker sets up."""

from __future__ import annotations

from hpcgpu.errors import ConfigError
from hpcgpu.model import Settings
from hpcgpu.model.limit import GPU_MEMORY, Limit
from hpcgpu.model.settings import RMM
from hpcgpu.model.topology import Rapids
from hpcgpu.units import format_bytes

_ALIGNED_BYTES = 256  # of the sizes that RMM's pools take


def plan_rapids(settings: Settings, worker: str, device_memory_bytes: int) -> Rapids | None:
    """Plan a worker's RMM and cuDF, by its name and share of its GPU (0: unknown); ConfigError for a wrong size."""
    cite = settings.cite
    sizes = ("rmm_pool_size", "rmm_maximum_pool_size", "rmm_release_threshold")
    limits: list[Limit] = [getattr(settings, name) for name in sizes]
    nbytes = [limit.bytes_of(device_memory_bytes, cite(n), GPU_MEMORY) for n, limit in zip(sizes, limits, strict=True)]
    pool, most, threshold = (n // _ALIGNED_BYTES * _ALIGNED_BYTES if n else None for n in nbytes)
    if pool and not settings.rmm_managed_memory and 0 < device_memory_bytes < pool:
        raise ConfigError(f"{cite(sizes[0])}, but the worker's GPU has {format_bytes(device_memory_bytes)} for it")
    if pool and most and most < pool:
        raise ConfigError(f"{cite(sizes[1])} is less than {cite(sizes[0])}: {format_bytes(pool)} of the worker's GPU")
    layers: list[tuple[str, dict[str, int | str | None]]] = []
    if settings.rmm_async:
        layers.append(("CudaAsyncMemoryResource", {"initial_pool_size": pool, "release_threshold": threshold}))
        layers += [("LimitingResourceAdaptor", {"allocation_limit": most})] if most else []
    else:
        layers.append(("ManagedMemoryResource" if settings.rmm_managed_memory else "CudaMemoryResource", {}))
        layers += [("PoolMemoryResource", {"initial_pool_size": pool, "maximum_pool_size": most})] if pool else []
    if settings.rmm_log_directory:
        path = f"{settings.rmm_log_directory.rstrip('/')}/rmm_log_{worker}.txt"  # dask-cuda's name for it
        layers.append(("LoggingResourceAdaptor", {"log_file_name": path}))
    if settings.rmm_track_allocations:
        layers.append(("TrackingResourceAdaptor", {}))
    rmm_settings = [cite(name) for name in RMM if getattr(settings, name)]
    needs = [("rmm", rmm_settings[0])] if rmm_settings else []
    needs += [(name, cite("rmm_allocator_external_lib_list")) for name in settings.rmm_libraries]
    needs += [("cudf", cite("enable_cudf_spill"))] if settings.enable_cudf_spill else []
    layers_given = [(name, tuple((k, v) for k, v in arguments.items() if v is not None)) for name, arguments in layers]
    resources = () if layers_given == [("CudaMemoryResource", ())] else tuple(layers_given)  # RMM's own choice
    return Rapids(resources, settings.rmm_libraries, tuple(needs)) if needs else None


def cudf_env(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return the variables that cuDF reads at its import (options.py, 26.10); other workers import nothing."""
    if not settings.enable_cudf_spill:
        return ()
    return ("CUDF_SPILL", "on"), ("CUDF_SPILL_STATS", str(settings.cudf_spill_stats))

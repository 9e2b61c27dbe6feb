"""Imports and settings of a process before it is forked into scheduler, nannies and workers."""

from __future__ import annotations

import importlib

import dask
from distributed.versions import get_versions

import hpcgpu.deploy.processes.nanny
import hpcgpu.deploy.processes.scheduler
import hpcgpu.deploy.processes.worker  # noqa: F401
from hpcgpu.deploy.processes.stalls import limit_handshakes
from hpcgpu.deploy.settings import check_dask_memory


def prepare_forks(*, simulated: bool) -> None:
    """Prepare a process for its forks, scheduler, workers and nannies; raise ConfigError for Dask's memory limits."""
    if simulated:
        import hpcgpu.sim  # noqa: F401
    for module in dask.config.get("distributed.worker.http.routes"):
        if module.startswith("distributed."):  # others are the user's: a worker imports them, and reports errors
            importlib.import_module(module)
    # Else each worker takes 30 CPU ms more at its start (distributed 2026.8.0): it reads the versions of nine packages,
    # runs uname -p, and imports the routes of an HTTP server.
    get_versions()
    limit_handshakes()
    check_dask_memory()

"""Preload a fork server: imports and look-ups that each forked process would repeat."""

from __future__ import annotations

import importlib

import dask
import tornado.platform.asyncio  # noqa: F401 - asyncio's loop as tornado takes it, which all of them run
from distributed.versions import get_versions

from hpcgpu.deploy.processes.stalls import limit_handshakes
from hpcgpu.deploy.settings import check_dask_memory

_ROUTES = "distributed.worker.http.routes"


def prepare(*, simulated: bool) -> None:
    """Prepare a process for its forks, scheduler, workers and nannies; raise ConfigError for Dask's memory limits.

    Without it each worker takes 30 CPU ms more at its start (distributed 2026.8.0): it reads the versions of nine
    packages, runs ``uname -p``, and imports the routes of an HTTP server.
    """
    import hpcgpu.deploy.processes.nanny
    import hpcgpu.deploy.processes.scheduler
    import hpcgpu.deploy.processes.worker  # noqa: F401

    if simulated:
        import hpcgpu.sim.dask  # noqa: F401
    for module in dask.config.get(_ROUTES):
        if module.startswith("distributed."):  # others are the user's: a worker imports them, and reports errors
            importlib.import_module(module)
    get_versions()
    limit_handshakes()
    check_dask_memory()

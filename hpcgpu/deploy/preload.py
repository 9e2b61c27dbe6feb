"""The former name of ``hpcgpu.deploy.dask_preload``, for command lines that have it."""

from __future__ import annotations

import logging

from distributed import Worker

from hpcgpu.deploy import dask_preload


async def dask_setup(worker: Worker) -> None:
    """Do the same, and log the present name; called by distributed when the worker starts."""
    logging.getLogger("distributed.worker").warning("write --preload hpcgpu.deploy.dask_preload")
    await dask_preload.dask_setup(worker)

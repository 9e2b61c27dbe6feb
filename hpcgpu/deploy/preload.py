"""The former name of :mod:`hpcgpu.deploy.dask_preload`, for command lines that have it."""

from hpcgpu.deploy.dask_preload import dask_setup as dask_setup

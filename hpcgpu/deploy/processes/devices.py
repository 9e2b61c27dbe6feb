"""The GPU of one worker, simulated or real: opened in the worker's process, measured from outside it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

from hpcgpu.model import WorkerSpec


def usage_file(spec: WorkerSpec) -> Path:
    """Return where a simulated GPU publishes its used bytes, for the nanny's memory monitor."""
    return Path(spec.local_directory) / f"{spec.name}.device"


def usage_reader(spec: WorkerSpec) -> Callable[[], int]:
    """Return a function that says how many bytes of the worker's host memory are simulated device memory."""
    if not spec.simulated:
        return lambda: 0
    from hpcgpu.sim import read_usage_bytes

    return functools.partial(read_usage_bytes, usage_file(spec))


def preload(simulated: bool) -> None:
    """Import, in the image from which workers are forked, what opening a device will need.

    dask.array alone takes 0.1 CPU s, which each worker would pay.
    """
    if simulated:
        import hpcgpu.sim.dask  # noqa: F401


def open_device(spec: WorkerSpec) -> None:
    """Make the worker's GPU the current one of this process; called once, after binding."""
    if not spec.simulated:
        # CUDA_VISIBLE_DEVICES names it first: it is device 0, opened by whoever uses it first
        from hpcgpu.deploy.processes import rmm

        if spec.rapids is not None:
            rmm.set_up(spec.rapids)
        else:
            rmm.when_imported()
        return
    from hpcgpu import sim
    from hpcgpu.sim.dask import register

    register()
    gpu = spec.binding.gpus[0]
    sim.set_current_gpu(
        sim.SimGpu(spec.device_memory_bytes, uuid=gpu.uuid, pci=gpu.pci, usage_file=os.fspath(usage_file(spec)))
    )

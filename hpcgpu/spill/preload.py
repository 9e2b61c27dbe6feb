"""``dask worker --preload hpcgpu.spill.preload``: moves of the spill store, off the event loop of any worker.

The worker itself must have the store. The command line of ``dask worker`` cannot give it one; a class can::

    # spilling.py, where the workers' Python finds it
    from distributed import Worker
    from hpcgpu.spill import GpuSpillBuffer

    class SpillingWorker(Worker):
        def __init__(self, *args, **kwargs):
            store = (GpuSpillBuffer, {"device_memory_limit": 0.8, "memory_limit": "8GB"})
            super().__init__(*args, data=store, **kwargs)

    $ dask worker SCHEDULER --worker-class spilling.SpillingWorker --preload hpcgpu.spill.preload

``hpcgpu.GPUWorker`` is a worker class that is bound to a GPU of the node, too. It needs no preload.
"""

from __future__ import annotations

import logging
from pathlib import Path

from distributed import Worker

from hpcgpu import supervise
from hpcgpu.host import path_writers
from hpcgpu.spill.distributed.plugin import SpillPlugin
from hpcgpu.spill.store.buffer import GpuSpillBuffer

logger = logging.getLogger("distributed.worker.memory")


async def dask_setup(worker: Worker) -> None:
    """Install the plugin that moves data in tasks' threads; called by distributed before the worker registers.

    Without it a :class:`hpcgpu.spill.GpuSpillBuffer` brings values up where they are read. A task's arguments are read
    on the event loop: the worker does not answer meanwhile.
    """
    if intruder := await supervise.to_thread(path_writers.changed_by, Path(worker.local_directory)):
        logger.warning(
            "the scratch folder of worker %s is not safe, %s: %s, and so run code as you. Give 'dask worker' a "
            "--local-directory below a folder that is yours alone",
            worker.name,
            worker.local_directory,
            intruder,
        )
    if not isinstance(worker.data, GpuSpillBuffer):
        logger.warning(
            "hpcgpu.spill.preload changes nothing: worker %s has a %s for its data. Give it the spill store: "
            "Worker(..., data=(hpcgpu.spill.GpuSpillBuffer, {'device_memory_limit': 0.8, 'memory_limit': '8GB'})), "
            "for 'dask worker' in a class named by --worker-class (see help('hpcgpu.spill.preload'))",
            worker.name,
            type(worker.data).__name__,
        )
    elif SpillPlugin.name not in worker.plugins:
        await worker.plugin_add(plugin=SpillPlugin(), catch_errors=False)

"""A preload of a script's clients: its import, before they connect, prepares the process for its connections."""

import os

from hpcgpu.deploy.network import protocols

protocols.prepare(os.environ["DASK_SCHEDULER_ADDRESS"])

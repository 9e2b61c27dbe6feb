"""A preload of a script's clients: its import, before they connect, prepares the process for its connections."""

import os

from hpcgpu.deploy import network
from hpcgpu.host import host_memory

host_memory.allow(os.getppid())  # of the script: the leader, from which the workers of its node descend
network.prepare(os.environ["DASK_SCHEDULER_ADDRESS"])

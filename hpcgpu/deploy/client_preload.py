"""A preload of a script's clients: its import, before they connect, prepares the process for its connections."""

import os

from hpcgpu.deploy.network import protocols
from hpcgpu.host import peer_memory

peer_memory.allow(os.getppid())  # of the script: the leader, from which the workers of its node descend
protocols.prepare(os.environ["DASK_SCHEDULER_ADDRESS"])

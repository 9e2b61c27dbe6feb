"""A preload of a script's clients: its import, before they connect, prepares the process for its connections."""

import os

from hpcgpu.deploy import network
from hpcgpu.host import peer_memory
from hpcgpu.model.allocation import SCRIPT_LEADER

peer_memory.allow(int(os.environ[SCRIPT_LEADER]))  # from which the workers of its node descend
network.prepare(os.environ["DASK_SCHEDULER_ADDRESS"])

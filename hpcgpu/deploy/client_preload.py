"""A preload of a script's clients: it prepares the process for the cluster's connections.

The import itself does. distributed imports a client's preloads before the client connects, and calls their
``dask_setup`` after it (2026.8.0, client.py).
"""

import os

from hpcgpu.deploy.network import protocols

protocols.prepare(os.environ["DASK_SCHEDULER_ADDRESS"])

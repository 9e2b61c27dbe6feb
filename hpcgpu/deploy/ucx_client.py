"""A preload of a script's clients if the cluster speaks UCX, for :mod:`hpcgpu.deploy.network.ucx`.

The import itself prepares the process. distributed imports a client's preloads before the client connects, and calls
their ``dask_setup`` after it (2026.8.0, client.py).
"""

from hpcgpu.deploy.network import protocols

protocols.prepare("ucx:")

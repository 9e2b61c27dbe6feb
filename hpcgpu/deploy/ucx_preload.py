"""What a script's clients preload where the cluster speaks UCX: :mod:`hpcgpu.deploy.network.ucx`.

To be imported is all that it does: distributed imports a client's preloads before it connects, and calls their
``dask_setup`` after it (2026.8.0, client.py).
"""

from hpcgpu.deploy.network import protocols

protocols.prepare("ucx:")

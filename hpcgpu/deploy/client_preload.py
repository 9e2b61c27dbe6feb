"""A preload of a script's clients: its import, before they connect, prepares the process for its connections."""

import os

from distributed import Client

from hpcgpu.deploy import network
from hpcgpu.deploy.network.scheduler_file import TlsSocket
from hpcgpu.host import peer_memory
from hpcgpu.model.allocation import SCRIPT_LEADER

peer_memory.allow(int(os.environ[SCRIPT_LEADER]))  # from which the workers of its node descend
network.prepare(os.environ["DASK_SCHEDULER_ADDRESS"])


def dask_setup(client: Client) -> None:
    """Let no connection that breaks break the client's others; ``Client`` calls it before it connects."""
    if context := client.connection_args.get("ssl_context"):
        context.sslsocket_class = TlsSocket

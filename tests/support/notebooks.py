"""The notebook of the browser's test, and of the pictures in the documentation."""

from __future__ import annotations

CLUSTER, WORK, MEMORY, BINDINGS, REFUSED, FRAMES, EXPLAIN, END = range(8)
CHUNKS = 104  # of 8 MiB: more than fits on two devices of 128 MiB, and than stays in host memory
CELLS = (
    """
from distributed import Client, wait
from hpcgpu import LocalGPUCluster

cluster = LocalGPUCluster(gpus="sim:2x128MiB", memory_limit="400MB")
client = Client(cluster)
cluster""",
    """
import numpy as np
from hpcgpu import sim

futures = client.map(lambda i: sim.asarray(np.full(8 << 20, i, "u1")), range(104))
len(wait(futures).done)""",
    "cluster.memory()",
    "cluster.bindings()",
    "LocalGPUCluster(gpu=2)",
    "import traceback; traceback.print_last()",
    "cluster.explain()",
    "client.close(); cluster.close()",
)


def cells() -> list[str]:
    return [cell.strip() for cell in CELLS]

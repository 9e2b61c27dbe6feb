"""The plugin of a worker that hpcgpu has planned: the store's, with the worker's spec and copies within the node."""

from __future__ import annotations

from distributed import Worker

from hpcgpu.deploy.network.node_copies import this_process
from hpcgpu.model import WorkerSpec
from hpcgpu.spill.distributed.plugin import SpillPlugin
from hpcgpu.spill.storage.disk import is_pinned


class NodePlugin(SpillPlugin):
    """Connects the store, and gives its memory to large values of the node's other workers."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.copy_obstacle = this_process.obstacle  # why large values of this node come by the connection

    def setup(self, worker: Worker) -> None:
        """Connect the store; called by distributed when the worker starts."""
        super().setup(worker)
        this_process.allocate, this_process.is_page_locked = worker.data.disk.slabs.empty, is_pinned

"""The same cluster on this machine, without a batch system."""

from __future__ import annotations

from typing import Any

from hpcgpu.config import entry_points
from hpcgpu.config.migration import read_local_cuda
from hpcgpu.deploy import settings
from hpcgpu.deploy.cluster import ClusterRun
from hpcgpu.deploy.cluster.cluster import GPUCluster
from hpcgpu.errors import ConfigError


class LocalGPUCluster(GPUCluster):
    """One bound, spilling worker per GPU of this machine, or per simulated GPU (``gpus="sim:4"``).

    Takes every keyword of dask-cuda's LocalCUDACluster, or names what to use in its place.

    Examples
    --------
    >>> from hpcgpu import LocalGPUCluster
    >>> from distributed import Client
    >>> with LocalGPUCluster(gpus="sim:2") as cluster, Client(cluster) as client:
    ...     client.submit(sum, [1, 2]).result()
    3

    """

    entry_point = entry_points.LOCAL
    waits_in_queue = False

    def _prepare(self, keywords: dict[str, Any]) -> ClusterRun:
        ours, environ = read_local_cuda(keywords)
        where = f"keyword {{name}} of {type(self).__name__}"
        try:
            user = settings.read(ours, where, entry_point=self.entry_point)
            return ClusterRun(user, self.patience, environ=environ)
        except ConfigError as e:
            if "n_workers" not in keywords:
                raise
            raise ConfigError(str(e).replace("gpus_per_node", "n_workers")) from None

    def scale(self, n: int | None = None, jobs: int | None = None) -> Any:
        """Refuse: there are no more GPUs."""
        raise ConfigError(
            "a local cluster cannot be scaled: it has only the GPUs of this machine. Start another one with gpus= or "
            "gpus_per_node=; clusters of a batch system grow and shrink (shape='elastic')"
        )

    def adapt(self, *_: Any, **__: Any) -> Any:
        """Refuse: see :meth:`scale`."""
        self.scale()

"""The same cluster on this machine, without a batch system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcgpu.config.foreign import read_local_cuda
from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.clusters.cluster import GPUCluster
from hpcgpu.deploy.jobs.job import Job
from hpcgpu.deploy.jobs.local import LocalJob
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.start import local_launch, preload
from hpcgpu.errors import ConfigError
from hpcgpu.model import RunDocument


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

    waits_in_queue = False

    def _read(self, given: dict[str, Any]) -> Wanted:
        ours, self._environ = read_local_cuda(given)
        wanted = wanted_settings.read(ours, f"keyword {{name}} of {type(self).__name__}")
        # a file of the user's may say them for jobs; who gives them here expects what cannot be
        for name, only in (("nodes", 1), ("shape", "gang"), ("scheduler", "job")):
            if given.get(name) is not None and getattr(wanted.settings, name) != only:
                raise ConfigError(
                    f"{wanted.settings.said(name)}: this cluster is the GPUs of one machine; leave it out, or take a "
                    "class of a batch system"
                )
        return wanted

    def _make_job(self, run: RunDocument, folder: Path) -> Job:
        logs = Path(run.settings.log_directory or folder)
        environ = {**wanted_settings.dask_environ(), **self._environ}
        return LocalJob(local_launch(run), environ, logs, preload(run.settings))

    def scale(self, n: int | None = None, jobs: int | None = None) -> Any:  # noqa: ANN401
        """Refuse: there are no more GPUs."""
        raise ConfigError(
            "this cluster has the GPUs of this machine, and no more than those: start another with gpus= or "
            "gpus_per_node=; clusters of a batch system grow and shrink (shape='elastic')"
        )

    def adapt(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Refuse: see :meth:`scale`."""
        self.scale()

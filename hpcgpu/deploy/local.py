"""The same cluster on this machine, without a batch system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcgpu.config.foreign import read_local_cuda
from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.cluster import GPUCluster
from hpcgpu.deploy.job import Job, LocalJob
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.start import local_argv, preload
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

    def _read(self, given: dict[str, Any]) -> Wanted:
        ours, self._environ = read_local_cuda(given)
        return wanted_settings.read(ours, f"keyword {{name}} of {type(self).__name__}")

    def _make_job(self, run: RunDocument, folder: Path) -> Job:
        logs = Path(run.settings.log_directory or folder)
        logs.mkdir(parents=True, exist_ok=True)
        return LocalJob(local_argv(run), self._environ, logs, preload(run.settings))

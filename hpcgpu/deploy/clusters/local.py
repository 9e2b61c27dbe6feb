"""The same cluster on this machine, without a batch system."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcgpu.config import doors
from hpcgpu.config.migration import read_local_cuda
from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.clusters.cluster import GPUCluster
from hpcgpu.deploy.jobs.job import Job
from hpcgpu.deploy.jobs.local import LocalJob
from hpcgpu.deploy.network import contact as contacts
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.start import local_launch, preload
from hpcgpu.errors import ConfigError
from hpcgpu.host import remover
from hpcgpu.model import RunDocument
from hpcgpu.spill.storage.scratch import Scratch


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

    door = doors.LOCAL
    waits_in_queue = False

    def _read(self, given: dict[str, Any]) -> Wanted:
        ours, self._environ = read_local_cuda(given)
        return wanted_settings.read(ours, f"keyword {{name}} of {type(self).__name__}", door=self.door)

    _scratch: Scratch | None = None

    def _make_job(self, run: RunDocument, folder: Path) -> Job:
        environ = {**wanted_settings.dask_environ(), **self._environ}
        settings = run.settings
        return LocalJob(local_launch(run), environ, folder, settings.log_directory, preload(settings))

    def _make_folder(self) -> Path:
        """Make it among temporary files: the kernel frees its lock when this process ends, and then it is removed."""
        wanted = self.settings
        self._scratch = Scratch.make(wanted.local_directory, "client", trusted=wanted.trust_local_directory)
        remover.start(str(self._scratch.lock_path))
        return contacts.make_folder(self._scratch.path)

    async def _end_job(self) -> None:
        await super()._end_job()
        if self._scratch:
            self._scratch.remove()
            self._scratch = None

    def scale(self, n: int | None = None, jobs: int | None = None) -> Any:  # noqa: ANN401
        """Refuse: there are no more GPUs."""
        raise ConfigError(
            "this cluster has the GPUs of this machine, and no more than those: start another with gpus= or "
            "gpus_per_node=; clusters of a batch system grow and shrink (shape='elastic')"
        )

    def adapt(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        """Refuse: see :meth:`scale`."""
        self.scale()

"""The same cluster on this machine, without a batch system."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcgpu.config import entry_points
from hpcgpu.config.migration import read_local_cuda
from hpcgpu.deploy import settings as wanted_settings
from hpcgpu.deploy.cluster.cluster import GPUCluster
from hpcgpu.deploy.cluster.run import Run, SchedulerView
from hpcgpu.deploy.jobs.local import LocalRanks
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.settings import Wanted
from hpcgpu.deploy.start import ld_preload, local_launch
from hpcgpu.errors import ConfigError
from hpcgpu.host import remover
from hpcgpu.model import RunDocument
from hpcgpu.spill.storage.scratch import Scratch
from hpcgpu.supervise import tasks


class LocalRun(Run):
    """The processes of a cluster on this machine, and their folder among temporary files.

    ``environ`` is added to the processes' environment.
    """

    def __init__(self, wanted: Wanted, environ: Mapping[str, str]) -> None:
        super().__init__(wanted)
        self._environ = environ
        self._scratch: Scratch | None = None

    def explain(self) -> str:
        """Return the settings with where each was set, and the command."""
        return f"{wanted_settings.explain(self.settings)}\n{self.script}"

    def make_folder(self) -> Path:
        """Make it among temporary files: the kernel frees its lock when this process ends, and then it is removed."""
        settings = self.settings
        self._scratch = Scratch.make(settings.local_directory, "client", trusted=settings.trust_local_directory)
        remover.start(str(self._scratch.lock_path))
        return scheduler_file.make_folder(self._scratch.path)

    async def start(self, folder: Path, view: SchedulerView) -> None:
        """Start the processes; raise LaunchError if that fails."""
        del view
        self._ranks = ranks = await asyncio.to_thread(self._make_ranks, folder)  # it searches launchers and libraries
        self.script = ranks.script
        await ranks.start()

    def _make_ranks(self, folder: Path) -> LocalRanks:
        settings = self.settings
        run = RunDocument(settings=settings, shape="gang", folder=str(folder))
        environ = {**wanted_settings.dask_environ(), **self._environ}
        return LocalRanks(local_launch(run), environ, folder, settings.log_directory, ld_preload(settings))

    def check_detachable(self) -> None:
        """Raise ConfigError: the processes die with this one."""
        raise ConfigError("the processes of a local cluster die with this one: it cannot be detached")

    async def ended(self) -> None:
        """Remove the folder."""
        if self._scratch:
            await tasks.to_thread(self._scratch.remove)
            self._scratch = None


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

    def _prepare(self, keywords: dict[str, Any]) -> LocalRun:
        ours, environ = read_local_cuda(keywords)
        where = f"keyword {{name}} of {type(self).__name__}"
        try:
            return LocalRun(wanted_settings.read(ours, where, entry_point=self.entry_point), environ)
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

"""The cluster classes of the batch systems."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hpcgpu.deploy.cluster import GPUCluster
from hpcgpu.deploy.job import BatchJob, Job
from hpcgpu.deploy.submit import plan_job
from hpcgpu.model import RunDocument


class BatchGPUCluster(GPUCluster):
    """A cluster that is one job of a batch system."""

    batch: ClassVar[str]

    def _make_job(self, run: RunDocument, folder: Path) -> Job:
        return BatchJob(*plan_job(run, self._wanted.site, self.batch), self._log)


class SLURMGPUCluster(BatchGPUCluster):
    """A scheduler and one bound, spilling worker per GPU, in one Slurm job.

    Examples
    --------
    >>> from hpcgpu import SLURMGPUCluster
    >>> from distributed import Client
    >>> with SLURMGPUCluster(nodes=2, gpus_per_node=4, walltime="01:00:00") as cluster, Client(cluster) as client:
    ...     client.submit(sum, [1, 2]).result()
    3

    """

    batch = "slurm"


class PBSGPUCluster(BatchGPUCluster):
    """A scheduler and one bound, spilling worker per GPU, in one job of OpenPBS or PBS Professional.

    Takes the options of :class:`SLURMGPUCluster`.
    """

    batch = "pbs"

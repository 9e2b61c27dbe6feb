"""The cluster classes of the batch systems."""

from __future__ import annotations

from hpcgpu.deploy.clusters.elastic import ElasticCluster


class SLURMGPUCluster(ElasticCluster):
    """A scheduler and one bound, spilling worker per GPU, in one Slurm job.

    With ``shape="elastic"`` more one-node jobs come and go: :meth:`scale`, :meth:`adapt`.

    Examples
    --------
    >>> from hpcgpu import SLURMGPUCluster
    >>> from distributed import Client
    >>> with SLURMGPUCluster(nodes=2, gpus_per_node=4, walltime="01:00:00") as cluster, Client(cluster) as client:
    ...     client.submit(sum, [1, 2]).result()
    3

    """

    batch = "slurm"


class PBSGPUCluster(ElasticCluster):
    """A scheduler and one bound, spilling worker per GPU, in one job of OpenPBS or PBS Professional.

    Takes the options of :class:`SLURMGPUCluster`.
    """

    batch = "pbs"

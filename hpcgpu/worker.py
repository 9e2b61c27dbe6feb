"""``python -m hpcgpu.worker SCHEDULER``: the command line of ``dask worker``, for the GPUs of this node.

``dask_jobqueue.SLURMCluster(worker_command="hpcgpu.worker", ...)`` starts it in each job.
"""

from hpcgpu.cli import join

if __name__ == "__main__":
    join()

"""Jobs that a real Slurm takes or refuses, and can never run: an error at once, with the keyword to change."""

from __future__ import annotations

import re

from lab import Lab

CODE = """
from hpcgpu import HpcGpuError, SLURMGPUCluster
ELASTIC = {"gpus": "sim:1", "shape": "elastic", "scheduler": "here"}
for options in ({"gpus": "sim:1", "nodes": 5}, {"gpus_per_node": 5}, {"gpus": "sim:1", "queue": "low", "nodes": 3}):
    try:
        SLURMGPUCluster(**options)
    except HpcGpuError as e:
        print(type(e).__name__, str(e).replace(chr(10), " "))
with SLURMGPUCluster(**ELASTIC, queue="low", walltime="2h") as cluster:
    cluster.scale(jobs=3)
    try:
        cluster.wait_for_workers(3)
    except HpcGpuError as e:
        print(type(e).__name__, str(e).replace(chr(10), " "))
"""


def test_jobs_that_can_never_run_are_errors_with_the_keyword(slurm_lab: Lab) -> None:
    limits = ["scontrol", "update", "partitionname=low"]
    slurm_lab.root(*limits, "MaxTime=90", "MaxNodes=2")
    try:
        done = slurm_lab.python(CODE)
    finally:
        slurm_lab.root(*limits, "MaxTime=UNLIMITED", "MaxNodes=UNLIMITED")
    more, refused, limited, long = done.stdout.splitlines()
    assert more.startswith("JobError job ")
    # PartitionNodeLimit, or PartitionConfig when Slurm has looked at it once (22.05.8); of the time limit likewise
    assert re.search(r"will not start: PENDING \(Partition\w+: nodes=5, but queue main has 4\)", more)
    assert refused.startswith("SubmitError sbatch refused the job: ")
    assert refused.endswith("gpus_per_node=5, but the nodes of queue main have 4 at most")
    assert "nodes=3, but queue low gives a job 2 at most" in limited
    assert long.startswith("JobError 3 jobs in a row ended before their first worker; the last was job ")
    assert "PENDING, Partition" in long
    assert ": walltime=02:00:00, but queue low has a limit of 01:30:00" in long

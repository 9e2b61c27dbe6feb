"""Advise which keyword to change in a job that waits for more than its limits or the cluster allow."""

from __future__ import annotations

import re

# Reasons and comments of jobs that wait for ever unless they or the cluster change (Slurm 22.05.8: main.c, and tests;
# OpenPBS: tests/data/batch/pbs). The reasons for nodes that are down are different.
_ADVICE = (
    (r"PartitionNodeLimit|M(ax|in)Nodes?PerJob", "fewer nodes="),
    (r"PartitionTimeLimit|MaxWallDurationPerJob|resource: walltime", "a shorter walltime="),
    (r"MaxGRESPerJob|resource: (ngpus|gpus)", "fewer gpus_per_node="),
    (r"MaxCpuPerJob|resource: ncpus", "fewer cores_per_gpu="),
    (r"MaxMem\w*PerJob|resource: mem", "less memory="),
    (r"PartitionConfig|BadConstraints|Can Never Run", "less"),
    (r"AccountNotAllowed|InvalidAccount", "another account="),
    (r"Q[oO][sS]NotAllowed|InvalidQOS", "another --qos in job_extra_directives="),
)
_ELSEWHERE = ", or another queue="


def advice(reason: str) -> str:
    """Return what to ask for instead if a job's reason for waiting will not pass; "" for other reasons."""
    found = next((text for pattern, text in _ADVICE if re.search(pattern, reason)), "")
    return f"{found}{_ELSEWHERE}" if found else ""

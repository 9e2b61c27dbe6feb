"""From settings to a request: what is asked for, and what nobody can ask for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcgpu.errors import ConfigError
from hpcgpu.model import JobSpec, Settings
from hpcgpu.plan.jobs.request import plan_request

ARGV = ("hpcgpu", "launch")


def test_what_the_user_said_is_asked_for() -> None:
    settings = Settings(
        nodes=2,
        gpus_per_node=4,
        cores_per_gpu=8,
        memory_bytes=1 << 30,
        walltime_s=600,
        queue="gpu",
        account="proj",
        job_name="svd",
        job_script_prologue=("module load cuda",),
        job_extra_directives=("-C a100",),
        job_directives_skip=("--mem",),
        log_directory="/logs",
        env={"A": "b"},
    )
    assert plan_request(settings, ARGV) == JobSpec(
        name="svd",
        argv=ARGV,
        nodes=2,
        tasks_per_node=4,
        cpus_per_task=8,
        gpus_per_node=4,
        memory_per_node_bytes=1 << 30,
        warn_s=120,
        walltime_s=600,
        queue="gpu",
        account="proj",
        prologue=("module load cuda",),
        extra_directives=("-C a100",),
        skipped_directives=("--mem",),
        log_directory="/logs",
    )


CPU_WORKERS = Settings(gpus_per_node=4, cores_per_gpu=8, cpu_workers=3, nthreads=2)


@pytest.mark.parametrize(
    ("settings", "tasks", "cores", "gpus"),
    [
        (CPU_WORKERS, 4, 8 + 2, 4),  # six cores more, over four tasks
        (replace(CPU_WORKERS, ranks="node"), 1, 32 + 6, 4),
        (replace(CPU_WORKERS, cores_per_gpu=None), 4, None, 4),
        (Settings(gpus_per_node=4, cores_per_gpu=8, ranks="node"), 1, 32, 4),
        (Settings(gpus="sim:3x1MiB", nodes=2, cores_per_gpu=1), 3, 1, 0),
        (Settings(gpus_per_node=1), 1, None, 1),
    ],
)
def test_request_of_a_node(settings: Settings, tasks: int, cores: int | None, gpus: int) -> None:
    spec = plan_request(settings, ARGV)
    assert (spec.tasks_per_node, spec.cpus_per_task, spec.gpus_per_node) == (tasks, cores, gpus)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Settings(), "the number of GPUs of each node"),
        (Settings(nodes=0, gpus_per_node=1), "nodes=0, set by default; allowed: 1 or more"),
        (Settings(gpus_per_node=1, memory_bytes=0, sources={"memory": "--memory"}), "memory=0, set by --memory"),
        (Settings(gpus_per_node=1, walltime_s=-1), "walltime=-1"),
        (Settings(gpus_per_node=1, cores_per_gpu=0), "cores_per_gpu=0"),
        (Settings(gpus="sim:2", gpus_per_node=3), "makes 2 on each node"),
        (Settings(gpus="cuda:2"), "'cuda:2'"),
        (Settings(gpus_per_node=1, job_name=""), "needs a name"),
    ],
)
def test_what_cannot_be_is_said(settings: Settings, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan_request(settings, ARGV)

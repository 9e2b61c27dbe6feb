"""``hpcgpu worker`` under other names: ``python -m hpcgpu.worker SCHEDULER``, and ``dask gpu-worker SCHEDULER``.

``dask_jobqueue.SLURMCluster(worker_command="hpcgpu.worker", ...)`` starts it in each job.
"""

from __future__ import annotations

import click

from hpcgpu.cli import join


@click.command(
    "gpu-worker",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
    short_help="Join a Dask scheduler with this node's GPUs (hpcgpu worker).",
)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def gpu_worker(argv: tuple[str, ...]) -> None:
    """Run ``hpcgpu worker`` below Dask's own command, which shows errors of other packages as tracebacks."""
    join("dask gpu-worker", argv)


if __name__ == "__main__":
    join()

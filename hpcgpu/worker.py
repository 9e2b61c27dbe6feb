"""``hpcgpu worker`` as ``python -m hpcgpu.worker`` and ``dask gpu-worker``; the commands of ``dask gpu``.

``dask_jobqueue.SLURMCluster(worker_command="hpcgpu.worker", ...)`` starts it in each job.
"""

from __future__ import annotations

from functools import partial

import click

from hpcgpu.cli import join

_JOIN = "Join a Dask scheduler with this node's GPUs (hpcgpu worker)."


def _below_dask(name: str, about: str) -> click.Command:
    """Return a command for Dask's, which shows errors of other packages as tracebacks; ours are one message."""
    raw = {"ignore_unknown_options": True, "help_option_names": []}
    argv = click.Argument(["argv"], nargs=-1, type=click.UNPROCESSED)
    run = partial(join, f"dask {name}")
    return click.Command(name.rsplit(maxsplit=1)[-1], raw, run, [argv], short_help=about)


gpu_worker = _below_dask("gpu-worker", _JOIN)
_CONFIG = _below_dask("gpu config", "Show how a cluster's workers are bound.")
gpu = click.Group("gpu", [_below_dask("gpu worker", _JOIN), _CONFIG], short_help="Workers of hpcgpu on GPUs.")


if __name__ == "__main__":
    join()

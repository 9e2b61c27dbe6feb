"""What Dask's own worker takes is taken or answered."""

from __future__ import annotations

from hpcgpu.cli.worker import worker as worker_command
from hpcgpu.config.migration import DASK_CUDA, DASK_WORKER


def test_every_option_of_dask_worker_is_taken_or_answered() -> None:
    from distributed.cli.dask_worker import main

    theirs = {p.name: p for p in main.params}
    ours = {o for p in worker_command.params for o in (*p.opts, *p.secondary_opts)}
    missing = [n for n, p in theirs.items() if not set(p.opts) & ours and n not in {**DASK_WORKER, **DASK_CUDA}]
    assert missing == ["version"]
    for name in DASK_WORKER:
        assert name in theirs

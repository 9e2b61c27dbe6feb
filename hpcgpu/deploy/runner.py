"""A cluster inside a script that the launcher starts itself: ``srun -n 9 python script.py``.

Each rank imports this, so nothing here imports distributed.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any, Self

from hpcgpu.config import entry_points
from hpcgpu.deploy.settings import read
from hpcgpu.deploy.start import agent_argv, ld_preload
from hpcgpu.errors import LaunchError
from hpcgpu.host import private, process
from hpcgpu.model import RunDocument
from hpcgpu.model.allocation import SCRIPT_ADDRESS, SCRIPT_DASHBOARD


class GPURunner:
    """The cluster of the ranks that run this script: rank 0 has the scheduler, the others the workers.

    Every rank runs the script down to here, and here becomes the rank program; rank 0 then starts the same script
    once more, as its child, in which this object is the way to the cluster. So what stands above runs once in each
    rank and once in the script, what stands below once. The cluster ends with the script. Without a launcher it is
    one on this machine.

    Parameters
    ----------
    **keywords
        The options.

    Raises
    ------
    ConfigError
        An option is wrong.
    LaunchError
        This is no script that could be started once more, or MPI has been started in it.

    Examples
    --------
    In script.py, for ``srun -n 9 --overcommit python script.py`` or ``python script.py``:

    >>> from distributed import Client
    >>> from hpcgpu import GPURunner
    >>> with GPURunner(gpus="sim:2") as runner, Client(runner) as client:  # doctest: +SKIP
    ...     print(client.submit(sum, [1, 2]).result())

    """

    __doc__ = entry_points.documented(__doc__ or "", without=entry_points.unused(entry_points.RUNNER))
    __signature__ = inspect.Signature(entry_points.parameters(entry_points.unused(entry_points.RUNNER)))

    def __init__(self, **keywords: Any) -> None:
        if SCRIPT_ADDRESS not in os.environ:
            _become_rank(keywords)
        from distributed.core import Status  # 0.4 CPU s, which ranks do without
        from distributed.security import Security

        self.scheduler_address = os.environ[SCRIPT_ADDRESS]
        self.security = Security()  # from the variables that the rank has set for its script
        self.status = Status.running

    @property
    def dashboard_link(self) -> str:
        """The dashboard's address on this node's loopback; it holds a secret. Empty where there is no dashboard."""
        path = os.environ.get(SCRIPT_DASHBOARD)
        return private.read(Path(path)).strip() if path and self.status.name == "running" else ""

    def close(self) -> None:
        """Let no more clients connect; the cluster ends with the script."""
        from distributed.core import Status

        self.status = Status.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"GPURunner({self.scheduler_address if self.status.name == 'running' else 'closed'})"


def _become_rank(keywords: dict[str, Any]) -> None:
    settings = read(keywords, "keyword {name} of GPURunner", entry_point=entry_points.RUNNER).settings
    script = tuple(sys.orig_argv[1:])
    if sys.argv[0] in ("", "-") or "ipykernel" in sys.modules:
        raise LaunchError(
            "GPURunner starts its script once more, but this is no script (a notebook, a prompt, standard input): "
            "use LocalGPUCluster, SLURMGPUCluster or PBSGPUCluster"
        )
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        raise LaunchError(
            "MPI has been started in this process (by 'from mpi4py import MPI' above GPURunner), and cannot be started "
            "twice: import it below GPURunner, or start the script by 'hpcgpu run'"
        )
    run = RunDocument(settings=settings, script=script)
    process.execute(agent_argv(run), {**os.environ, **process.rank_env(os.environ, ld_preload(settings))})

"""srun: the command line, and the types of ``srun --mpi=list``. Tested on Slurm 22.05.8."""

from __future__ import annotations

import re

from hpcgpu.model.layout import World

LIST = ("srun", "--mpi=list")


def command(argv: tuple[str, ...], world: World, mpi_type: str) -> tuple[str, ...]:
    """Return the srun that starts the ranks in this allocation, rank 0 on its first node."""
    # --overcommit allows the scheduler's rank in addition to one rank for each task of the job (refused otherwise:
    # "More processors requested than permitted"). With --kill-on-bad-exit=0 the other ranks survive the death of a
    # rank; with --no-kill they survive the loss of a node if the job was submitted with --no-kill, too (without
    # it Slurm ends the step of such a job). Nothing is bound: workers bind themselves.
    # The job's own --ntasks-per-node, without the scheduler's rank, would cause a warning at the head of each log:
    # "can't honor --ntasks-per-node set to 4 which doesn't match the requested tasks 5". On several nodes it is a lower
    # bound, and Slurm does not warn.
    here = (f"--ntasks-per-node={world.size}",) if world.nodes == 1 else ()
    return (
        "srun",
        f"--nodes={world.nodes}",
        f"--ntasks={world.size}",
        *here,
        "--overcommit",
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",
        "--no-kill",
        f"--mpi={mpi_type}",
        *argv,
    )


def read_mpi_types(text: str) -> tuple[str, ...]:
    """Parse ``srun --mpi=list`` into the types that this Slurm supports, such as ``pmix`` and ``pmi2``."""
    words = re.findall(r"^(?:srun: )?\s*(?:MPI plugin types are\.\.\.)?\s*([\w-]+)\s*$", text, re.M)
    return tuple(dict.fromkeys(words))

"""srun: the command line, and what ``srun --mpi=list`` says. Tried on Slurm 22.05.8."""

from __future__ import annotations

import re

from hpcgpu.model import Command
from hpcgpu.model.world import World

LIST = Command(("srun", "--mpi=list"), timeout_s=20.0)


def command(argv: tuple[str, ...], world: World, mpi_type: str) -> tuple[str, ...]:
    """Return the srun that starts the ranks in this allocation, rank 0 on its first node.

    ``--overcommit`` allows the scheduler's rank beside as many workers' ranks as the job has tasks (refused
    otherwise: "More processors requested than permitted"), ``--kill-on-bad-exit=0`` lets the others live when a
    rank dies, ``--no-kill`` when a node does and the job was submitted with ``--no-kill`` too (without it Slurm ends
    the step of such a job), and nothing is bound: workers bind themselves.
    """
    # The job's own --ntasks-per-node, without the scheduler's rank, would be warned of at the head of each log: "can't
    # honor --ntasks-per-node set to 4 which doesn't match the requested tasks 5". On several nodes it is what they
    # have at least, and Slurm says nothing.
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
    """Return the types that this Slurm can do, such as ``pmix`` and ``pmi2``, from ``srun --mpi=list``."""
    words = re.findall(r"^(?:srun: )?\s*(?:MPI plugin types are\.\.\.)?\s*([\w-]+)\s*$", text, re.M)
    return tuple(dict.fromkeys(words))

"""mpirun and mpiexec of Open MPI 4 and 5, MPICH and PALS: the flavour, and the command line.

Tested: Open MPI 5.0.11 and 4.1.4, MPICH 5.0.2. PALS as documented in mpiexec(1).
"""

from __future__ import annotations

import re

from hpcgpu.errors import LaunchError
from hpcgpu.model.layout import World

# Flags with which the other ranks survive the death of one: by default all are ended.
# Open MPI 4.1.4 has such flags too (--enable-recovery, --continuous), but with either it always returns 0, and it hangs
# after a rank on another node was killed. So with Open MPI 4 a dead rank ends the run.
# MPICH 5.0.2's flag is not reliable: after MPI_Finalize the dead rank's neighbours on its node survived in 10 of 16
# runs; otherwise its proxy sends them SIGKILL.
_SURVIVE = {
    "openmpi-5": ("--continuous",),
    "openmpi-4": (),
    "mpich": ("-disable-auto-cleanup",),
    "pals": ("--no-abort-on-failure",),
}

# Variables that replace ssh; each flavour has one, and ignores the others.
# Open MPI's daemons start further daemons, and pass it on.
REMOTE_SHELL = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")

# Variables that name the parent of its session folder, `ompi.PID`, on the node where it is started; the default, and
# the place on other nodes, is the folder of temporary files. A killed mpirun leaves the session folder behind, and a
# later one with the same pid cannot start: "The PMIx server's listener thread failed to start", exit code 213. Pids
# repeat, soon in a container that is restarted. So it is put into a folder that is removed however a run ends. Open
# MPI 4.1.4 has other names.
SESSION = {"openmpi-5": ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")}


def read_flavour(text: str) -> str:
    """Parse ``mpirun --version`` into ``openmpi-5``, ``openmpi-4``, ``mpich`` or ``pals``; else raise LaunchError."""
    # The mpiexec of Open MPI 4 names itself OpenRTE.
    if (match := re.match(r"\w+ \((?:Open MPI|OpenRTE)\) (\d+)\.", text)) and int(match[1]) >= 4:
        return "openmpi-5" if int(match[1]) >= 5 else "openmpi-4"
    if text.startswith("HYDRA"):
        return "mpich"
    if is_pals(text):
        return "pals"
    shown = text.strip().splitlines()[0] if text.strip() else "nothing"
    raise LaunchError(
        f"this mpirun says {shown!r} of itself; known are Open MPI 4 and 5, MPICH and PALS. Choose a launcher: "
        "--launcher srun or --launcher fork, or start 'hpcgpu run' by your own command"
    )


def is_pals(text: str) -> bool:
    """Return whether this is the output of PALS's ``mpiexec --version``."""
    return re.match(r"mpiexec version \d", text) is not None


def command(
    argv: tuple[str, ...], world: World, program: str, flavour: str, first: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the mpirun of the ranks, rank 0 on the first node, none bound; ``words`` of site or user come first."""
    size, survive = world.size, _SURVIVE[flavour]
    if flavour.startswith("openmpi"):
        # Round robin over the nodes, for a node may have more slots than ranks (2 ranks on 2 nodes of 4 slots were both
        # started on the first); numbered node by node. The scheduler's rank is in excess of the slots.
        mapping = ("--map-by", "node:OVERSUBSCRIBE", "--rank-by", "slot")
        hosts = ("--host", ",".join(f"{h}:{world.per_node}" for h in world.hosts)) if world.hosts else ()
        root = ("--allow-run-as-root",) if world.as_root else ()
        brought = tuple(word for name in world.variables for word in ("-x", name))
        flags = (*survive, *mapping, "--bind-to", "none", *hosts, *root, *brought)
    elif flavour == "mpich":
        hosts = ("-hosts", ",".join(world.hosts)) if world.hosts else ()
        # By default all variables are forwarded, also those of this node alone, such as the UUIDs of its GPUs.
        brought = ("-genvlist", ",".join(world.variables)) if world.variables else ()
        flags = (*survive, "-ppn", "1", "-bind-to", "none", *hosts, *brought)  # one by one: round robin over the nodes
    else:
        # PALS fills node by node, and the last node could be empty: so each node has as many ranks, and some are idle.
        each = world.per_node + world.extra
        size = world.nodes * each
        flags = (*survive, "--cpu-bind", "none", "--ppn", str(each))
    return (program, *first, *flags, "-n", str(size), *argv)

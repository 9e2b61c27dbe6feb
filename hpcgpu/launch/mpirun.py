"""mpirun and mpiexec of Open MPI 4 and 5, MPICH and PALS: which one it is, and the command line.

Tried: Open MPI 5.0.11 and 4.1.4, MPICH 5.0.2. PALS as its mpiexec(1) says.
"""

from __future__ import annotations

import re

from hpcgpu.errors import LaunchError
from hpcgpu.model.world import World

# Flags with which the others live when a rank dies: by default all are ended.
# Open MPI 4.1.4 has such flags too (--enable-recovery, --continuous), but with either it returns 0 whatever the
# script returned, and never ends once a rank of another node was killed: there a dead rank ends the run.
# MPICH 5.0.2's is no promise: after MPI_Finalize the dead rank's neighbours on its node lived in 10 of 16 runs;
# its proxy sends them SIGKILL otherwise.
_SURVIVE = {
    "openmpi-5": ("--continuous",),
    "openmpi-4": (),
    "mpich": ("-disable-auto-cleanup",),
    "pals": ("--no-abort-on-failure",),
}

# What tells them to reach other nodes by another program than ssh; each is for one of them, and no other minds it.
# Open MPI's daemons start others of their kind, and hand it on.
REMOTE_SHELL = ("PRTE_MCA_plm_ssh_agent", "OMPI_MCA_plm_rsh_agent", "HYDRA_LAUNCHER_EXEC")

# What says where it makes a folder of its own, `ompi.PID`, on the node where it is started; by default, and on other
# nodes, among temporary files. It is to lie with what goes however a run ends: one that is killed leaves it, and a
# later one of the same pid cannot start beside it: "The PMIx server's listener thread failed to start", exit code 213.
# Pids come again, soon in a container that is restarted. Open MPI 4.1.4 has other names.
SESSION = {"openmpi-5": ("PRTE_MCA_prte_local_tmpdir_base", "PRTE_MCA_prte_tmpdir_base")}


def read_flavour(text: str) -> str:
    """Return ``openmpi-5``, ``openmpi-4``, ``mpich`` or ``pals`` from what ``mpirun --version`` prints.

    Raises
    ------
    LaunchError
        None of these, with what it printed.

    """
    # The mpiexec of Open MPI 4 names itself OpenRTE.
    if (found := re.match(r"\w+ \((?:Open MPI|OpenRTE)\) (\d+)\.", text)) and int(found[1]) >= 4:
        return "openmpi-5" if int(found[1]) >= 5 else "openmpi-4"
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
    """Tell whether this is what the mpiexec of PALS prints for ``--version``."""
    return re.match(r"mpiexec version \d", text) is not None


def command(
    argv: tuple[str, ...], world: World, program: str, flavour: str, words: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return the mpirun that starts the ranks, rank 0 on the first node; nothing is bound: workers bind themselves.

    ``words`` are the site's or the user's own, and come first.
    """
    size, survive = world.size, _SURVIVE[flavour]
    if flavour.startswith("openmpi"):
        # Round robin over the nodes, since slots may be more than the ranks of a node (2 ranks on 2 nodes of 4 slots
        # all went to the first); numbered node by node. The scheduler's rank is one more than there are slots.
        places = ("--map-by", "node:OVERSUBSCRIBE", "--rank-by", "slot")
        hosts = ("--host", ",".join(f"{h}:{world.per_node}" for h in world.hosts)) if world.hosts else ()
        root = ("--allow-run-as-root",) if world.as_root else ()
        brought = tuple(word for name in world.variables for word in ("-x", name))
        flags = (*survive, *places, "--bind-to", "none", *hosts, *root, *brought)
    elif flavour == "mpich":
        hosts = ("-hosts", ",".join(world.hosts)) if world.hosts else ()
        # All are brought by default, also what is true of this node alone, such as the UUIDs of its GPUs.
        brought = ("-genvlist", ",".join(world.variables)) if world.variables else ()
        flags = (*survive, "-ppn", "1", "-bind-to", "none", *hosts, *brought)  # one by one: round robin over the nodes
    else:
        # PALS fills node by node, and the last could stay empty: as many ranks on each, of which some stay idle.
        each = world.per_node + world.extra
        size = world.nodes * each
        flags = (*survive, "--cpu-bind", "none", "--ppn", str(each))
    return (program, *words, *flags, "-n", str(size), *argv)

"""A job of PBS on two nodes that are namespaces of this machine, reached by a pbs_tmrsh of the test's own."""

import os
from pathlib import Path

import ranks
from recordings import block, listing

# A task of PBS has little of the environment.
_TMRSH = """\
#!/bin/bash
echo "$@" >> {folder}/tmrsh.log
node=$1; shift
task=(HOME="$HOME" PATH=/bin:/usr/bin PBS_JOBID=$PBS_JOBID PBS_NODENUM=1 NCPUS=2 OMP_NUM_THREADS=2)
exec {before} unshare --uts env -i "${{task[@]}}" bash -c 'hostname "$0" && exec "$@"' "$node" "$@"
"""
# Both nodes have the addresses of this machine, which Open MPI cannot know; MPICH wants names that it can look up.
_JOB = """\
hostname node0001
mount --bind {folder}/hosts /etc/hosts
export NCPUS=2 OMP_NUM_THREADS=2
export PBS_JOBID=7.login01 PBS_NODEFILE={folder}/nodefile OMPI_MCA_btl_tcp_if_include=lo
export MARK='of the "script"' CUDA_VISIBLE_DEVICES=GPU-of-node0001
exec "$@"
"""


def prefix(folder: Path) -> list[str]:
    """Return the words before a command that is to run on the first node."""
    inside = ranks.unshared("--uts", "--mount")
    (folder / "nodefile").write_text("node0001\nnode0001\nnode0002\nnode0002\n")
    (folder / "hosts").write_text("127.0.0.1 localhost node0001\n203.0.113.2 node0002\n")
    write_tmrsh(folder)
    return [*inside, "bash", "-c", _JOB.format(folder=folder), "job"]


def write_tmrsh(folder: Path, before: str = "") -> None:
    """Write the program that starts tasks on other nodes, the words ``before`` first in each, into the folder bin."""
    tmrsh = folder / "bin" / "pbs_tmrsh"
    tmrsh.parent.mkdir(exist_ok=True)
    tmrsh.write_text(_TMRSH.format(folder=folder, before=before))
    tmrsh.chmod(0o755)


def grant(folder: Path, *sizes: str) -> None:
    """Have PBS say that each node was granted so much memory."""
    vnodes = "+".join(f"(node{i:04}:ncpus=2:mem={size})" for i, size in enumerate(sizes, start=1))
    shown = block("head", "7.login01", "R", {"exec_vnode": f'"{vnodes}"'})
    (folder / "qstat.json").write_text(listing("head", [shown]))
    qstat = folder / "bin" / "qstat"
    qstat.write_text(f'#!/bin/sh\necho "$@" >> {folder}/qstat.log\nexec cat {folder}/qstat.json\n')
    qstat.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the job's script."""
    return ranks.environment(PATH=f"{folder}/bin:{ranks.BIN}:{os.environ['PATH']}", HOME=str(folder))

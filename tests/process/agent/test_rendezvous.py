"""Ranks that do not come to the rendezvous, and what the others say and leave."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import ranks
from waiting import scaled, until

from hpcgpu.host import process

# a rank that is there and never comes: stopped, asleep, or gone without a word to MPI
AWAY = {
    "stopped": 'kill -STOP "$$"; exit 0',
    "asleep": "exec sleep 600",
}


def late(
    folder: Path, away: str, who: int, flags: tuple[str, ...] = (), options: tuple[str, ...] = ()
) -> tuple[subprocess.CompletedProcess[str], int]:
    """Start three ranks, of which one stays away; return how it ended, and that rank's process."""
    (folder / "tmp").mkdir()
    rank = ranks.command(ranks.script(folder, ""), options=("--gpus", "sim:2", "--death-timeout", "6", *options))
    keep = f'if [ "$OMPI_COMM_WORLD_RANK" = {who} ]; then echo "$$" > {folder}/pid; {away}; fi; exec "$@"'
    argv = [*ranks.MPIRUN, *flags, "-n", "3", "bash", "-c", keep, "bash", *rank]
    env = ranks.environment(TMPDIR=str(folder / "tmp"), HOME=str(folder))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(60), env=env, stdin=subprocess.DEVNULL)
    return done, int((folder / "pid").read_text())


@pytest.mark.parametrize(
    ("away", "who", "flags"), [("stopped", 2, ("--continuous",)), ("asleep", 0, ())], ids=["continuous", "mpirun"]
)
def test_mpi_without_all_ranks_ends_and_says_who_is_missing(
    tmp_path: Path, away: str, who: int, flags: tuple[str, ...]
) -> None:
    done, pid = late(tmp_path, AWAY[away], who, flags)
    assert done.returncode != 0
    does = "is stopped" if away == "stopped" else "has not come so far"
    host = os.uname().nodename
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("hpcgpu:")]
    assert said.startswith("hpcgpu: not all 3 ranks came to the rendezvous within 6 s (--death-timeout). Missing: ")
    assert f"rank {who} on {host} (process {pid} {does})" in said
    assert re.search(rf"\. There: ranks? \S+ on {host}$", said)
    until(lambda: not process.alive(pid), "the rank is gone", limit_s=20)  # mpirun's SIGKILL may act a moment later
    # of a rank that was killed it goes a moment later
    until(lambda: not list((tmp_path / "tmp").glob("hpcgpu-*")), "the run's folder is gone")
    assert not (tmp_path / ".hpcgpu").exists()

"""The command lines start what they promise: ranks per node, nothing bound, and who lives when one dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from launch_probe import ME, PROBE, check, others
from paths import ROOT
from ranks import BIN, environment
from waiting import scaled

from hpcgpu.launch import mpirun
from hpcgpu.model.world import World


def here(argv: tuple[str, ...]) -> dict[str, Any]:
    command = [sys.executable, PROBE, "localhost", *argv]
    out = subprocess.run(command, capture_output=True, text=True, timeout=scaled(90), env=environment(), cwd=ROOT)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_open_mpi_5_here() -> None:
    world = World(per_node=3, as_root=os.getuid() == 0)
    program = str(BIN / "mpirun")
    version = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=scaled(20)).stdout
    seen = here(mpirun.command(ME, world, program, mpirun.read_flavour(version)))
    check(seen, world, [seen["ranks"][0]["host"]])
    assert (seen["alive"], seen["returncode"], seen["err"]) == (others(world), 0, "")


def test_without_its_flag_open_mpi_5_ends_all() -> None:
    root = ["--allow-run-as-root"] if os.getuid() == 0 else []
    seen = here((str(BIN / "mpirun"), *root, "--oversubscribe", "--bind-to", "none", "-n", "4", *ME))
    assert (seen["alive"], seen["returncode"]) == ([], 137)


def test_mpich_here(mpich: str) -> None:
    version = subprocess.run([mpich, "--version"], capture_output=True, text=True, timeout=scaled(20)).stdout
    assert mpirun.read_flavour(version) == "mpich"
    world = World(per_node=3)
    seen = here(mpirun.command(ME, world, mpich, "mpich"))
    check(seen, world, [seen["ranks"][0]["host"]])
    assert {r["launcher"] for r in seen["ranks"]} == {"MPICH mpiexec"}


def test_mpich_deals_ranks_out_over_its_hosts(mpich: str) -> None:
    # Two names of this machine, each with a proxy of its own: PMI counts per proxy.
    world = World(nodes=2, per_node=2, hosts=("localhost", "127.0.0.1"))
    program, *rest = mpirun.command(ME, world, mpich, "mpich")
    seen = here((program, "-launcher", "fork", *rest))
    assert [(r["local_rank"], r["local_size"]) for r in seen["ranks"]] == [(0, 3), (0, 2), (1, 3), (1, 2), (2, 3)]

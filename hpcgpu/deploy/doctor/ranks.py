"""Test that the job's launcher and the MPI library fit: ranks are started, and must meet in one world."""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from dataclasses import replace

from hpcgpu.deploy import start
from hpcgpu.errors import HpcGpuError
from hpcgpu.host import run as programs
from hpcgpu.model import Command, Result, Settings
from hpcgpu.plan.doctor.facts import Launcher
from hpcgpu.plan.jobs.launcher import Launch

_TRY_S = 25.0
_WORD = "hpcgpu-doctor-rank"
_RANK = (
    f"from mpi4py import MPI; print('{_WORD}', MPI.COMM_WORLD.size, "
    "MPI.Get_library_version().splitlines()[0].split(',')[0], flush=True)"
)
_SAID = re.compile(rf"{_WORD} (\d+) (.*)")
_LINES = 4


def look(settings: Settings) -> Launcher:
    """Start ranks in this job; return the command and its result."""
    try:
        launch = start.ranks_launch(settings)
    except HpcGpuError as error:
        return Launcher(error=str(error))
    words = launch.argv[:-1]  # without the rank's own command
    if not words or settings.rendezvous == "file":
        return Launcher(command=shlex.join(words))
    done = run(replace(launch, argv=(*words, sys.executable, "-c", _RANK)), _TRY_S)
    said = _SAID.findall(done.stdout)
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if re.search(r"\w", line)]
    return Launcher(
        command=shlex.join(words),
        library=said[0][1].strip() if said else "",
        worlds=tuple(int(size) for size, _ in said),
        exit_code=done.returncode,
        output=" / ".join(lines[:_LINES]),
    )


def run(launch: Launch, limit_s: float) -> Result:
    """Run a launcher's command, its session folder as in a run: Open MPI takes no TMPDIR as long as many are."""
    with tempfile.TemporaryDirectory(prefix="hpcgpu-doctor-", dir="/tmp") as folder:
        env = {**dict(launch.env), **launch.within(folder, os.environ)}
        return programs.run_sync(Command(launch.argv, env=env, timeout_s=limit_s))

"""What a fork server has ready for its forks, and what it leaves to those that need it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from waiting import scaled

PRELOAD = """
import json, os, sys
from hpcgpu.deploy.processes import scheduler

scheduler.prepare_forks(simulated=True)
before = set(sys.modules)

def refuse(*_):
    raise AssertionError("a worker starts a program, or reads the versions of packages")

import importlib.metadata, subprocess
subprocess.Popen = importlib.metadata.version = importlib.metadata.distribution = refuse
from distributed.versions import get_versions

versions = get_versions()
import distributed.http.worker
from hpcgpu.sim import SimGpu
from hpcgpu.sim.dask import register_sizes
from dask.sizeof import sizeof
import numpy

register_sizes()
size = sizeof(SimGpu(1 << 20).asarray(numpy.zeros(1000, "u1")))
print(json.dumps({
    "new": sorted(set(sys.modules) - before),
    "arrays": "dask.array" in sys.modules,
    "threads": len(os.listdir("/proc/self/task")),
    "distributed": versions["packages"]["distributed"],
    "size": size,
}))
"""


def test_a_fork_finds_what_it_needs_at_its_start() -> None:
    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # as ranks have it
    argv = [sys.executable, "-c", PRELOAD]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=scaled(60), check=True)
    facts = json.loads(done.stdout)
    assert facts.pop("distributed")
    assert facts == {"new": [], "arrays": False, "threads": 1, "size": 1000}

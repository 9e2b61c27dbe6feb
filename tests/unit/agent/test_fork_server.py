"""The process that forks for its rank, and what it has ready for its forks."""

from __future__ import annotations

import json
import operator
import os
import signal
import socket
import subprocess
import sys

import pytest
from waiting import scaled

from hpcgpu.agent.fork_server import ForkServer
from hpcgpu.errors import LaunchError
from hpcgpu.host import process


def test_one_that_does_not_answer_is_killed_and_said() -> None:
    forked = ForkServer.fork()
    fork_server = ForkServer(forked.sock, forked.pid, answer_s=0.2)
    os.kill(fork_server.pid, signal.SIGSTOP)
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        pytest.raises(LaunchError, match=f"the fork server, process {fork_server.pid}, did not answer within 0.2"),
    ):
        fork_server.spawn("builtins:print", None, (theirs.fileno(), 1, 2))
    assert os.waitstatus_to_exitcode(os.waitpid(fork_server.pid, 0)[1]) == -signal.SIGKILL
    fork_server.close()


def test_at_its_end_what_it_forked_is_gone() -> None:
    fork_server = ForkServer.fork()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            pid = fork_server.spawn(
                "operator:call", operator.methodcaller("recv", 1), (theirs.fileno(), 1, 2)
            )  # it waits
        fork_server.close()
        assert not process.alive(pid)
    assert os.waitpid(fork_server.pid, 0)[1] == 0


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
from hpcgpu.sim import register_sizes
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

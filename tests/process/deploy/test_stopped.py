"""Processes that somebody has stopped (SIGSTOP) do not outlive the cluster that they are of."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

CLIENT = """
import sys
from hpcgpu import LocalGPUCluster
if __name__ == "__main__":
    with LocalGPUCluster(gpus="sim:1", client_grace=2) as cluster:
        print(cluster.job_id, flush=True)
        sys.stdin.read()
"""
# Twice the grace until rank 0 is given up, as long until the worker is, and a loaded machine.
GONE_S = 45


@pytest.mark.parametrize(
    ("who", "end"), [("fork_server", "closes"), ("leader", "closes"), ("leader", "is killed"), ("client", "is killed")]
)
def test_a_stopped_process_is_gone_when_its_client_ends(tmp_path: Path, who: str, end: str) -> None:
    """A client that is stopped has ended after its grace, but for rank 0, a zombie until the client is killed."""
    (tmp_path / "client.py").write_text(CLIENT)
    argv = [sys.executable, str(tmp_path / "client.py")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        leader = psutil.Process(int(client.stdout.readline()))
        (fork_server,) = leader.children()
        family = [leader, fork_server, *fork_server.children()]
        os.kill({"leader": leader, "fork_server": fork_server, "client": client}[who].pid, signal.SIGSTOP)
        if who == "client":
            assert psutil.wait_procs(family[1:], timeout=GONE_S)[1] == []
        client.stdin.close() if end == "closes" else client.kill()
        assert psutil.wait_procs(family, timeout=GONE_S)[1] == []
        assert client.wait(GONE_S) == (0 if end == "closes" else -signal.SIGKILL)

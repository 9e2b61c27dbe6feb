"""What the machine refuses is said in words, with what to do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ranks
from waiting import scaled

# As the kernel refuses under 'ulimit -u', which does not count for root.
REFUSING = """
import _thread, os, threading

fork, left = os.fork, [int(os.environ.get("FORKS", 1000))]

def refusing_fork():
    left[0] -= 1
    if left[0] < 0:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

def refusing_thread(*_):
    raise RuntimeError("can't start new thread")

os.fork = refusing_fork
if "NO_THREADS" in os.environ:
    _thread.start_new_thread = threading._start_new_thread = refusing_thread
"""


@pytest.mark.parametrize(
    "refused",
    [{"FORKS": "0"}, {"FORKS": "1"}, {"FORKS": "2"}, {"NO_THREADS": "1"}],
    ids=["leader", "fork-server-scheduler", "fork-server-worker", "threads"],
)
def test_a_process_or_thread_that_may_not_be_started(tmp_path: Path, refused: dict[str, str]) -> None:
    (tmp_path / "sitecustomize.py").write_text(REFUSING)
    path = ranks.script(tmp_path, "print('never')")
    done = ranks.run(path, env={"PYTHONPATH": str(tmp_path), **refused})
    assert done.returncode == 1, done.stderr
    assert "no further process or thread can be started on" in done.stderr
    assert "(ulimit -u)" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_loopback_without_ipv4(tmp_path: Path) -> None:
    inside = ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces for users here (unshare --net --map-root-user)")
    prepare = 'ip link set lo up && ip addr del 127.0.0.1/8 dev lo; exec "$@"'
    argv = [*inside, "bash", "-c", prepare, "job", *ranks.command(ranks.script(tmp_path, "print('never')"))]
    argv[-1:-1] = ["--gpus", "sim:1"]
    done = subprocess.run(
        argv, capture_output=True, text=True, timeout=scaled(60), env=ranks.environment(), cwd=tmp_path
    )
    assert done.returncode == 1, done.stderr
    assert "this node's loopback has no address 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr

"""What the machine refuses, or the run: processes, threads, addresses, and modules that anybody may have written."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ranks

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
    command = ranks.command(ranks.script(tmp_path, "print('never')"), options=("--gpus", "sim:1"))
    done = ranks.run_command([*inside, "bash", "-c", prepare, "job", *command])
    assert done.returncode == 1, done.stderr
    assert "this node's loopback has no address 127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


SCRIPT = """
from distributed import Client
def found():
    import importlib.util
    return importlib.util.find_spec("mine") is not None
with Client() as client:
    print("worker found:", client.submit(found).result())
"""


def run(folder: Path, script: Path) -> subprocess.CompletedProcess[str]:
    argv = ranks.command(script, options=("--gpus", "sim:1", "--no-dashboard"))
    return ranks.run_command(["env", f"--chdir={folder}", *argv])


def test_what_anybody_may_have_put_there_is_not_imported(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    shared.chmod(0o1777)
    own.mkdir()
    (own / "script.py").write_text(SCRIPT)
    for name in ("dask", "distributed", "numpy", "msgspec", "hpcgpu", "cupy", "mine"):
        (shared / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name} ')")
    done = run(shared, own / "script.py")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
    assert "worker found: False" in done.stdout
    assert f"modules in {shared} are not imported: all users may write there" in done.stderr


def test_the_users_own_are_found_by_the_workers(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "mine.py").write_text("")
    done = run(tmp_path, tmp_path / "script.py")
    assert "worker found: True" in done.stdout, done.stderr
    assert "not found" not in done.stderr

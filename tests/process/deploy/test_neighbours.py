"""Another user of the host has been there before: whatever lies in the folders that all share, the run is right."""

import contextlib
import ctypes
import fcntl
import os
import re
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ranks
from shared_host import NEIGHBOUR, Place, as_neighbour, by_root, shared_place

pytestmark = by_root

SUM = "with Client() as c:\n    print(sum(c.gather(c.map(lambda x: x + 1, range(10)))))\n"
CLUSTER = """
    import json
    from hpcgpu import LocalGPUCluster
    if __name__ == "__main__":
        with LocalGPUCluster(**json.loads(sys.argv[1])) as cluster, Client(cluster) as c:
            print(sum(c.gather(c.map(lambda x: x + 1, range(10)))))
"""
CLAIM = """
    from distributed import LocalCluster
    import hpcgpu
    if __name__ == "__main__":
        with LocalCluster(worker_class=hpcgpu.GPUWorker, n_workers=1, gpus="sim:1", dashboard_address=None) as cluster:
            print(Client(cluster).submit(sum, [1, 2]).result())
"""
# Eight random characters of Python's tempfile and 16 of secrets; what a launcher makes is its own.
RANDOM = re.compile(
    rf"hpcgpu-(run|client|launch)-\d+-{re.escape(os.uname().nodename)}-[a-z0-9_]{{8}}|(tmp)?[a-z0-9_]{{8}}|ompi\.\d+"
)


place = shared_place


def commands(place: Place, folder: Path) -> dict[str, list[str]]:
    """The ways to start a run of two workers."""
    options = ("--gpus", "sim:2", "--local-directory", str(place.spill))
    path, cluster = ranks.script(folder, SUM), ranks.script(folder, CLUSTER, "cluster.py")
    given = f'{{"gpus": "sim:2", "local_directory": "{place.spill}"}}'
    return {
        "run": ranks.command(path, options=options),
        "mpirun": ranks.command(path, options=options, ranks=3),
        "cluster": [sys.executable, str(cluster), given],
    }


@contextmanager
def created(*folders: Path) -> Iterator[dict[Path, set[str]]]:
    """Yield the names that appear in folders meanwhile, by folder, however short the lives of the files are."""
    libc, head = ctypes.CDLL(None, use_errno=True), struct.Struct("iIII")
    file = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    watched = {libc.inotify_add_watch(file, os.fsencode(f), 0x180): f for f in folders}  # IN_CREATE, IN_MOVED_TO
    assert min(watched) > 0, os.strerror(ctypes.get_errno())
    names: dict[Path, set[str]] = {folder: set() for folder in folders}
    yield names
    with contextlib.suppress(BlockingIOError):
        while events := os.read(file, 1 << 16):
            while events:
                number, _, _, length = head.unpack_from(events)  # -1, a KeyError: events were lost
                names[watched[number]].add(os.fsdecode(events[head.size : head.size + length].rstrip(b"\0")))
                events = events[head.size + length :]
    os.close(file)


def lay(place: Place, kind: str) -> None:
    """Lay something in the way of each name that can be guessed; done by the neighbour."""
    precious = place.home / "precious"
    # the folders that Dask takes (distributed 2026.8.0, diskutils.py), now and in older versions
    of_dask = ("dask-scratch-space", f"dask-scratch-space-{os.getuid()}", "dask-worker-space")
    for folder in [shared / name for shared in (place.tmp, place.spill) for name in of_dask]:
        if kind == "link":
            folder.symlink_to(place.home)
        else:
            folder.mkdir(mode=0o777)
            for lock in (folder / "global.lock", folder / "purge.lock"):
                os.mkfifo(lock, 0o666) if kind == "folder-of-fifos" else lock.touch(0o666)
    for name in ("open_mpi.0000", "open_mpi.0001"):
        (place.shm / name).symlink_to(precious)


@contextmanager
def locked(place: Place) -> Iterator[None]:
    """Hold all locks that lie in the way."""
    found = [path for shared in place.shared for path in shared.glob("*/*.lock")]
    files = [os.open(path, os.O_RDWR) for path in found if stat.S_ISREG(path.lstat().st_mode)]
    for file in files:
        fcntl.lockf(file, fcntl.LOCK_EX)
        fcntl.flock(file, fcntl.LOCK_EX)
    yield
    for file in files:
        os.close(file)


def picture(folder: Path) -> dict[str, tuple[object, ...]]:
    """What lies in a folder: kind, owner, mode, and what is in it."""
    out: dict[str, tuple[object, ...]] = {}
    for path in sorted(folder.rglob("*")):
        facts = path.lstat()
        said = path.readlink() if path.is_symlink() else path.read_bytes() if path.is_file() else None
        out[str(path)] = (facts.st_mode, facts.st_uid, facts.st_size if path.is_file() else None, said)
    return out


@pytest.mark.parametrize(
    ("kind", "start"),
    [("link", "cluster"), ("folder-of-fifos", "run"), ("folder-of-held-locks", "mpirun")],
)
def test_names_taken_by_a_neighbour_change_nothing(place: Place, tmp_path: Path, kind: str, start: str) -> None:
    """No other name can be guessed."""
    (place.home / "precious").write_text("mine")
    for folder in (place.home / ".hpcgpu", place.home / ".hpcgpu" / "runs"):
        folder.mkdir(mode=0o700)
    seen: list[dict[Path, set[str]]] = []
    for taken in (True,) if start == "run" else (False, True):
        if taken:
            as_neighbour(lambda: lay(place, kind))
        before = {folder: picture(folder) for folder in (*place.shared, place.home)}
        with locked(place), created(*place.shared) as appeared:
            code, said, wrong = place.run(commands(place, tmp_path)[start])
        assert (code, said) == (0, "55\n"), wrong
        assert {folder: picture(folder) for folder in before} == before
        seen.append(appeared)
    names = set().union(*(found[folder] for found in seen for folder in (place.tmp, place.spill)))
    assert any(name.startswith("hpcgpu-run-") for name in names)
    assert [name for name in names if not RANDOM.fullmatch(name)] == []
    # Each of Open MPI's ranks tries whether segments can be made there, and passes over a name that is taken, by its
    # brother or by anybody (O_EXCL, O_NOFOLLOW).
    assert [name for found in seen for name in found[place.shm] if not re.fullmatch(r"open_mpi\.\d{4}", name)] == []
    for folder in (place.tmp, place.spill):
        assert len(seen) == 1 or not seen[0][folder] & seen[1][folder]


def test_folder_that_a_group_can_replace_needs_trust(place: Place, tmp_path: Path) -> None:
    project = place.tmp / "project"
    project.mkdir()
    os.chown(project, 0, NEIGHBOUR)
    project.chmod(0o2770)
    (project / "me").mkdir(mode=0o700)
    path = ranks.script(tmp_path, SUM)
    options = ("--gpus", "sim:1", "--local-directory", str(project / "me"))
    code, said, wrong = place.run(ranks.command(path, options=options))
    assert (code, said) == (1, "")
    assert f"every member of group {NEIGHBOUR} can replace files in {project} (mode 2770)" in wrong
    assert list((project / "me").iterdir()) == []
    code, said, wrong = place.run(ranks.command(path, options=(*options, "--trust-local-directory")))
    assert (code, said) == (0, "55\n"), wrong
    assert "is accepted because of trust_local_directory, although every member of group" in wrong


@by_root
def test_home_that_root_may_not_read_needs_no_traceback(tmp_path: Path) -> None:
    """As root's own home on a file server that squashes root."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    os.chown(home, NEIGHBOUR, NEIGHBOUR)
    kept = "-dac_override,-dac_read_search"
    squashed = ["setpriv", f"--bounding-set={kept}", f"--inh-caps={kept}"]
    script = ranks.script(tmp_path, "print(Client().submit(sum, [1, 2]).result())")
    done = ranks.run_command([*squashed, *ranks.command(script, options=("--gpus", "sim:1"))], {"HOME": str(home)})
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    done = ranks.run_command([*squashed, str(ranks.BIN / "hpcgpu"), "ps"], {"HOME": str(home)})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"Permission denied: '{home}/.hpcgpu/runs'" in done.stderr


@by_root
def test_home_that_is_read_only_is_not_needed(tmp_path: Path) -> None:
    """A GPUWorker claims its GPU below TMPDIR then."""
    (home := tmp_path / "home").mkdir()
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    script = ranks.script(tmp_path, "print(Client().submit(sum, [1, 2]).result())")
    claims = ranks.script(tmp_path, CLAIM, "claims.py")
    env = {"HOME": str(home), "TMPDIR": str(tmp_path)}
    for argv in (ranks.command(script, options=("--gpus", "sim:1")), [sys.executable, str(claims)]):
        done = ranks.run_command(["unshare", "-m", "sh", "-c", mount, str(home), *argv], env)
        assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr
    assert list(home.iterdir()) == []

"""A checkpoint's folder: who may write, whom it trusts, and its manifests."""

import contextlib
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from ranks import in_process
from shared_host import as_neighbour, by_root

from hpcgpu.checkpoint.computation import Computation
from hpcgpu.checkpoint.folder import Folder, Holder
from hpcgpu.checkpoint.segments import Chunk, SegmentWriter
from hpcgpu.deploy.jobs.run import Owner
from hpcgpu.errors import CheckpointError, ConfigError, SubmitError
from hpcgpu.host import private, process
from hpcgpu.model import JobState

ONE = Computation(facts={"type": "dask.array.core.Array"}, digests={"": "a"})


def never(batch: str, job_id: str) -> JobState:
    raise AssertionError("the batch system was asked")


def folder_of(path: Path, holder: Holder | None = None) -> Folder:
    folder = Folder(path / "run")
    folder.make(trusted=False)
    if holder:
        private.write(folder.path / "owner", msgspec.json.encode(holder).decode())
    return folder


def other(**facts: object) -> Holder:
    """Return the holder of another process: the parent of this one."""
    pid = os.getppid()
    owner = replace(Owner.here(), pid=pid, start_time=process.start_time(pid))
    return replace(Holder(owner), **facts)


def ended() -> Holder:
    with subprocess.Popen(["true"]) as child:
        started = process.start_time(child.pid) or 1
    return Holder(replace(Owner.here(), pid=child.pid, start_time=started))


def test_folder_is_made_for_its_user_alone(tmp_path: Path) -> None:
    assert folder_of(tmp_path).path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o770, 0o707], ids=["group", "all"])
def test_folder_that_others_can_write_is_refused_by_name(tmp_path: Path, mode: int) -> None:
    path = folder_of(tmp_path).path
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"{path} is not safe.* trust_folder=True"):
        Folder(path)
    assert Folder(path, trusted=True).names == ()
    assert "is not safe" in in_process("checkpoint", str(path)).stderr


def test_folder_of_another_user_is_refused_by_name(tmp_path: Path) -> None:
    path = folder_of(tmp_path).path
    if os.getuid():
        pytest.skip("only root can give a folder away")
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=rf"{path} belongs to user 12345.* trust_folder=True"):
        Folder(path)


@by_root
def test_names_and_chunks_outlast_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    """As where a ticket for the file server has expired."""
    folder = folder_of(tmp_path)
    with contextlib.closing(SegmentWriter(folder.path)) as writer:
        writer.append(Chunk(folder.write("x", ONE, 1, "").run, (0,)), [memoryview(b"payload")])
        writer.sync()
    folder.index.refresh()

    def look() -> None:
        with pytest.raises(PermissionError):
            print(folder.names)
        with pytest.raises(PermissionError):
            folder.index.refresh()
        assert folder.index.chunks

    as_neighbour(look)


def test_owner_that_lives_is_named_to_the_next_one(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, other(batch="slurm", job_id="4711"))
    with pytest.raises(ConfigError, match=rf"is written by .*{os.getppid()}@.*, job 4711: wait for its end"):
        folder.take(never)


def test_owner_that_has_ended_here_is_followed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ended())
    folder.take(never)
    assert folder.is_mine
    folder.release()
    assert folder.holder is None


def test_owner_in_this_process_is_followed_and_told(tmp_path: Path) -> None:
    first, second = folder_of(tmp_path), folder_of(tmp_path)
    first.take(never)
    second.take(never)
    assert (first.is_mine, second.is_mine) == (False, True)
    with pytest.raises(ConfigError, match="has been taken over by"):
        first.take(never)
    first.release()
    assert second.is_mine


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        (JobState.ENDED, "dead"),
        (JobState.PENDING, "dead"),
        (JobState.RUNNING, "alive"),
        (JobState.SUSPENDED, "alive"),
        (JobState.UNKNOWN, "unknown"),
        (None, "unknown"),
    ],
)
def test_owner_of_another_node_is_what_its_job_is(state: JobState | None, verdict: str) -> None:
    def poll(batch: str, job_id: str) -> JobState:
        assert (batch, job_id) == ("slurm", "4711")
        if state is None:
            raise SubmitError("no answer", transient=True)
        return state

    owner = replace(Owner.here(), host="elsewhere")
    assert Holder(owner, "slurm", "4711").state(poll) == verdict
    assert Holder(owner).state(never) == "unknown"


def test_owner_before_a_requeue_of_the_job_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    before = Holder(replace(Owner.here(), host="elsewhere"), "slurm", "4711", restarts=0)
    assert before.state(never) == "dead"
    assert Holder.here().restarts == 1


def test_owner_of_unknown_state_is_refused_with_a_way(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, Holder(replace(Owner.here(), host="elsewhere", pid=1)))
    with pytest.raises(ConfigError, match=rf"if it has ended, remove {folder.path}/owner"):
        folder.take(never)


def test_manifest_is_read_as_written(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    manifest = folder.write("x", ONE, 4, "")
    assert folder.manifest("x") == manifest
    assert (folder.names, folder.manifest("y")) == (("x",), None)


def test_manifest_of_another_python_is_not_readable(tmp_path: Path) -> None:
    manifest = folder_of(tmp_path).write("x", ONE, 4, "")
    assert not manifest.unreadable
    assert "written by Python 2.7" in replace(manifest, python="2.7").unreadable
    assert "written in format 0" in replace(manifest, format=0).unreadable


def test_manifest_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder.path / "x.name").write_text('{"run": ')
    with pytest.raises(CheckpointError, match=r"x\.name is damaged"):
        folder.manifest("x")


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".x", "x" * 101])
def test_name_that_is_no_file_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is no name"):
        folder_of(tmp_path).manifest(name)


def test_command_removes_a_name_and_its_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    for name in ("x", "y"):
        writer = SegmentWriter(folder.path)
        writer.append(Chunk(folder.write(name, ONE, 1, "").run, (0,)), [memoryview(name.encode())])
        writer.sync()
        writer.close()
    shown = in_process("checkpoint", str(folder.path), "--verify").stdout
    assert [line.split()[:5] for line in shown.splitlines()[1:3]] == [[n, "Array", "1", "of", "1"] for n in "xy"]
    assert "all chunks that are there are whole" in shown
    assert in_process("checkpoint", str(folder.path), "--remove", "x").returncode == 0
    assert (folder.names, len(list(folder.path.glob("*.segment")))) == (("y",), 1)
    assert "there is no folder" in in_process("checkpoint", str(tmp_path / "other")).stderr
    assert "has no 'x'; it has: y" in in_process("checkpoint", str(folder.path), "--remove", "x").stderr
    rows = json.loads(in_process("checkpoint", str(folder.path), "--json").stdout)["names"]
    assert [rows[0][name] for name in ("name", "done", "count", "nbytes")] == ["y", 1, 1, 1]
    (folder.path / "y.name").write_text("{")
    advice = f"hpcgpu checkpoint {folder.path} --remove y removes it"
    assert advice in in_process("checkpoint", str(folder.path)).stderr
    shown = in_process("checkpoint", str(folder.path), "--remove", "y").stdout
    assert "has no name: no collection was persisted there" in " ".join(shown.split())
    assert not list(folder.path.glob("*.segment"))


@pytest.mark.parametrize("name", ["nosuch", "", "../x"])
def test_command_leaves_a_folder_without_the_name_alone(name: str, tmp_path: Path) -> None:
    done = in_process("checkpoint", str(tmp_path), "--remove", name)
    assert (done.returncode, f"has no {name!r}; it has: none" in done.stderr) == (2, True)
    assert not list(tmp_path.iterdir())


def test_command_names_damaged_chunks(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    writer = SegmentWriter(folder.path)
    writer.append(Chunk(folder.write("x", ONE, 1, "").run, (0, 3)), [memoryview(b"payload")])
    writer.sync()
    writer.close()
    (path,) = folder.path.glob("*.segment")
    path.write_bytes(path.read_bytes().replace(b"payload", b"PAYLOAD"))
    done = in_process("checkpoint", str(folder.path), "--verify")
    assert done.returncode == 1
    assert f"x, part [0, 3] in {path.name} is damaged" in done.stdout

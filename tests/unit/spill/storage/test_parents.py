"""Users who can change a folder above ours, and so the contents of ours."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from pathlib import Path

import pytest
from shared_host import NEIGHBOUR, by_root

from hpcgpu.errors import ConfigError
from hpcgpu.spill import storage
from hpcgpu.spill.storage import Scratch, home_of, trust_note
from hpcgpu.spill.store.buffer import GpuSpillBuffer


def folder(above: Path, mode: int, *, owner: int = -1, group: int = -1) -> Path:
    """Make a folder of a mode, and a private one in it; return that."""
    made = above / "project"
    made.mkdir()
    os.chown(made, owner, group)
    made.chmod(mode)
    below = made / "me"
    below.mkdir(mode=0o700)
    return below


@pytest.mark.parametrize("mode", [0o755, 0o700, 0o1777, 0o1770, 0o2750])
def test_changed_by_with_a_closed_folder_is_empty(tmp_path: Path, mode: int) -> None:
    assert storage.changed_by(folder(tmp_path, mode)) == ""
    assert storage.changed_by(tmp_path / "not" / "there" / "yet") == ""


def test_changed_by_with_an_open_folder_names_it(tmp_path: Path) -> None:
    below = folder(tmp_path, 0o777)
    (tmp_path / "link").symlink_to(below)
    who = f"every user of this node can replace files in {below.parent} (mode 0777)"
    assert storage.changed_by(below) == storage.changed_by(tmp_path / "link" / "x") == who


@by_root
def test_a_group_can(tmp_path: Path) -> None:
    below = folder(tmp_path, 0o2770, group=NEIGHBOUR)
    assert storage.changed_by(below).startswith(f"every member of group {NEIGHBOUR} ")


def test_a_group_of_this_user_alone_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = folder(tmp_path, 0o775)
    me = pwd.getpwuid(os.getuid())

    def group(name: str, *members: str) -> Callable[[int], object]:
        return lambda gid: storage.grp.struct_group((name, "x", me.pw_gid, list(members)))

    monkeypatch.setattr(storage.grp, "getgrgid", group(me.pw_name, me.pw_name))
    assert storage.changed_by(below) == ""
    monkeypatch.setattr(storage.grp, "getgrgid", group(me.pw_name, me.pw_name, "eve"))
    assert "every member of group" in storage.changed_by(below)
    monkeypatch.setattr(storage.grp, "getgrgid", group("users"))
    assert "every member of group users" in storage.changed_by(below)


@by_root
@pytest.mark.parametrize("mode", [0o700, 0o1777])
def test_changed_by_with_a_foreign_owner_names_it(tmp_path: Path, mode: int) -> None:
    below = folder(tmp_path, mode, owner=NEIGHBOUR)
    assert storage.changed_by(below) == f"{below.parent} belongs to user {NEIGHBOUR}, who can replace files in it"


@by_root
def test_changed_by_with_a_foreign_link_names_its_owner(tmp_path: Path) -> None:
    shared, mine = tmp_path / "tmp", tmp_path / "mine"
    shared.mkdir()
    shared.chmod(0o1777)
    mine.mkdir(mode=0o700)
    link = shared / "link"
    link.symlink_to("../mine")
    assert storage.changed_by(link / "x") == ""
    os.lchown(link, NEIGHBOUR, NEIGHBOUR)
    assert storage.changed_by(link / "x") == f"{link} belongs to user {NEIGHBOUR}, who can replace files in it"
    shared.chmod(0o755)
    assert storage.changed_by(link / "x") == ""  # made by root, or with root's permission


@by_root
def test_an_unknown_owner_is_root_only_where_root_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = int(Path("/proc/sys/kernel/overflowuid").read_text())
    below = folder(tmp_path, 0o755, owner=unknown)
    monkeypatch.setattr(storage, "_is_in_namespace", lambda: True)
    assert storage.changed_by(below) == ""
    monkeypatch.setattr(storage, "_is_in_namespace", lambda: False)
    assert f"{below.parent} belongs to user" in storage.changed_by(below)


def test_such_a_folder_is_refused_with_what_to_do(tmp_path: Path) -> None:
    below = folder(tmp_path, 0o777)
    match = f"local_directory='{below}' is not safe .* files in {below.parent} .*chmod go-w.* trust_local_directory"
    with pytest.raises(ConfigError, match=match):
        Scratch.make(str(below), "run")
    with pytest.raises(ConfigError, match=match):
        GpuSpillBuffer(local_directory=str(below))
    assert list(below.iterdir()) == []


def test_it_is_taken_on_demand_and_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = folder(tmp_path, 0o777)
    Scratch.make(str(below), "run", trusted=True).remove()
    monkeypatch.setattr("tempfile.tempdir", str(below))
    (note,) = trust_note(None)
    assert note.startswith(f"local_directory='{below}' (TMPDIR)") and "trust_local_directory" in note
    assert trust_note(str(tmp_path)) == ()


def test_scratch_in_a_path_that_is_no_folder_fails(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path, why in ((tmp_path / "a", ""), ("/dev/null", ": Not a directory")):
        with pytest.raises(ConfigError, match=f"local_directory='{path}' cannot hold the files of a run{why}"):
            Scratch.make(str(path), "run")


def test_folders_that_are_made_are_closed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = Scratch.make(str(tmp_path / "a" / "b"), "run")
    finally:
        os.umask(before)
    assert [oct(p.stat().st_mode & 0o777) for p in (tmp_path / "a", tmp_path / "a" / "b", made.path)] == ["0o700"] * 3
    made.remove()


def test_home_of_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task may change the folder of its worker: files that were written before are still found."""
    monkeypatch.chdir(tmp_path)
    home = home_of("scratch")
    monkeypatch.chdir("/")
    assert home == tmp_path / "scratch"

"""Secrets lie in files that only their owner can open, and in folders that nobody else can change."""

import json
import os
import pwd
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import leaks
import pytest
from shared_host import NEIGHBOUR, as_neighbour, by_root
from waiting import aside, scaled

from hpcgpu.deploy.network import scheduler_file
from hpcgpu.errors import ConfigError, HpcGpuError, LaunchError, TrustError
from hpcgpu.host import path_writers, private
from hpcgpu.host.private import claim, release
from hpcgpu.host.scratch import Scratch, expanded, home_of, sweep, trust_note
from hpcgpu.spill.store.buffer import GpuSpillBuffer


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_folder_and_file_are_closed_to_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = private.make_folder(tmp_path / "x" / "y" / "a")
        private.write(folder / "key", "secret\udcff")  # of a variable that is no UTF-8
        made = Scratch.make(str(tmp_path / "scratch" / "b"), "run")
    finally:
        os.umask(before)
    assert (mode(folder), mode(folder / "key")) == (0o700, 0o600)
    above = (tmp_path / "x", tmp_path / "x" / "y", tmp_path / "scratch", tmp_path / "scratch" / "b", made.path)
    assert [mode(p) for p in above] == [0o700] * 5
    made.remove()
    assert (folder / "key").read_bytes() == b"secret\xff"
    assert [p.name for p in folder.iterdir()] == ["key"]


def test_what_others_can_open_and_links_are_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(HpcGpuError, match="mode 0700"):
        private.make_folder(tmp_path / "open")
    private.write(tmp_path / "key", "secret")
    (tmp_path / "key").chmod(0o640)
    with pytest.raises(HpcGpuError, match="mode was changed"):
        private.read(tmp_path / "key")
    (tmp_path / "target").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="link"):
        private.read(tmp_path / "link")
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "folder").symlink_to(tmp_path / "real")
    with pytest.raises(HpcGpuError):
        private.make_folder(tmp_path / "folder")


def test_a_new_file_takes_the_place_of_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "target").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "fifo")
    before = os.umask(0)
    try:
        for name in ("link", "fifo", "new"):
            with private.open_new(tmp_path / name) as f:
                f.write(b"mine")
            assert (mode(tmp_path / name), (tmp_path / name).read_text()) == (0o600, "mine")
    finally:
        os.umask(before)
    assert (tmp_path / "target").read_text() == "x"


def test_a_home_that_cannot_be_written_is_said_with_what_to_do(tmp_path: Path) -> None:
    before = leaks.resources()
    with pytest.raises(IsADirectoryError):  # a folder in place of a file costs no descriptor
        private.read(tmp_path)
    assert leaks.came_since(before) == []
    (tmp_path / "file").touch()
    with pytest.raises(HpcGpuError, match=r"cannot be written to .*/runs: Not a directory\. They need"):
        scheduler_file.make_folder(tmp_path / "file" / ".hpcgpu" / "runs")


def test_a_scheduler_file_of_another_life_is_not_taken(tmp_path: Path) -> None:
    folder = scheduler_file.make_folder(tmp_path / "runs")
    facts = scheduler_file.SchedulerFile(addresses=("tls://10.0.0.1:1",), node="n1", job_id="7", cert="C", key="K")
    assert scheduler_file.read(folder) is None
    scheduler_file.publish(folder, facts)
    found = scheduler_file.read(folder)
    assert found is not None
    assert (found.addresses, found.node, found.job_id, found.key) == (facts.addresses, "n1", "7", "K")
    private.write(folder / "nonce", "another life's")
    with pytest.raises(TrustError, match="scheduler was not written by the scheduler of this run"):
        scheduler_file.read(folder)
    secret = scheduler_file.SchedulerFile(addresses=(), node="", key="KEY", nonce="NONCE", dashboard_secret="SECRET")
    assert not any(word in repr(secret) for word in ("KEY", "NONCE", "SECRET"))


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"addresses": "tls://10.0.0.1:1"}, "$.addresses"),
        ({"addresses": [1]}, "$.addresses[0]"),
        ({"restart_count": "1"}, "$.restart_count"),
        ({"dashboard_port": None}, "$.dashboard_port"),
        ({"key": 5}, "$.key"),
        ({"colour": 1}, "$.colour"),
        *(
            (text, "")
            for text in ('{"addresses": ["tls://10', "[]", '{"key": "KEY"}', '{"addresses": [], "colour": 1}')
        ),
    ],
)
def test_damaged_scheduler_file_is_named_without_its_key(
    tmp_path: Path, changes: dict[str, object] | str, path: str
) -> None:
    folder = scheduler_file.make_folder(tmp_path / "runs")
    scheduler_file.publish(folder, scheduler_file.SchedulerFile(addresses=(), node="n1", key="KEY"))
    facts = json.loads(private.read(folder / "scheduler"))
    private.write(folder / "scheduler", changes if isinstance(changes, str) else json.dumps(facts | changes))
    with pytest.raises(TrustError, match=re.escape(f"{folder / 'scheduler'} is damaged, or of another")) as caught:
        scheduler_file.read(folder)
    assert (f"at `{path}`" if path else "scheduler") in str(caught.value)
    assert "KEY" not in str(caught.value)


def test_a_folder_of_a_node_whose_name_is_longer_stays(tmp_path: Path) -> None:
    """On a shared file system this node may not see its lock."""
    mine = Scratch.make(str(tmp_path), "run")
    name = mine.path.name
    mine.remove()
    (tmp_path / f"{name[:-8]}2-{name[-8:]}").mkdir()
    (tmp_path / name).mkdir()
    sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name[:-8]}2-{name[-8:]}"]


def test_a_folder_is_named_as_sites_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert expanded("~/a") == "/home/me/a"
    assert expanded("/scratch/$SLURM_JOB_ID/${SLURM_JOB_ID}x") == "/scratch/17/17x"
    assert expanded("/odd $(id) 5$/é") == "/odd $(id) 5$/é"
    with pytest.raises(ConfigError, match=r"local_directory='\$NOT_HERE/x': NOT_HERE is not set on"):
        expanded("$NOT_HERE/x")
    with pytest.raises(ConfigError, match="local_directory='~nobody-at-all/x'"):
        expanded("~nobody-at-all/x")


def test_claim_is_one_processes_until_its_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    takes = [aside(lambda: claim("launch", "GPU-1", 0)) for _ in range(16)]
    (taken,) = [fd for take in takes if (fd := take.result(scaled(30))) is not None]
    other = claim("launch", "GPU-1", 1)
    assert other is not None
    (path,) = (tmp_path / ".hpcgpu" / "user").iterdir()
    assert (mode(path.parent), mode(path), path.stat().st_size) == (0o700, 0o600, 0)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[taken]):  # a child keeps nothing
        release(taken)
        again = claim("launch", "GPU-1", 0)
    assert again is not None
    for each in (other, again):
        release(each)


def test_claim_of_a_killed_process_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    killed = "import os; from hpcgpu.host.private import claim; assert claim(0); assert claim(0) is None; os._exit(9)"
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    descriptor = claim(0)
    assert descriptor is not None
    release(descriptor)


@pytest.mark.parametrize("home", ["/proc/none", "shared"])
def test_claim_without_a_private_home_is_made_in_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    folder = tmp_path / home  # /proc/none stays itself
    monkeypatch.setenv("HOME", str(folder))
    if home == "shared":
        (folder / ".hpcgpu/user").mkdir(parents=True)
        (folder / ".hpcgpu/user").chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    descriptor = claim(0)
    assert descriptor is not None
    release(descriptor)
    (tmp_path / f"hpcgpu-{os.getuid()}").chmod(0o777)
    with pytest.raises(LaunchError, match=r"no file can be locked.*(/proc/none|chmod 700).*HOME or TMPDIR"):
        claim(0)


@by_root
@pytest.mark.parametrize("look", [private.mode_of, private.files_in])
def test_what_cannot_be_seen_is_not_called_missing(tmp_path: Path, look: Callable[[Path], object]) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed" / "in" / "it").mkdir(parents=True)
    assert look(tmp_path / "closed" / "in") != look(tmp_path / "none")

    def see() -> None:
        with pytest.raises(PermissionError):
            look(tmp_path / "closed" / "in")

    as_neighbour(see)


@by_root
def test_another_user_cannot_be_there_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch, GPU and number can be guessed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # a test's own folders are closed to a neighbour
        monkeypatch.setenv("HOME", home)
        descriptor = claim("launch", "GPU-1", 0)
        assert descriptor is not None
        Path(home).chmod(0o755)

        def guess() -> None:
            with pytest.raises(PermissionError):
                Path(home, ".hpcgpu", "user", "claims").read_bytes()

        as_neighbour(guess)
        release(descriptor)


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
    assert path_writers.changed_by(folder(tmp_path, mode)) == ""
    assert path_writers.changed_by(tmp_path / "not" / "there" / "yet") == ""


def test_changed_by_with_an_open_folder_names_it(tmp_path: Path) -> None:
    below = folder(tmp_path, 0o777)
    (tmp_path / "link").symlink_to(below)
    who = f"every user of this node can replace files in {below.parent} (mode 0777)"
    assert path_writers.changed_by(below) == path_writers.changed_by(tmp_path / "link" / "x") == who


@by_root
def test_a_group_can(tmp_path: Path) -> None:
    below = folder(tmp_path, 0o2770, group=NEIGHBOUR)
    assert path_writers.changed_by(below).startswith(f"every member of group {NEIGHBOUR} ")


def test_a_group_of_this_user_alone_is_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = folder(tmp_path, 0o775)
    me = pwd.getpwuid(os.getuid())

    def group(name: str, *members: str) -> Callable[[int], object]:
        return lambda gid: path_writers.grp.struct_group((name, "x", me.pw_gid, list(members)))

    monkeypatch.setattr(path_writers.grp, "getgrgid", group(me.pw_name, me.pw_name))
    assert path_writers.changed_by(below) == ""
    monkeypatch.setattr(path_writers.grp, "getgrgid", group(me.pw_name, me.pw_name, "eve"))
    assert "every member of group" in path_writers.changed_by(below)
    monkeypatch.setattr(path_writers.grp, "getgrgid", group("users"))
    assert "every member of group users" in path_writers.changed_by(below)
    monkeypatch.setattr(path_writers.grp, "getgrgid", group(me.pw_name))
    bob = pwd.struct_passwd(("bob", "x", me.pw_uid + 1, me.pw_gid, "", "/", ""))  # whose primary group it is
    monkeypatch.setattr(path_writers.pwd, "getpwall", lambda: [me, bob])
    assert "every member of group" in path_writers.changed_by(below)


def posix_acl(**named: tuple[int, int]) -> bytes:
    """Return an access control list: rwx for all that are named by tag, and the mask's permissions."""
    tags = {"user": 0x02, "group": 0x08, "mask": 0x10}
    entries = [(0x01, 7, -1), *((tags[tag], *entry) for tag, entry in named.items()), (0x04, 7, -1), (0x20, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in sorted(entries))


@pytest.mark.parametrize(
    ("named", "who"),
    [
        ({"user": (7, NEIGHBOUR), "mask": (7, -1)}, f"user {NEIGHBOUR}, by an access control list"),
        ({"group": (6, NEIGHBOUR), "mask": (7, -1)}, f"every member of group {NEIGHBOUR}, by an access control list"),
        ({"user": (7, NEIGHBOUR), "mask": (5, -1)}, ""),
        ({"user": (5, NEIGHBOUR), "mask": (7, -1)}, ""),
        ({"user": (7, os.getuid()), "mask": (7, -1)}, ""),
    ],
)
def test_changed_by_reads_an_access_control_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: dict[str, tuple[int, int]], who: str
) -> None:
    me = pwd.getpwuid(os.getuid())
    mine = path_writers.grp.struct_group((me.pw_name, "x", me.pw_gid, []))
    monkeypatch.setattr(path_writers.grp, "getgrgid", {me.pw_gid: mine}.__getitem__)
    monkeypatch.setattr(path_writers.pwd, "getpwall", lambda: [me])
    below = folder(tmp_path, 0o770)
    try:
        os.setxattr(below.parent, "system.posix_acl_access", posix_acl(**named))
    except OSError as e:
        pytest.skip(f"the file system of {tmp_path} has no access control lists: {e}")
    assert path_writers.changed_by(below).startswith(who)
    assert bool(path_writers.changed_by(below)) == bool(who)


def test_default_access_control_list_gives_no_rights(tmp_path: Path) -> None:
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", posix_acl(user=(7, NEIGHBOUR), mask=(7, -1)))
    except OSError as e:
        pytest.skip(f"the file system of {tmp_path} has no access control lists: {e}")
    private.write(private.make_folder(tmp_path / "x" / "a") / "key", "secret")
    made = Scratch.make(str(tmp_path / "scratch"), "run")
    for path in (tmp_path / "x", tmp_path / "x" / "a", tmp_path / "x" / "a" / "key", made.path):
        (mask,) = re.findall(rb"\x10\x00(.)\x00", os.getxattr(path, "system.posix_acl_access"))
        assert mask == b"\0"
    made.remove()


@pytest.mark.parametrize(
    ("who", "kind", "flags", "mask", "writer"),
    [
        ("eve@site.org", 0, 0x00, 0x02, "user eve@site.org"),
        ("proj@site.org", 0, 0x40, 0x40, "every member of group proj@site.org"),
        ("eve@site.org", 0, 0x08, 0x02, ""),  # for new files only
        ("eve@site.org", 1, 0x00, 0x02, ""),  # denied
        ("eve@site.org", 0, 0x00, 0x81, ""),  # may read
        ("GROUP@", 0, 0x40, 0x02, ""),  # in the mode
        (f"{pwd.getpwuid(os.getuid()).pw_name}@site.org", 0, 0x00, 0x02, ""),
    ],
)
def test_changed_by_reads_a_list_of_nfs4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, kind: int, flags: int, mask: int, writer: str
) -> None:
    """Built as RFC 7530 has it: no server of NFSv4 is here."""
    aces = [("OWNER@", 0, 0, 0x1601FF), (who, kind, flags, mask)]
    packed = [struct.pack(">IIII", k, f, m, len(w)) + w.encode() + bytes(-len(w) % 4) for w, k, f, m in aces]
    acl = struct.pack(">I", len(aces)) + b"".join(packed)
    below = folder(tmp_path, 0o750)
    lists = {(below.parent, "system.nfs4_acl"): acl}
    monkeypatch.setattr(path_writers, "_attribute", lambda path, name: lists.get((path, name), b""))
    assert path_writers.changed_by(below).startswith(writer)
    assert bool(path_writers.changed_by(below)) == bool(writer)


def test_changed_by_new_files_looks_at_the_last_folder_only(tmp_path: Path) -> None:
    below = folder(tmp_path, 0o1777)
    assert path_writers.changed_by(below, by_new_files=True) == ""
    assert path_writers.changed_by(below.parent, by_new_files=True).startswith("every user of this node can add files")


@by_root
@pytest.mark.parametrize("mode", [0o700, 0o1777])
def test_changed_by_with_a_foreign_owner_names_it(tmp_path: Path, mode: int) -> None:
    below = folder(tmp_path, mode, owner=NEIGHBOUR)
    assert path_writers.changed_by(below) == f"{below.parent} belongs to user {NEIGHBOUR}, who can replace files in it"


@by_root
def test_changed_by_with_a_foreign_link_names_its_owner(tmp_path: Path) -> None:
    shared, mine = tmp_path / "tmp", tmp_path / "mine"
    shared.mkdir()
    shared.chmod(0o1777)
    mine.mkdir(mode=0o700)
    link = shared / "link"
    link.symlink_to("../mine")
    assert path_writers.changed_by(link / "x") == ""
    os.lchown(link, NEIGHBOUR, NEIGHBOUR)
    assert path_writers.changed_by(link / "x") == f"{link} belongs to user {NEIGHBOUR}, who can replace files in it"
    shared.chmod(0o755)
    assert path_writers.changed_by(link / "x") == ""  # made by root, or with root's permission


@by_root
def test_an_unknown_owner_is_root_only_where_root_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = int(Path("/proc/sys/kernel/overflowuid").read_text())
    below = folder(tmp_path, 0o755, owner=unknown)
    monkeypatch.setattr(path_writers, "_ALL_IDS", [])
    assert path_writers.changed_by(below) == ""
    monkeypatch.setattr(path_writers, "_ALL_IDS", Path("/proc/self/uid_map").read_text().split())
    assert f"{below.parent} belongs to user" in path_writers.changed_by(below)


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


def test_home_of_a_relative_folder_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task may change the folder of its worker: files that were written before are still found."""
    monkeypatch.chdir(tmp_path)
    home = home_of("scratch")
    monkeypatch.chdir("/")
    assert home == tmp_path / "scratch"

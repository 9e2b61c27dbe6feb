"""Ranks start from a copy of their Python environment on their node, or plainly where there can be none."""

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from waiting import scaled, until

from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import environment, process, run_paths, stage
from hpcgpu.host.archive import Archive, archive_of
from hpcgpu.host.environment import Environment, kind_of
from hpcgpu.host.scratch import Mount, Scratch, expanded, sweep
from hpcgpu.model import Settings

# It stands for the environment's Python: what the shell asks of it, and a rank, which ends with its standard input.
PYTHON = """\
#!/bin/sh
case $1 in
-c) exit 0 ;;
-I) shift 2; exec {python} -I -S "$@" ;;
esac
echo "$0 $*"
read -r _
"""
LAUNCH = "abcdefgh0123"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small Python environment, and a home for its archive."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    program = tmp_path / "env/bin/python"
    program.parent.mkdir(parents=True)
    program.write_text(PYTHON.format(python=sys.executable))
    program.chmod(0o755)
    return tmp_path / "env"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """A folder on the disk of a node, in which nothing is left at the end."""
    folder = tmp_path / "node"
    folder.mkdir()
    yield folder
    until(lambda: not list(folder.iterdir()), "nothing is left on the node")


def of(tree: Path, **more: tuple[str, ...] | str) -> Environment:
    return Environment(**{"kind": "module", "python": f"{tree}/bin/python", "prefixes": (str(tree),), **more})


def copies(archive: Archive) -> dict[str, tarfile.TarInfo]:
    if archive.path.suffix == ".zst":
        with subprocess.Popen(["zstd", "-dqc", archive.path], stdout=subprocess.PIPE) as unpacker:
            assert unpacker.stdout
            with tarfile.open(fileobj=unpacker.stdout, mode="r|") as tar:
                return {f"/{info.name}": info for info in tar}
    with tarfile.open(archive.path) as tar:
        return {f"/{info.name}": info for info in tar}


def rank(
    tree: Path, node: Path, archive: Archive | None = None, here: Environment | None = None, **more: bool
) -> subprocess.Popen[str]:
    """Start a rank as a launcher does."""
    here, plain = here or of(tree), (f"{tree}/bin/python", "-m", "rank")
    settings = Settings(local_directory=str(node), **more)
    argv = stage.command(plain, here, archive or archive_of(here), settings, LAUNCH)
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def first_line(started: subprocess.Popen[str]) -> str:
    assert started.stdout
    return started.stdout.readline().rstrip("\n")


def plainly(tree: Path, node: Path, archive: Archive | None = None) -> str:
    """Start a rank that has to start from its own place; return why."""
    out, err = rank(tree, node, archive).communicate(timeout=scaled(60))
    assert out == f"{tree}/bin/python -m rank\n"
    assert "Python starts from its own place" in err
    assert err.count("\n") == 1
    return err


def test_ranks_of_a_node_share_one_copy_until_the_last_ends(tree: Path, node: Path) -> None:
    archive = archive_of(of(tree))
    ranks = [rank(tree, node, archive) for _ in range(3)]
    (folder,) = {first_line(each).partition("/root")[0] for each in ranks}
    assert Path(folder).parent == node
    assert [oct(path.stat().st_mode & 0o077) for path in (Path(folder), Path(folder, ".lock"))] == ["0o0"] * 2
    for each in ranks[:2]:
        assert each.communicate(timeout=scaled(60)) == ("", "")
    assert Path(folder, "root").is_dir()
    with Path(folder, ".lock").open() as lock:  # the third rank holds it, as nobody who would remove the folder does
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert ranks[2].communicate(timeout=scaled(60)) == ("", "")
    until(lambda: not Path(folder).exists(), "the copy is removed")


def test_a_rank_that_leaves_waits_until_its_copy_is_gone(tree: Path, node: Path) -> None:
    code = (
        f"from hpcgpu.host import remover; import os, sys; remover.leave(sys.argv[1]); print(os.listdir({str(node)!r}))"
    )
    program = tree / "bin/python"
    program.write_text(
        program.read_text().replace("read -r _", f'exec {sys.executable} -c "{code}" "$HPCGPU_STAGED_IN"')
    )
    out, err = rank(tree, node).communicate(timeout=scaled(60))
    assert (out.splitlines()[1:], err) == (["[]"], "")


def test_modules_are_looked_for_in_the_copy_before_the_originals(tree: Path, node: Path, tmp_path: Path) -> None:
    site, early, late = tree / "lib/site-packages", tmp_path / "early", tmp_path / "late"
    for folder in (site, early, late):
        folder.mkdir(parents=True)
    (tree / "pyvenv.cfg").write_text(f"home = {tree}/bin\nversion = 3.12\n")
    program = tree / "bin/python"
    shown = f'echo "$PYTHONPATH"; cat "$HPCGPU_STAGED_IN/root{site}"/*.pth "$HPCGPU_STAGED_IN/root{tree}/pyvenv.cfg"'
    program.write_text(program.read_text().replace('echo "$0 $*"', shown))
    here = of(tree, site=str(site), early=(str(early),), late=(str(late),))
    out, err = rank(tree, node, here=here).communicate(timeout=scaled(60))
    root = f"{node}/hpcgpu-stage-{os.getuid()}-{os.uname().nodename}-{LAUNCH[:8]}/root"
    expected = [f"{root}{early}", f"{root}{late}", str(early), f"home = {root}{tree}/bin", "version = 3.12"]
    assert (out.splitlines(), err) == (expected, "")


def test_variables_of_the_environment_lead_into_the_copy(
    tree: Path, node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tree / "bin/python"
    program.write_text(
        program.read_text().replace('echo "$0 $*"', 'echo "$LD_LIBRARY_PATH $CONDA_PREFIX $OPAL_PREFIX"')
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/site/lib:{tree}/lib")
    monkeypatch.setenv("CONDA_PREFIX", str(tree))
    monkeypatch.setenv("OPAL_PREFIX", "/site/openmpi")
    started = rank(tree, node)
    root = f"{node}/hpcgpu-stage-{os.getuid()}-{os.uname().nodename}-{LAUNCH[:8]}/root"
    assert first_line(started) == f"/site/lib:{root}{tree}/lib {root}{tree} /site/openmpi"
    assert started.communicate(timeout=scaled(60)) == ("", "")


def test_folder_that_others_can_change_is_taken_if_trusted(tree: Path, node: Path) -> None:
    node.chmod(0o777)
    started = rank(tree, node, trust_local_directory=True)
    assert first_line(started).startswith(f"{node}/")
    assert started.communicate(timeout=scaled(60)) == ("", "")


def no_room(tree: Path, node: Path, made: Archive) -> Archive:
    return made._replace(nbytes=1 << 60)


def foreign(tree: Path, node: Path, made: Archive) -> Archive:
    (node / f"hpcgpu-stage-{os.getuid()}-{os.uname().nodename}-{LAUNCH[:8]}").mkdir(mode=0o755)
    return made


def open_to_others(tree: Path, node: Path, made: Archive) -> Archive:
    node.chmod(0o777)
    return made


def changed(tree: Path, node: Path, made: Archive) -> Archive:
    with made.path.open("r+b") as f:
        f.write(b"\0")
    return made


def half_written(tree: Path, node: Path, made: Archive) -> Archive:
    os.truncate(made.path, made.path.stat().st_size // 2)
    return made


def no_exec(tree: Path, node: Path, made: Archive) -> Archive:
    (tree / "bin/python").chmod(0o644)  # in the copy no program can be executed, as where it is mounted noexec
    made = archive_of(of(tree))
    (tree / "bin/python").chmod(0o755)
    return made


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (no_room, "MiB free, and a copy needs"),
        (foreign, "is not a folder of this user alone"),
        (open_to_others, "other users can change"),
        (changed, "has changed since it was made"),
        (half_written, "has changed since it was made"),
        (no_exec, "Python does not start in"),
        (lambda tree, node, made: (made.path.unlink(), made)[1], "cannot be copied"),
    ],
)
def test_ranks_start_plainly_where_no_copy_can_be(
    tree: Path, node: Path, harm: Callable[[Path, Path, Archive], Archive], why: str
) -> None:
    made = archive_of(of(tree))
    assert why in plainly(tree, node, harm(tree, node, made))
    until(lambda: len(list(node.iterdir())) == (harm is foreign), "no copy is left")
    shutil.rmtree(node)
    node.mkdir()


def test_whichever_rank_unpacks_says_why_it_fails(tree: Path, node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    made = archive_of(of(tree))
    made.path.unlink()
    assert "cannot be copied" in plainly(tree, node, made)


def test_warnings_of_programs_prevent_no_copy(tree: Path, node: Path) -> None:
    program = tree / "bin/python"
    program.write_text(program.read_text().replace("-c) exit 0", "-c) echo a warning >&2; exit 0"))
    started = rank(tree, node)
    assert first_line(started).startswith(f"{node}/")
    assert started.communicate(timeout=scaled(60)) == ("", "")


@pytest.fixture
def sbcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An sbcast of a job whose nodes are this machine."""
    program = tmp_path / "programs/sbcast"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nexec cp "$2" "$3"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    return program


def test_a_node_takes_what_sbcast_has_sent(tree: Path, node: Path, sbcast: Path) -> None:
    made = archive_of(of(tree))
    stage.send(made, Settings(local_directory=str(node)), LAUNCH)
    made.path.unlink()  # nothing is read from the shared file system
    started = rank(tree, node, made)
    assert first_line(started).startswith(f"{node}/")
    assert started.communicate(timeout=scaled(60)) == ("", "")


def test_sbcast_that_fails_is_told(tree: Path, node: Path, sbcast: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sbcast.write_text("#!/bin/sh\necho sbcast: error: no job >&2; exit 1\n")
    stage.send(archive_of(of(tree)), Settings(local_directory=str(node)), LAUNCH)
    assert "sbcast: error: no job" in capsys.readouterr().err


def test_a_folder_of_a_path_with_blanks_has_no_copy(tree: Path, tmp_path: Path) -> None:
    assert "characters that a copy cannot have" in plainly(tree, tmp_path / "a b")


def test_copy_of_a_dead_run_is_removed_by_the_next(node: Path) -> None:
    name = f"hpcgpu-stage-{os.getuid()}-{os.uname().nodename}-"
    for each in ("deadbeef", "livebeef"):
        (node / f"{name}{each}/root/bin").mkdir(parents=True)
    (node / f"{name}deadbeef/.lock").touch()
    with (node / f"{name}livebeef/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        Scratch.make(str(node), "run").remove()
        assert [path.name for path in node.iterdir()] == [f"{name}livebeef"]
    sweep(node)


def test_archive_is_made_once_for_each_content(tree: Path) -> None:
    first = archive_of(of(tree))
    made = first.path.stat().st_ino
    assert archive_of(of(tree)) == first
    assert first.path.stat().st_ino == made
    assert (first.path.stat().st_mode & 0o777, first.path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    (tree / "module.py").write_text("x = 1")
    second = archive_of(of(tree))
    assert second.path != first.path
    assert not first.path.exists()
    assert archive_of(of(tree, python=f"{tree}/bin/python3")).path != second.path  # of another Python


def test_archive_that_no_job_uses_is_removed(tree: Path) -> None:
    used, unused = of(tree), of(tree, early=(str(tree.parent),))
    old = archive_of(unused).path
    for each in (old, archive_of(used).path):
        os.utime(each, (0, 0))
    archive_of(used)
    assert not old.exists()
    again = archive_of(used).path
    made = again.stat().st_ino
    assert archive_of(used).path.stat().st_ino == made  # its use counts


@pytest.mark.parametrize("harm", [changed, half_written])
def test_archive_that_is_not_whole_is_made_again(tree: Path, node: Path, harm: Callable[..., Archive]) -> None:
    made = archive_of(of(tree))
    part = made.path.with_name(f".{made.path.name}.1")
    part.write_bytes(b"half")  # by a process that was killed
    harm(tree, node, made)
    again = archive_of(of(tree))
    assert again.path == made.path
    assert f"{tree}/bin/python" in copies(again)
    assert not part.exists()


def test_archive_that_others_could_read_is_made_again(tree: Path) -> None:
    made = archive_of(of(tree))
    made.path.chmod(0o644)
    assert archive_of(of(tree)).path.stat().st_mode & 0o777 == 0o600


def test_links_lead_into_the_copy_where_their_files_are(tree: Path) -> None:
    (tree / "bin/inside").symlink_to(tree / "lib/x.so")
    (tree / "bin/outside").symlink_to("/usr/lib/y.so")
    (tree / "bin/above").symlink_to("../../other/z.so")
    found = copies(archive_of(of(tree)))
    links = {name: found[f"{tree}/bin/{name}"].linkname for name in ("inside", "outside", "above")}
    assert links == {"inside": "../lib/x.so", "outside": "/usr/lib/y.so", "above": f"{tree.parent}/other/z.so"}


def test_programs_find_their_libraries_in_the_copy(tree: Path, tmp_path: Path) -> None:
    (tree / "lib").mkdir()
    (tmp_path / "x.c").write_text("int ours(void) { return 42; }")
    (tmp_path / "main.c").write_text("int ours(void); int main(void) { return ours(); }")
    library, program, copy = tree / "lib/libx.so", tree / "bin/main", tmp_path / "copy"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "x.c"], check=True)
    path = f"-Wl,-rpath,/nowhere:{tree}/lib/where/there/is/none:{tree}/lib"
    subprocess.run(["gcc", "-o", program, tmp_path / "main.c", f"-L{tree}/lib", "-lx", path], check=True)
    content = program.read_bytes()
    assert run_paths.relocated(content, str(program), ("/other",)) == content
    program.write_bytes(run_paths.relocated(content, str(program), (str(tree),)))
    shutil.move(tree, copy)
    assert subprocess.run([copy / "bin/main"], check=False).returncode == 42
    shutil.move(copy / "lib", copy / "elsewhere")  # it had found it there alone
    assert subprocess.run([copy / "bin/main"], capture_output=True, check=False).returncode == 127


@given(st.binary(max_size=300))
def test_files_that_are_no_programs_stay_as_they_are(data: bytes) -> None:
    for content in (data, run_paths.MAGIC + data):
        assert run_paths.relocated(content, "/env/x", ("/env",)) == content


def test_of_a_project_modules_and_packages_are_copied(tree: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("package/__init__.py", "package/table.csv", "module.py", "data/huge.bin", ".git/index"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text("x")
    inside = {name for name in copies(archive_of(of(tree, early=(str(project),)))) if name.startswith(str(project))}
    assert inside == {f"{project}/{n}" for n in ("package", "package/__init__.py", "package/table.csv", "module.py")}


def test_environment_of_this_venv_is_read() -> None:
    here = environment.read(sys.executable)
    assert (here.kind, here.prefixes[0]) == ("venv", sys.prefix)
    assert here.site.startswith(sys.prefix)
    assert not set(here.prefixes) & {*here.early, *here.late}


def test_editable_installs_that_stay_in_their_place_are_named(tree: Path) -> None:
    for name in ("__editable___mine_1_0_finder.py", "__editable__.mine-1.0.pth", "numpy.py"):
        (tree / name).touch()
    assert environment.editable(of(tree, site=str(tree))) == ("__editable___mine_1_0_finder",)
    assert environment.editable(of(tree)) == ()


def test_program_that_starts_another_python_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    with pytest.raises(LaunchError, match="is no Python, but starts"):
        environment.read(str(program))


@pytest.mark.parametrize(
    ("prefix", "base", "mount", "conda", "kind"),
    [
        ("/home/me/env", "/usr", "nfs", False, "venv"),
        ("/home/me/conda/envs/x", "/home/me/conda/envs/x", "lustre", True, "conda"),
        ("/apps/python/3.12", "/apps/python/3.12", "nfs", False, "module"),
        ("/usr", "/usr", "ext4", False, "system"),
        ("/usr", "/usr", "nfs4", False, "module"),  # diskless nodes
        ("/opt/env", "/usr", "overlay", False, "container"),
        ("/opt/conda", "/opt/conda", "squashfs", True, "container"),
    ],
)
def test_kinds_of_environments(prefix: str, base: str, mount: str, conda: bool, kind: str) -> None:
    assert kind_of(prefix, base, Mount("/", mount, "x"), has_conda=conda) == kind


def test_failure_to_make_an_archive_is_told_and_starts_plainly(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home/.hpcgpu").write_text("in the way")
    argv = (sys.executable, "-m", "hpcgpu.agent")
    assert stage.staged(argv, Settings(environment="stage"), LAUNCH, sends=False) == argv
    assert "Python starts from its own place (environment='stage'" in capsys.readouterr().err


PARTS = [*"ab/.-_ \"'\\`$(){}!*;&|<>#~%=é", "$HOME", "${HOME}", "$(", "$1"]


@given(st.lists(st.sampled_from(PARTS)).map("".join))
@hypothesis_settings(max_examples=60)
def test_folder_means_the_same_to_a_shell_as_to_python(text: str) -> None:
    folder = str(Path(f"/{text}"))
    try:
        meant = expanded(folder)
    except ConfigError:  # of a variable that is not set, which ends a run in any case
        assume(False)
    line = 'eval "parent=\\"$1\\""; printf %s "$parent"'
    shown = subprocess.run(
        ["/bin/sh", "-c", line, "sh", stage.parent(folder)], capture_output=True, text=True, check=True
    )
    assert shown.stdout == meant


def test_original_of_a_copied_python_is_found() -> None:
    assert process.original("/tmp/hpcgpu-stage-0-n1-abcdefgh/root/home/me/env/bin/python") == "/home/me/env/bin/python"
    assert process.original("/home/me/env/bin/python") == "/home/me/env/bin/python"

"""``hpcgpu launch`` ends as its script did, whatever its launcher says, and passes signals on to that."""

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ranks
import two_nodes
from waiting import scaled, until

from hpcgpu import LocalGPUCluster

# The daemon of Open MPI on the other node; its parent, of the same name, stands for the ssh that started it.
LOSE_A_NODE = """
import pathlib, psutil
with Client() as c:
    c.wait_for_workers(4)
    home = os.environ["HOME"]
    found = psutil.process_iter(["name", "environ"])  # None: of another user
    daemons = [p for p in found if p.info["name"] == "prted" and (p.info["environ"] or {}).get("HOME") == home]
    pathlib.Path(home, "killed").write_text(str(daemons))  # what is printed now mpirun may lose with the daemon
    next(p for p in daemons if p.parent() in daemons).kill()
    time.sleep(600)
"""
# It computes, then ends as it is told.
COMPUTES = """
with Client() as c:
    assert c.submit(sum, [1, 2]).result() == 3
end = int(sys.argv[1])
os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
"""
# An mpirun in name: it gets our flags, and does what a test wants.
MPIRUN = """\
#!/bin/bash
[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.11" && exit
while [ "$1" != -n ]; do shift; done
shift 2
{does}
"""
# What rank 0 does last.
ENDED = 'cd "$HOME"/.hpcgpu/launches/* && (umask 77; echo 3 > exit)'
TELL_SIGNALS = """\
for name in TERM INT HUP QUIT USR1 USR2; do trap "echo $name >> {folder}/heard" $name; done
touch {folder}/heard
while ! [ -e {folder}/over ]; do sleep 0.05; done
exit 3
"""
# The launcher's signals are no business of a rank, which mpirun starts without any that is blocked.
RANK = """
import pathlib, signal
signal.pthread_sigmask(signal.SIG_SETMASK, [])
signal.signal(signal.SIGTERM, lambda *_: heard.write_text("rank") and exit())
heard = pathlib.Path(__file__).with_name("heard")
heard.touch()
signal.pause()
"""


def argv(folder: Path, does: str, first: str = MPIRUN) -> list[str]:
    """Write a launcher, and return the command line of a launch with it."""
    path = folder / "mpirun"
    path.write_text(first.format(does=does.format(folder=folder)))
    path.chmod(0o755)
    words = ["--launcher", str(path), "--gpus", "sim:1"]
    return [str(ranks.BIN / "hpcgpu"), "launch", *words, str(ranks.script(folder, "pass"))]


def left(home: Path) -> list[Path]:
    return list((home / ".hpcgpu" / "launches").iterdir())


def test_a_lost_node_is_no_success(tmp_path: Path) -> None:
    script = ranks.script(tmp_path, LOSE_A_NODE)
    inside = [*two_nodes.prefix(tmp_path), str(ranks.BIN / "hpcgpu"), "launch", "--gpus", "sim:2", str(script)]
    done = ranks.run_command(inside, two_nodes.environment(tmp_path), scaled(120))
    assert "prted" in (tmp_path / "killed").read_text(), done.stderr
    assert "lost communication with a remote daemon" in done.stderr
    # mpirun ends rank 0, which has the time to say so, or not
    assert done.returncode in (128 + signal.SIGTERM, os.EX_SOFTWARE), done.stderr
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    ("does", "code", "words"),
    [
        ("exit 0", os.EX_SOFTWARE, "the run has not ended, though the launcher says 0"),
        ("exit 5", 5, ""),
        ("kill -KILL $$", 128 + signal.SIGKILL, ""),
        (f"{ENDED}; kill -KILL $$", 128 + signal.SIGKILL, ""),
        (f"{ENDED}; exit 0", 3, ""),
        (f"{ENDED}; exit 9", 3, ""),
        ('rm -r "$HOME"/.hpcgpu/launches/*; exec "$@"', 1, "Start it on the first node of the job, or set HOME"),
    ],
    ids=["no-end", "failed", "killed", "killed-after-the-end", "lost-the-code", "other-code", "no-folder"],
)
def test_the_end_is_what_rank_0_wrote(tmp_path: Path, does: str, code: int, words: str) -> None:
    done = ranks.run_command(argv(tmp_path, does))
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert left(tmp_path) == []


def test_without_a_home_a_temporary_folder_takes_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    words = argv(tmp_path, ENDED.replace('"$HOME"/.hpcgpu/launches/*', '"$TMPDIR"/hpcgpu-end-*'))
    done = ranks.run_command(words, {"HOME": "/dev/null", "TMPDIR": str(tmp_path / "t")})
    assert done.returncode == 3, done.stderr
    assert list((tmp_path / "t").glob("hpcgpu-end-*")) == []


def test_a_launcher_that_cannot_be_executed_is_an_error(tmp_path: Path) -> None:
    broken = MPIRUN.replace("&& exit", "&& echo '#!/not/there' > $0 && exit", 1)
    done = ranks.run_command(argv(tmp_path, "exit 0", broken))
    assert done.returncode == 1
    assert "the ranks could not be started" in done.stderr
    assert left(tmp_path) == []


@contextlib.contextmanager
def listening(folder: Path, *before: str) -> Iterator[tuple[subprocess.Popen[bytes], Callable[[int], list[str]]]]:
    """Start a launch whose launcher writes down its signals; yield it, and a function that waits for so many."""
    heard = folder / "heard"

    def until_heard(count: int) -> list[str]:
        return until(lambda: (names := heard.read_text().split())[count - 1 :] and names, f"{count} signals are heard")

    words = [*before, *argv(folder, TELL_SIGNALS)]
    with subprocess.Popen(words, env=ranks.environment(HOME=str(folder)), stdin=subprocess.DEVNULL) as parent:
        until(heard.exists, "the script listens")
        yield parent, until_heard
        (folder / "over").touch()
        assert parent.wait(scaled(30)) in (3, -signal.SIGKILL)


def test_each_signal_reaches_the_launcher_once(tmp_path: Path) -> None:
    """From a parent that is small."""
    names = ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]  # one of them is ignored under nohup
    with listening(tmp_path, "env", f"--default-signal={','.join(names)}") as (parent, until_heard):
        process = psutil.Process(parent.pid)
        until(lambda: "hpcgpu.host.launcher_parent" in process.cmdline(), "the parent is there")
        until(lambda: process.status() == psutil.STATUS_SLEEPING, "the parent waits")
        assert process.memory_full_info().pss < 12 << 20
        for count, name in enumerate(names, 1):
            parent.send_signal(signal.Signals[f"SIG{name}"])
            until_heard(count)
    assert (tmp_path / "heard").read_text().split() == names


def test_sigterm_is_for_rank_0_where_mpirun_kills_its_ranks(tmp_path: Path) -> None:
    """Slurm sends it to all processes of a job, Open MPI 6.0.0rc2 then SIGKILL to its ranks."""
    (tmp_path / "rank.py").write_text(RANK)
    rank = f"PMIX_RANK=0 {sys.executable} {{folder}}/rank.py"
    does = f"trap 'echo launcher > {{folder}}/heard' TERM; {rank} & wait; exit 3"
    words = argv(tmp_path, does, MPIRUN.replace("5.0.11", "6.0.0rc2"))
    with subprocess.Popen(words, env=ranks.environment(), stdin=subprocess.DEVNULL) as parent:
        until((tmp_path / "heard").exists, "the rank listens")
        for process in (*psutil.Process(parent.pid).children(), parent):
            process.send_signal(signal.SIGTERM)
        assert parent.wait(scaled(30)) == 3
    assert (tmp_path / "heard").read_text() == "rank"


def test_ignored_signals_stay_so_but_warnings_are_passed_on(tmp_path: Path) -> None:
    with listening(tmp_path, "bash", "-c", "trap '' TERM HUP USR1; exec \"$@\"", "job") as (parent, until_heard):
        for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            parent.send_signal(sig)
        # bash cannot trap what it was started with as ignored, as SIGUSR1 is here: a launcher can
        assert until_heard(1) == ["USR2"]


def test_ctrl_c_in_a_terminal_is_one_to_the_launcher(tmp_path: Path) -> None:
    heard, words = tmp_path / "heard", argv(tmp_path, TELL_SIGNALS)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(words[0], words, ranks.environment())
    until(heard.exists, "the script listens")
    os.write(terminal, b"\x03")
    until(heard.read_text, "a signal is heard")
    os.kill(pid, signal.SIGUSR1)  # it comes after all that Ctrl-C may have caused
    until(lambda: "USR1" in heard.read_text(), "the next signal is heard")
    assert heard.read_text().split() == ["INT", "USR1"]
    (tmp_path / "over").touch()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    os.close(terminal)


def test_a_killed_parent_ends_the_launcher(tmp_path: Path) -> None:
    with listening(tmp_path) as (parent, until_heard):
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        assert until_heard(1) == ["TERM"]
    child.wait(scaled(30))
    until(lambda: left(tmp_path) == [], "its folder is removed")


def test_a_launch_removes_folders_of_killed_ones_of_its_host(tmp_path: Path) -> None:
    base = tmp_path / ".hpcgpu" / "launches"
    dead, elsewhere = base / f"{os.uname().nodename} 1 99999999999", base / "elsewhere 1 5"
    for folder in (tmp_path / ".hpcgpu", base, dead, elsewhere):
        folder.mkdir(mode=0o700)
    assert ranks.run_command(argv(tmp_path, "exit 5")).returncode == 5
    assert left(tmp_path) == [elsewhere]


@pytest.mark.parametrize(
    ("words", "output", "end", "code"),
    [
        ("run", "full", 0, 0),
        ("run", "gone", -signal.SIGKILL, 128 + signal.SIGKILL),
        ("launch --launcher mpirun", "closed", -signal.SIGKILL, 128 + signal.SIGKILL),
        ("launch --launcher mpirun", "gone", 3, 3),
    ],
)
def test_the_exit_code_is_the_scripts(tmp_path: Path, words: str, output: str, end: int, code: int) -> None:
    program = [str(ranks.BIN / "hpcgpu"), *words.split(), "--gpus", "sim:1"]
    argv = [*program, str(ranks.script(tmp_path, COMPUTES)), str(end)]
    assert ranks.run_unheard(argv, output, ranks.environment(), timeout=scaled(120)) == code


@pytest.mark.parametrize("end", [0, 3])
def test_under_mpich_the_exit_code_is_the_scripts(mpich: str, tmp_path: Path, end: int) -> None:
    """Its mpiexec sends SIGUSR1 to the other ranks when one ends."""
    argv = [str(ranks.BIN / "hpcgpu"), "launch", "--launcher", mpich, "--gpus", "sim:2"]
    library = {"MPI4PY_LIBMPI": str(Path(mpich).parents[1] / "lib" / "libmpi.so.12")}
    done = ranks.run_command([*argv, str(ranks.script(tmp_path, COMPUTES)), str(end)], library, scaled(120))
    assert done.returncode == end, done.stderr
    assert "2 workers on 1 node ready" in done.stderr
    assert "signal" not in done.stdout + done.stderr


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder that a killed mpirun has left, which has its pid; all temporary files are beside it."""
    ranks.use_environment(monkeypatch)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with subprocess.Popen([*ranks.MPIRUN, "-n", "1", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as killed:
        killed.stdin.write(b"up\n")
        killed.stdin.flush()
        assert killed.stdout.readline() == b"up\n"
        killed.send_signal(signal.SIGKILL)
    return tmp_path / f"ompi.{killed.pid}"


def test_a_launch_with_the_pid_of_a_killed_one_starts(session: Path) -> None:
    path = ranks.script(session.parent, "print(Client().submit(sum, [1, 2]).result())")
    argv = [str(ranks.BIN / "hpcgpu"), "launch", "--launcher", "mpirun", "--gpus", "sim:1", str(path)]
    hosts = "export PRTE_MCA_prte_default_hostfile=/none/hosts"  # the user's, of another machine
    first = ["sh", "-c", f'mv {session} {session.parent}/ompi.$$ && {hosts} && exec "$@"', "sh", *argv]
    done = subprocess.run(first, capture_output=True, text=True, timeout=scaled(90), stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout) == (0, "3\n"), done.stderr


def test_a_cluster_with_the_pid_of_a_killed_one_starts(session: Path) -> None:
    last = int(Path("/proc/sys/kernel/ns_last_pid").read_text())
    later = [session.with_name(f"ompi.{pid}") for pid in range(last + 1, last + 400)]
    for folder in later:
        shutil.copytree(session, folder)
    with LocalGPUCluster(gpus="sim:1", launcher="mpirun") as cluster:
        assert session.with_name(f"ompi.{cluster.job_id}") in later
        os.kill(int(cluster.job_id), 0)
    assert all(folder.exists() for folder in later)  # whosever they are

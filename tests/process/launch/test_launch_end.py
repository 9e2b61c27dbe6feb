"""``hpcgpu launch`` ends as its script did, whatever its launcher says, and passes signals on to that."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import ranks
import two_nodes
from waiting import scaled, until

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


def launcher(folder: Path, does: str) -> Path:
    path = folder / "mpirun"
    path.write_text(MPIRUN.format(does=does.format(folder=folder)))
    path.chmod(0o755)
    return path


def argv(folder: Path, does: str) -> list[str]:
    script = ranks.script(folder, "pass")
    words = ["--launcher", str(launcher(folder, does)), "--gpus", "sim:1"]
    return [str(ranks.BIN / "hpcgpu"), "launch", *words, str(script)]


def launch(words: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    env = ranks.environment(HOME=str(home))
    return subprocess.run(words, capture_output=True, text=True, timeout=scaled(60), env=env, stdin=subprocess.DEVNULL)


def left(home: Path) -> list[Path]:
    return list((home / ".hpcgpu" / "launches").iterdir())


def test_a_lost_node_is_no_success(tmp_path: Path) -> None:
    script = ranks.script(tmp_path, LOSE_A_NODE)
    words = [str(ranks.BIN / "hpcgpu"), "launch", "--gpus", "sim:2", str(script)]
    env = two_nodes.environment(tmp_path)
    inside = [*two_nodes.prefix(tmp_path), *words]
    done = subprocess.run(
        inside, capture_output=True, text=True, timeout=scaled(120), env=env, stdin=subprocess.DEVNULL
    )
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
    done = launch(argv(tmp_path, does), tmp_path)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert left(tmp_path) == []


def test_where_no_home_can_be_written_a_temporary_folder_takes_the_end(tmp_path: Path) -> None:
    env = ranks.environment(HOME="/dev/null", TMPDIR=str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    words = argv(tmp_path, ENDED.replace('"$HOME"/.hpcgpu/launches/*', '"$TMPDIR"/hpcgpu-end-*'))
    done = subprocess.run(words, capture_output=True, text=True, timeout=scaled(60), env=env, stdin=subprocess.DEVNULL)
    assert done.returncode == 3, done.stderr
    assert list((tmp_path / "t").glob("hpcgpu-end-*")) == []


def test_a_program_that_is_none_is_said(tmp_path: Path) -> None:
    words = argv(tmp_path, "exit 0")
    text = (tmp_path / "mpirun").read_text()
    (tmp_path / "mpirun").write_text(text.replace("&& exit", "&& echo '#!/not/there' > $0 && exit", 1))
    done = launch(words, tmp_path)
    assert done.returncode == 1
    assert "the ranks could not be started" in done.stderr
    assert left(tmp_path) == []


class Listening:
    """A launch whose launcher writes down the signals that it gets."""

    def __init__(self, folder: Path, before: Sequence[str] = ()) -> None:
        self.heard_file, self._over = folder / "heard", folder / "over"
        self.argv = [*before, *argv(folder, TELL_SIGNALS)]
        self.env = ranks.environment(HOME=str(folder))

    @property
    def heard(self) -> list[str]:
        return self.heard_file.read_text().split()

    def until_heard(self, count: int) -> list[str]:
        until(lambda: len(self.heard) >= count, f"{count} signals are heard")
        return self.heard

    def end(self) -> None:
        self._over.touch()


def test_each_signal_reaches_the_launcher_once(tmp_path: Path) -> None:
    names = ["TERM", "INT", "HUP", "QUIT", "USR1", "USR2"]  # one of them is ignored under nohup
    listening = Listening(tmp_path, before=["env", f"--default-signal={','.join(names)}"])
    with subprocess.Popen(listening.argv, env=listening.env, stdin=subprocess.DEVNULL) as parent:
        until(listening.heard_file.exists, "the script listens")
        for count, name in enumerate(names, 1):
            parent.send_signal(signal.Signals[f"SIG{name}"])
            listening.until_heard(count)
        listening.end()
        assert parent.wait(scaled(30)) == 3
    assert listening.heard == names


def test_what_is_ignored_stays_so_but_warnings_are_passed_on(tmp_path: Path) -> None:
    listening = Listening(tmp_path, before=["bash", "-c", "trap '' TERM HUP USR1; exec \"$@\"", "job"])
    with subprocess.Popen(listening.argv, env=listening.env, stdin=subprocess.DEVNULL) as parent:
        until(listening.heard_file.exists, "the script listens")
        for sig in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            parent.send_signal(sig)
        # bash cannot trap what it was started with as ignored, as SIGUSR1 is here: a launcher can
        assert listening.until_heard(1) == ["USR2"]
        listening.end()
        assert parent.wait(scaled(30)) == 3


def test_ctrl_c_in_a_terminal_is_one_to_the_launcher(tmp_path: Path) -> None:
    listening = Listening(tmp_path)
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(listening.argv[0], listening.argv, listening.env)
    until(listening.heard_file.exists, "the script listens")
    os.write(terminal, b"\x03")
    listening.until_heard(1)
    os.kill(pid, signal.SIGUSR1)  # what comes after all that Ctrl-C may have caused
    assert listening.until_heard(2) == ["INT", "USR1"]
    listening.end()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
    os.close(terminal)


def test_a_killed_parent_ends_the_launcher(tmp_path: Path) -> None:
    listening = Listening(tmp_path)
    with subprocess.Popen(listening.argv, env=listening.env, stdin=subprocess.DEVNULL) as parent:
        until(listening.heard_file.exists, "the script listens")
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        assert listening.until_heard(1) == ["TERM"]
        listening.end()
        child.wait(scaled(30))
    until(lambda: left(tmp_path) == [], "its folder is removed")


def test_what_a_killed_launch_left_is_cleared_away_by_the_next_of_its_host(tmp_path: Path) -> None:
    base = tmp_path / ".hpcgpu" / "launches"
    base.mkdir(parents=True)
    for folder in (tmp_path / ".hpcgpu", base):
        folder.chmod(0o700)
    dead, elsewhere = base / f"{os.uname().nodename} 1 5", base / "elsewhere 1 5"
    dead.mkdir()
    elsewhere.mkdir()
    assert launch(argv(tmp_path, "exit 5"), tmp_path).returncode == 5
    assert left(tmp_path) == [elsewhere]


def test_the_parent_is_small(tmp_path: Path) -> None:
    listening = Listening(tmp_path)
    with subprocess.Popen(listening.argv, env=listening.env, stdin=subprocess.DEVNULL) as parent:
        until(listening.heard_file.exists, "the script listens")
        until(lambda: "hpcgpu.host.launcher_parent" in psutil.Process(parent.pid).cmdline(), "the parent is there")
        until(lambda: psutil.Process(parent.pid).status() == psutil.STATUS_SLEEPING, "the parent waits")
        used = psutil.Process(parent.pid).memory_full_info().pss
        listening.end()
        assert parent.wait(scaled(30)) == 3
    assert used < 12 << 20

"""Programs that answer, hang, print much, are not there; the launcher's parent; standard error that is gone."""

import asyncio
import errno
import io
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import leaks
import psutil
import pytest
from programs import program
from waiting import scaled, until

from hpcgpu.errors import LaunchError
from hpcgpu.host import log, process
from hpcgpu.host import run as host
from hpcgpu.host.process import start_time
from hpcgpu.model import Command

# In a process of its own, as it is: with one thread, and a timer that is no test's.
WAITS = """
import signal, subprocess, sys
from hpcgpu.host import launcher_parent
path, patience_s, *argv = sys.argv[1:]
waited = {signal.SIGCHLD, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, waited)
first = lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, waited)
launcher = subprocess.Popen(argv, start_new_session=True, preexec_fn=first)
sys.exit(launcher_parent.wait(launcher.pid, path, patience_s=float(patience_s)))
"""
OPENS = """
import os, sys
from hpcgpu.host import log, process
log.open_missing()
files = [os.readlink(f"/proc/self/fd/{fd}") for fd in (0, 1, 2)]
child = os.popen("readlink /proc/self/fd/2").read().strip()
open(sys.argv[1], "w").write(repr((files, child)))
print("to nobody", file=sys.stdout)
print("to nobody", file=sys.stderr)
"""


def bash(script: str, *args: str, **more: object) -> Command:
    return Command(("bash", "-c", script, "bash", *args), **more)  # type: ignore[arg-type]


def test_program_gets_input_and_variables_and_returns_output(monkeypatch: pytest.MonkeyPatch) -> None:
    result = host.run_sync(bash('cat; echo "$A" >&2; exit 3', stdin="in é\n", env={"A": "b"}))
    assert (result.returncode, result.stdout, result.stderr) == (3, "in é\n", "b\n")
    result = host.run_sync(bash(r"printf 'a\xffb'; cat >&2", stdin=os.fsdecode(b"\xff")))
    assert (result.stdout, result.stderr) == ("a\ufffdb", "\ufffd")
    monkeypatch.setenv("OWN", "1")
    monkeypatch.setenv("OTHER", "2")
    command = bash('echo "${OWN-none} ${OTHER-none} ${A-none}"', without=frozenset({"OWN", "A"}), env={"A": "b"})
    assert host.run_sync(command).stdout == "none 2 b\n"


def test_nothing_of_a_long_input_or_output_is_lost() -> None:
    code = "import sys; sys.stdout.write('o' * 5_000_000); sys.stderr.write('e' * 3_000_000)"
    result = host.run_sync(Command((sys.executable, "-c", code)))
    assert (len(result.stdout), len(result.stderr)) == (5_000_000, 3_000_000)
    assert len(host.run_sync(Command(("cat",), stdin="x" * 3_000_000)).stdout) == 3_000_000
    assert host.run_sync(Command(("true",), stdin="x" * 3_000_000)).returncode == 0  # it does not read


def test_a_program_that_is_absent_or_no_program_has_a_code(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    for name, code, text in (("no-such-sbatch", 127, "no such program"), (str(tmp_path / "x"), 126, "executed")):
        result = host.run_sync(Command((name,)))
        assert (result.returncode, text in result.stderr) == (code, True)


def test_a_program_of_pbs_that_is_not_in_path_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "qstat-of-here", 'echo "$@"')
    (tmp_path / "pbs.conf").write_text(f"PBS_SERVER=login01\nPBS_EXEC={tmp_path}\nPBS_HOME=/var/spool/pbs\n")
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "pbs.conf"))
    assert host.located("qstat-of-here") == str(tmp_path / "bin" / "qstat-of-here")
    assert host.run_sync(Command(("qstat-of-here", "-f", "7"))).stdout == "-f 7\n"
    monkeypatch.setenv("PBS_CONF_FILE", str(tmp_path / "none"))
    assert host.run_sync(Command(("qstat-of-here",))).returncode == 127


def test_a_program_that_hangs_is_killed_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = 'trap "" TERM; echo before; echo why >&2; sleep 60 & echo $$ $! > "$1"; wait; sleep 60'
    began = time.monotonic()
    result = host.run_sync(bash(script, str(pids), timeout_s=0.5))
    assert time.monotonic() - began < 10
    assert (result.returncode, result.stdout) == (124, "before\n")
    assert result.stderr == "why\nbash: no answer in 0.5 s; it was killed\n"
    # nobody can wait for a grandchild: its end may come a moment after its SIGKILL
    until(lambda: not any(start_time(int(pid)) for pid in pids.read_text().split()), "all are gone", limit_s=20)


async def test_a_cancelled_call_leaves_nothing_running(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    task = asyncio.create_task(host.run(bash('echo $$ > "$1"; sleep 60', str(fifo))))
    pid = int(await asyncio.to_thread(fifo.read_text))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not start_time(pid)


@pytest.mark.parametrize(("turns", "cancelled"), [(n, c) for n in range(4) for c in (False, True)])
def test_run_at_the_end_of_its_loop_leaves_nothing(turns: int, cancelled: bool) -> None:
    async def main() -> None:
        task = asyncio.create_task(host.run(Command(("sleep", "60"))))
        [await asyncio.sleep(0) for _ in range(turns)]
        _ = task.cancel() if cancelled else None

    with leaks.nothing_left():  # asyncio.run cancels it, once more
        asyncio.run(main())


def no_pidfd(*_: object) -> int:
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))


@pytest.mark.parametrize("kernel", ["5.3", "4.18", "python-of-4.18"])
def test_ends_are_seen_with_and_without_a_pidfd(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel == "4.18":
        monkeypatch.setattr(os, "pidfd_open", no_pidfd)
    elif kernel == "python-of-4.18":  # built where the C library does not know it
        monkeypatch.delattr(os, "pidfd_open")
    with leaks.nothing_left():
        assert host.run_sync(bash("exit 3")).returncode == 3
        assert host.run_sync(bash("sleep 60", timeout_s=0.1)).returncode == 124
        started = host.start(Command(("sleep", "60")))
        with process.watched(started.pid, started.start_time) as end:
            assert not select.select([end], [], [], 0)[0]
            os.kill(started.pid, signal.SIGKILL)
            assert select.select([end], [], [], scaled(30))[0]
        host.end(started)
        with process.watched(started.pid, started.start_time) as end:
            assert end is None
        process.wait_for_end(started.pid, started.start_time)


def test_program_with_a_child_on_its_output_does_not_block() -> None:
    began = time.monotonic()
    result = host.run_sync(bash("setsid sleep 8 & echo $!"))
    assert time.monotonic() - began < 6
    assert result.returncode == 0
    os.kill(int(result.stdout), 9)


async def test_no_more_copies_at_once_than_allowed(tmp_path: Path) -> None:
    command = bash('mkdir "$1/$$"; ls "$1" | wc -l; sleep 0.05; rmdir "$1/$$"', str(tmp_path))
    results = await asyncio.gather(*(host.run(command) for _ in range(3 * host.COPIES)))
    assert 1 < max(int(result.stdout) for result in results) <= host.COPIES


def test_a_started_process_lives_on_and_is_ended(tmp_path: Path) -> None:
    log, fifo = tmp_path / "log", tmp_path / "fifo"
    os.mkfifo(fifo)
    script = 'trap "echo bye $A; exit" TERM; echo up; echo > "$1"; sleep 60 & wait'
    started = host.start(bash(script, str(fifo), env={"A": "b"}), str(log))
    fifo.read_text()
    assert host.is_running(started)
    assert os.getsid(started.pid) == started.pid
    assert not host.is_running(replace(started, start_time=started.start_time + 1))
    host.end(started)
    assert not host.is_running(started)
    assert log.read_text() == "up\nbye b\n"
    host.end(started)


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    started = host.start(bash('trap "" TERM; echo > "$1"; while :; do sleep 60; done', str(fifo)))
    fifo.read_text()
    host.end(started, grace_s=0.2)
    assert not host.is_running(started)


def test_one_that_ended_by_itself_is_not_running() -> None:
    started = host.start(Command(("true",)))
    pidfd = os.pidfd_open(started.pid)
    select.select([pidfd], [], [], 10)
    os.close(pidfd)
    assert not host.is_running(started)


def test_a_stranger_with_the_same_pid_is_left_alone() -> None:
    started = host.start(Command(("sleep", "60")))
    host.end(replace(started, start_time=started.start_time - 1))
    assert host.is_running(started)
    host.end(started)
    assert started.pid not in leaks.children()  # no zombie


def test_what_cannot_be_started_says_why(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no-such-program could not be started"):
        host.start(Command(("no-such-program",)))
    with pytest.raises(LaunchError, match="missing/log"):
        host.start(Command(("true",)), str(tmp_path / "missing" / "log"))


def waits(path: Path, patience_s: float, *launcher: str) -> list[str]:
    return [sys.executable, "-c", WAITS, str(path), str(patience_s), *launcher]


@pytest.mark.parametrize("does", ["exec sleep 600", "trap '' TERM; echo; while :; do sleep 600; done"])
def test_a_launcher_that_stays_is_ended(tmp_path: Path, does: str) -> None:
    ended = tmp_path / "exit"
    ended.write_text("0\n")
    assert subprocess.run(waits(ended, 0.2, "bash", "-c", does), timeout=scaled(60), check=False).returncode == 0


def test_as_long_as_the_run_has_not_ended_it_stays(tmp_path: Path) -> None:
    does = waits(tmp_path / "exit", 0.1, "bash", "-c", "sleep 1; exit 7")
    assert subprocess.run(does, timeout=scaled(60), check=False).returncode == 7


def test_a_job_that_was_suspended_for_long_goes_on(tmp_path: Path) -> None:
    launcher = "trap 'exit 5' USR1; echo; while :; do sleep 0.05; done"
    argv = waits(tmp_path / "exit", 0.1, "bash", "-c", launcher)
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout
        waiting.stdout.readline()
        parent = psutil.Process(waiting.pid)
        until(lambda: parent.status() == psutil.STATUS_SLEEPING, "it waits")
        parent.suspend()
        until(lambda: parent.status() == psutil.STATUS_STOPPED, "it is stopped")
        time.sleep(0.3)  # longer than its patience, which is what this is about
        parent.resume()
        waiting.send_signal(signal.SIGUSR1)
        assert waiting.wait(scaled(30)) == 5


class Full(io.StringIO):
    def write(self, _: str, /) -> int:
        raise OSError(28, "No space left on device")

    def isatty(self) -> bool:
        return True


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, Full(), closed()], ids=["not-there", "full", "closed"])
def test_a_script_whose_standard_error_is_gone_goes_on(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    log.say("something")
    log.flush()
    assert log.is_terminal() is isinstance(stream, Full)


def test_what_was_closed_at_the_start_is_open_for_children_too(tmp_path: Path) -> None:
    line = f'exec "$0" -c "$1" {tmp_path}/found <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", line, sys.executable, OPENS], timeout=scaled(60)).returncode == 0
    assert (tmp_path / "found").read_text() == repr((["/dev/null"] * 3, "/dev/null"))

"""Run the commands of pure code: programs that answer (:func:`run`), and jobs that live on (:func:`start`).

No program is started by asyncio: cancelled meanwhile, it hangs, or leaves a zombie or a pidfd (CPython issues 125502
and 103847; 3.11.7, 3.12.1, 3.13.5, 3.14.10). ``subprocess.Popen`` starts it, and :func:`ended` awaits its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
from io import FileIO
from pathlib import Path
from weakref import WeakKeyDictionary

from hpcgpu import supervise
from hpcgpu.errors import LaunchError
from hpcgpu.host import process
from hpcgpu.model import Command, Result, Started
from hpcgpu.model.job import TIMED_OUT

COPIES = 8
# How long other processes may keep a program's output open after its end: qsub leaves a background process for later
# calls (OpenPBS 23.06.06), which would hold the pipe for ever.
_IDLE_S = 1.0
_limits: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def run(command: Command) -> Result:
    """Run a program; return its output and exit code. At most ``COPIES`` run at once, others wait.

    Never raises for a failed program: 127: does not exist, 126: not executable, 124: killed with all it started after
    ``timeout_s``, -9: ended by signal 9; the output is kept.
    """
    limit = _limits.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(COPIES))
    async with limit:
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        stdout, stderr = bytearray(), bytearray()
        # opened here: a task that is cancelled before it runs would leave them open
        readers = [asyncio.create_task(_read(FileIO(out), stdout)), asyncio.create_task(_read(FileIO(err), stderr))]
        try:
            code, ours = await _execute(command, out_end, err_end)
        finally:
            await _drain(readers, stdout, stderr)
    return Result(command.argv, code, stdout.decode(errors="replace"), stderr.decode(errors="replace") + ours)


def run_sync(command: Command) -> Result:
    """Run a program where no event loop runs; return :func:`run`'s result."""
    return asyncio.run(run(command))


def located(program: str) -> str:
    """Return the path of a program in PATH, or among those of this node's PBS; "" if it is in neither.

    PATH lacks them in tasks of PBS, in jobs that no login shell starts, and where a module sets it (OpenPBS 23.06.06).
    """
    text, path = "", shutil.which(program)
    with contextlib.suppress(OSError):
        text = "" if path else Path(os.environ.get("PBS_CONF_FILE") or "/etc/pbs.conf").read_text(errors="replace")
    folder = re.search(r"^\s*PBS_EXEC\s*=\s*(\S+)", text, re.M)
    return path or (folder and shutil.which(program, path=f"{folder[1]}/bin")) or ""


def start(command: Command, log: str = os.devnull) -> Started:
    """Start a program in its own session that outlives this call, output appended to ``log``; or raise LaunchError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    files = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, log, flags, 0o600),
        (os.POSIX_SPAWN_DUP2, 1, 2),
    ]
    env = {**os.environ, **command.env}
    try:
        os.close(os.open(log, flags, 0o600))  # posix_spawn would not say which file it was
        pid = os.posix_spawnp(command.argv[0], command.argv, env, file_actions=files, setsid=True)
    except OSError as error:
        raise LaunchError(f"{command.argv[0]} could not be started: {error}; its log was to be {log}") from error
    return Started(pid, process.start_time(pid) or 0)


def is_running(started: Started) -> bool:
    """Return whether the started process lives; a zombie, or a later process with its pid, does not count."""
    with contextlib.suppress(ChildProcessError):  # started by another process
        os.waitpid(started.pid, os.WNOHANG)
    return process.start_time(started.pid) == started.start_time


def end(started: Started, grace_s: float = 10.0) -> None:
    """End the process and its session's group: SIGTERM, then SIGKILL after ``grace_s``."""
    for sig in (signal.SIGTERM, signal.SIGKILL):
        with process.watched(started.pid, started.start_time) as pidfd:
            if pidfd is None:
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, sig)
            select.select([pidfd], [], [], grace_s)
    is_running(started)  # a child of ours is reaped


async def ended(child: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a child of this process; return its exit code, negative for a signal."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    while (code := child.poll()) is None:
        with process.watched(child.pid, process.start_time(child.pid) or 0) as end:
            if end is not None:
                loop.add_reader(end, over.set)
                try:
                    await over.wait()
                finally:
                    loop.remove_reader(end)
    return code


async def _execute(command: Command, out: int, err: int) -> tuple[int, str]:
    """Return the exit code, and a message if the program could not run or end; closes ``out`` and ``err``."""
    program = command.argv[0]
    stdin = os.memfd_create("stdin")
    try:
        with open(stdin, "wb", closefd=False) as f:
            f.write(command.stdin.encode(errors="surrogateescape"))  # paths may hold any byte
        os.lseek(stdin, 0, os.SEEK_SET)
        removed = set(command.removed(os.environ))
        env = {name: value for name, value in os.environ.items() if name not in removed} | dict(command.env)
        path = shutil.which(program, path=env.get("PATH")) or await supervise.to_thread(located, program) or program
        started = subprocess.Popen(
            [path, *command.argv[1:]], stdin=stdin, stdout=out, stderr=err, env=env, start_new_session=True
        )
    except FileNotFoundError as error:
        return 127, f"{program}: there is no such program on this machine ({error})\n"
    except OSError as error:
        return 126, f"{program}: could not be executed ({error})\n"
    finally:
        for fd in (stdin, out, err):
            os.close(fd)
    try:
        async with asyncio.timeout(command.timeout_s):
            return await ended(started), ""
    except TimeoutError:
        return TIMED_OUT, f"{program}: no answer in {command.timeout_s:g} s; it was killed\n"
    finally:
        if started.poll() is None:  # too late, or we were cancelled: leave nothing behind
            os.killpg(started.pid, signal.SIGKILL)
            await supervise.to_thread(started.wait)  # also if we are cancelled again


async def _read(pipe: FileIO, into: bytearray) -> None:
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), pipe
    )
    try:
        while part := await reader.read(65536):
            into += part
    finally:
        transport.close()


async def _drain(readers: list[asyncio.Task[None]], *outputs: bytearray) -> None:
    """Read until both pipes are closed, or no output comes for _IDLE_S."""
    before, pending = -1, set(readers)
    while pending and before < (now := sum(map(len, outputs))):
        before = now
        _, pending = await asyncio.wait(readers, timeout=_IDLE_S)
    for task in pending:
        task.cancel()
    await asyncio.wait(readers)
    for task in set(readers) - pending:
        task.result()  # raises a failure of the read

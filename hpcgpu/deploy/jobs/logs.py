"""The logs of a run's jobs: find one, show its end, follow it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from hpcgpu.deploy.jobs.batch_client import poll
from hpcgpu.deploy.jobs.run import Run
from hpcgpu.errors import JobError, opt, plain
from hpcgpu.model import Patience

_TAIL_LINES = 30
_NEW_LINES_S = 0.5
_CHUNK_BYTES = 1 << 16


def log_of(run: Run, job_id: str) -> Path:
    """Return the log of the named job, or of the run's first job; raise JobError if the run has no job yet."""
    if not run.jobs:
        raise JobError(f"run {run.name} has no job yet")
    jobs = tuple(run.jobs.values())
    return Path(next((job for job in jobs if job_id in (job.id, job.id.partition(".")[0])), jobs[0]).log)


def log_tail(log: Path, *, kept: bool = True) -> str:
    """Format the end of a log for an error. If the log is ``kept`` until the error is read, its path is named."""
    name = f"its log {log}" if kept else plain(f"its log ({opt('log_directory')} keeps it)")
    try:
        lines = log.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return (
            f"{name} is not there: it had not begun, its node could not write or deliver it there (give "
            f"{plain(opt('log_directory'))} "
            "a folder that all nodes see), or an option in job_extra_directives has given it another place"
        )
    except OSError as e:
        return f"{name} cannot be read ({e.strerror})"
    if not lines:
        return f"{name} is empty"
    return f"the end of {name}:\n" + "\n".join(f"  {line}" for line in lines[-_TAIL_LINES:])


def last_lines(log: Path, lines: int) -> tuple[str, int]:
    """Return the last lines and where they end in the file; ("", 0) if there is no log yet."""
    try:
        with log.open("rb") as f:
            end = f.seek(0, os.SEEK_END)
            start, tail = end, b""
            while start > 0 and tail.count(b"\n") <= lines:
                start = max(0, start - _CHUNK_BYTES)
                f.seek(start)
                tail = f.read(end - start)
    except FileNotFoundError:
        return "", 0
    kept = tail.splitlines(keepends=True)[-lines:] if lines else []
    return b"".join(kept).decode(errors="replace"), end


async def follow_log(run: Run, log: Path, offset: int, echo: Callable[[str], None]) -> None:
    """Pass additions to the log to ``echo`` until the run's jobs have ended."""
    now_s, ask_s = asyncio.get_running_loop().time, Patience().ask_s
    asked_s, over = now_s(), False
    while not over:
        if now_s() - asked_s >= ask_s:  # first: lines that come after the answer are read below
            over, asked_s = not await poll(run), now_s()
        while part := await asyncio.to_thread(_read, log, offset):
            offset += len(part)
            echo(part.decode(errors="replace"))
        if not over:
            await asyncio.sleep(_NEW_LINES_S)


def _read(log: Path, offset: int) -> bytes:
    """Return the next part of the log; b"" at its end, or if there is no log yet."""
    try:
        with log.open("rb") as f:
            f.seek(offset)
            return f.read(_CHUNK_BYTES)
    except FileNotFoundError:
        return b""

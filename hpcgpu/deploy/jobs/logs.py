"""The log of a run's job: its end, and what is added to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from hpcgpu.deploy.jobs import runs
from hpcgpu.deploy.jobs.record import Run
from hpcgpu.errors import JobError

_LOOK_S = 0.5
_ASK_S = 5.0
_CHUNK_BYTES = 1 << 16


def log_of(run: Run, wanted: str) -> Path:
    """Return the log of the job that was asked for, or of the run's first job where the run was.

    Raises
    ------
    JobError
        The run has no job yet.

    """
    jobs = run.record.jobs
    if not jobs:
        raise JobError(f"run {run.record.name} has no job yet")
    for job in jobs:
        if wanted in (job.id, job.id.partition(".")[0]):
            return Path(job.log)
    return Path(jobs[0].log)


def last(log: Path, lines: int) -> tuple[str, int]:
    """Return the last lines and where they end in the file; nothing of a log that is not there yet."""
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


async def follow(run: Run, log: Path, offset: int, echo: Callable[[str], None]) -> None:
    """Hand out what is added to the log, until the run's jobs have ended."""
    loop = asyncio.get_running_loop()
    asked, over = loop.time(), False
    while True:
        if log.exists():
            with log.open("rb") as f:
                f.seek(offset)
                while part := f.read(_CHUNK_BYTES):
                    offset += len(part)
                    echo(part.decode(errors="replace"))
        if over:
            return
        if loop.time() - asked >= _ASK_S:
            over, asked = not await runs.still_there(run.record), loop.time()
        else:
            await asyncio.sleep(_LOOK_S)

"""The record of each run of a batch cluster object: for its guard, for objects that attach, for ``hpcgpu ps``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from hpcgpu.batch import BatchSystem, get
from hpcgpu.config import document
from hpcgpu.errors import ConfigError, HpcGpuError, ParseError
from hpcgpu.host import pids, private
from hpcgpu.host.private import user_folder
from hpcgpu.model import JobState, JobStatus, RunDocument, Site
from hpcgpu.plan.jobs.job import Job

_RECORD = "record"
# The fields of a job that other processes can use: times are of one process.
_OF_A_JOB = ("id", "role", "log", "exit_file", "why", "ended_at")
# A client writes the record within seconds, and a file server's clock may be some minutes behind.
_UNWRITTEN_S = 3600.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some host; pid and start time identify it, as pids are reused."""

    host: str
    pid: int
    start_time: int

    @classmethod
    def here(cls) -> Process:
        """Return this process."""
        return cls(socket.gethostname(), os.getpid(), pids.start_time(os.getpid()) or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One run. It holds no secret."""

    name: str
    batch: str
    document: str  # the run document, with all settings
    client: Process  # that submitted it
    created: datetime  # UTC
    shape: str = "gang"
    dialect: Mapping[str, object]  # fields of the batch system's class, from the site
    jobs: tuple[Job, ...] = ()
    gone: tuple[Job, ...] = ()  # the last few that ended unasked, the newest first
    submitting: bool = False  # there may be more jobs: a submission is not answered yet, or its answer was lost

    @classmethod
    def begin(cls, run: RunDocument, batch: str, site: Site | None) -> Record:
        """Make the record of a run of this process before its submission; ``batch`` names the batch system."""
        return cls(
            name=run.settings.job_name,
            batch=batch,
            dialect=site.spoken if site else {},
            document=document.render(run),
            shape=run.settings.shape,
            client=Process.here(),
            created=now(),
            submitting=True,
        )

    @property
    def system(self) -> BatchSystem:
        """The batch system, with the dialect of that time."""
        return get(self.batch, **self.dialect)

    @property
    def run(self) -> RunDocument:
        """The run document, parsed at each call; :class:`Run` keeps it. ConfigError: of another hpcgpu."""
        return document.read(self.document)


@dataclass(frozen=True, slots=True)
class Run:
    """A run's folder and its record; ConfigError if another version of hpcgpu has written the document."""

    folder: Path
    record: Record
    document: RunDocument = field(init=False, repr=False)  # of the record, parsed

    def __post_init__(self) -> None:
        object.__setattr__(self, "document", self.record.run)


def with_exit_code(job: Job, status: JobStatus) -> JobStatus:
    """Return the status with the exit code that the job's script has left, if the batch system has none."""
    if status.state is JobState.ENDED and status.exit_code is None:
        with contextlib.suppress(OSError, ValueError):
            return replace(status, exit_code=int(Path(job.exit_file).read_text()))
    return status


def script_end(job: Job) -> tuple[bool, int | None]:
    """Return whether a job's script has left its exit code, and the code; a requeued script removes it."""
    if not job.exit_file or not Path(job.exit_file).is_file():
        return False, None
    return True, with_exit_code(job, JobStatus(JobState.ENDED, "")).exit_code


def home() -> Path:
    """Return the folder of all runs, on the file system that the nodes share."""
    return user_folder("runs")


def write(folder: Path, record: Record) -> None:
    """Write the record atomically: a reader sees the old record or the new one."""
    private.write(folder / _RECORD, _render(record))


def read(folder: Path) -> Record:
    """Read the record in a run's folder; raise OSError if it does not exist, ParseError if another program wrote it.

    The ParseError has the path to the wrong value.
    """
    text = private.read(folder / _RECORD)
    try:
        return _parse(text)
    except (ValueError, msgspec.MsgspecError) as e:  # a ValueError from msgspec 0.22 on
        raise ParseError(
            f"{folder / _RECORD} is no record of a run that this hpcgpu understands ({type(e).__name__}: {e}); "
            "use the hpcgpu that submitted it, or remove the folder when its jobs have ended",
            evidence=text,
        ) from e


def _parse(text: str) -> Record:
    fields = json.loads(text)
    record = msgspec.convert(fields, Record)
    dialect = {name: tuple(value) if isinstance(value, list) else value for name, value in record.dialect.items()}
    record = replace(record, dialect=dialect)
    kept = json.loads(_render(record))
    if more := [name for name, value in fields.items() if kept.get(name) != value]:  # the next write would drop it
        raise ValueError(f"holds more than this hpcgpu reads - at `$.{more[0]}`")
    return record


def _render(record: Record) -> str:
    plain = msgspec.to_builtins(record, builtin_types=(datetime,), enc_hook=dict)  # msgspec has no MappingProxyType
    for name in ("jobs", "gone"):
        plain[name] = [{field: job[field] for field in _OF_A_JOB} for job in plain[name]]
    return json.dumps(plain, default=datetime.isoformat)


def runs(home: Path, say: Callable[[str], None]) -> tuple[Run, ...]:
    """Return all runs below ``home``, the oldest first; ``say`` gets a line for each unreadable one."""
    readable = []
    for folder in home.iterdir() if home.is_dir() else ():
        try:
            readable.append(Run(folder, read(folder)))
        except ConfigError as e:  # said now, not in the middle of a table
            say(f"{folder}: {e}")
        except FileNotFoundError:  # it is being made or removed, or see sweep()
            continue
        except (OSError, HpcGpuError) as e:
            say(str(e))
    return tuple(sorted(readable, key=lambda run: run.record.created))


def sweep(home: Path, age_s: float = _UNWRITTEN_S) -> None:
    """Remove the folders of runs without a record, whose clients died before they wrote it."""
    for folder in home.iterdir() if home.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):  # its client removes it now
            newest = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
            if not (folder / _RECORD).exists() and time.time() - newest > age_s:
                shutil.rmtree(folder, ignore_errors=True)


def now() -> datetime:
    """Return the time for ``created``."""
    return datetime.now(UTC)

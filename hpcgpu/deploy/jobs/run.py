"""A run: a private folder that all its processes share, with the record of its jobs, and their owner.

The owner, one cluster object, submits, scales and cancels the jobs; all other processes read. No file here holds a
secret.
"""

from __future__ import annotations

import contextlib
import functools
import getpass
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from hpcgpu import config
from hpcgpu.batch import BatchSystem, get
from hpcgpu.deploy.network import lease
from hpcgpu.errors import ConfigError, HpcGpuError, JobError, LaunchError, ParseError
from hpcgpu.host import log, private, process
from hpcgpu.host import run as programs
from hpcgpu.host.private import user_folder
from hpcgpu.model import Command, JobState, JobStatus, RunDocument, Site, Started
from hpcgpu.plan.jobs.job import HEAD, MEMBER, NO_WORKERS, Job, JobWorkers
from hpcgpu.plan.jobs.job_text import SILENT
from hpcgpu.plan.jobs.request import first_workers, workers_per_node

_RECORD, _OWNER = "record", "owner"
# The fields of a job that other processes can use: times are of one process.
_OF_A_JOB = ("id", "role", "pool", "log", "exit_file", "why", "ended_at")
# A client writes the record within seconds, and a file server's clock may be some minutes behind.
_UNWRITTEN_S = 3600.0
# As many as a table shows row by row: nodes are lost together, and each job is named. A cluster of weeks has thousands.
_GONE = 64
_SILENT = JobStatus(JobState.UNKNOWN, "", SILENT)
Content = TypeVar("Content", "Record", "Owner")


@dataclass(frozen=True, slots=True)
class Owner:
    """The cluster object that submits, scales and cancels a run's jobs; a process may have several objects."""

    host: str
    pid: int
    start_time: int  # of the process, as pids are reused
    user: str
    since: datetime  # UTC
    token: str  # of the object

    @classmethod
    def here(cls) -> Self:
        """Make the owner for a new object of this process."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container without this user
            user = str(os.getuid())
        started = process.start_time(os.getpid()) or 0
        return cls(socket.gethostname(), os.getpid(), started, user, datetime.now(UTC), secrets.token_hex(4))

    def __str__(self) -> str:
        return f"{self.user} {self.pid}@{self.host} since {self.since.astimezone():%Y-%m-%d %H:%M}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Jobs that come and go of one kind: their run document, how many workers each has, and how many to keep."""

    document: str
    workers: int
    target: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The content of a run's record."""

    batch: str
    document: str  # the run document, with all settings
    created: datetime  # UTC
    dialect: Mapping[str, object]  # fields of the batch system's class, from the site
    target: int = 0  # number of member jobs to keep
    pools: Mapping[str, Pool] = field(default_factory=dict)  # further members, by name
    jobs: tuple[Job, ...] = ()
    gone: tuple[Job, ...] = ()  # the last few that ended unasked, the newest first
    submitting: bool = False  # there may be more jobs: a submission is not answered yet, or its answer was lost


class Run:
    """A run with its jobs in the order of their submission: the one with the scheduler, and its members.

    ``owner`` is that of the last look at the folder. Methods that touch files are called in threads, one at a time.
    ConfigError: another version of hpcgpu has written the document.
    """

    def __init__(self, folder: Path, record: Record, owner: Owner) -> None:
        self.folder, self.record, self.owner = folder, record, owner
        self.document = config.read_document(record.document)
        self.expected: dict[str, int] = {}  # workers of a job, by role
        for role, count in ((HEAD, first_workers), (MEMBER, workers_per_node)):
            with contextlib.suppress(ConfigError):  # the run could not be submitted
                self.expected[role] = count(self.document.settings)
        self.pools: dict[str, Pool] = {}
        self.workers: tuple[str, ...] | None = None  # registered names; None: the scheduler was not reached
        self.use: Mapping[str, Any] = {}  # facts of its summary; {}: likewise
        # Each job is replaced as a whole: the user's thread reads while the event loop's thread writes.
        self.jobs: dict[str, Job] = {}
        self._forgotten: dict[str, int] = {}
        self._token = ""  # of the object that made this Run, if it has ever owned it
        self._guard: Started | None = None
        self._follow(0.0)

    # --- the folder

    @classmethod
    def begin(cls, run: RunDocument, batch: str, site: Site | None) -> Self:
        """Make a run that this object owns, in the document's folder, before its submission; nothing is written."""
        record = Record(
            batch=batch,
            dialect=site.spoken if site else {},
            document=config.render_document(run),
            created=datetime.now(UTC),
            submitting=True,
        )
        begun = cls(Path(run.folder), record, Owner.here())
        begun._token = begun.owner.token
        return begun

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Read the run in a folder; OSError without a run, ParseError, with the place, for a wrong value."""
        return cls(folder, _read(folder / _RECORD, Record), _read(folder / _OWNER, Owner))

    @classmethod
    def all(cls, home: Path, say: Callable[[str], None] = log.say) -> tuple[Self, ...]:
        """Return all runs below ``home``, the oldest first; ``say`` gets a line for each unreadable one."""
        readable = []
        for folder in private.files_in(home):
            try:
                readable.append(cls.open(folder))
            except ConfigError as e:  # said now, not in the middle of a table
                say(f"{folder}: {e}")
            except FileNotFoundError:  # it is being made or removed, or see sweep()
                continue
            except (OSError, HpcGpuError) as e:
                say(str(e))
        return tuple(sorted(readable, key=lambda run: run.record.created))

    @classmethod
    def find(cls, home: Path, name: str) -> Self:
        """Return the run with this name, job id or folder name; ConfigError, with a list, for none or several."""
        runs = cls.all(home)
        matches = [run for run in runs if name in run.names]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ConfigError(f"{len(matches)} runs have the name {name!r}; give the id of a job: {_listed(matches)}")
        existing = _listed(runs) if runs else f"none (searched in {home})"
        raise ConfigError(f"there is no run {name!r}; there are: {existing}")

    def save(self) -> None:
        """Write the record atomically: a reader sees the old record or the new one; JobError for another's run."""
        self.must_own("change")
        if not (self.folder / _OWNER).exists():
            private.write(self.folder / _OWNER, _render(self.owner))
        jobs, gone = tuple(self.jobs.values()), tuple(self.gone)
        self.record = replace(
            self.record,
            jobs=jobs,
            gone=gone,
            target=self.target,
            pools=dict(self.pools),
            submitting=self.submitting,
        )
        private.write(self.folder / _RECORD, _render(self.record))

    def reload(self, now_s: float = 0.0) -> None:
        """Look who owns the run; of another object's run, take exactly the jobs that it has recorded."""
        self.look()
        if not self.is_mine:
            with contextlib.suppress(FileNotFoundError):  # another process has stopped the run
                self.record = _read(self.folder / _RECORD, Record)
                self._follow(now_s)

    def look(self) -> bool:
        """Look who owns the run; return whether this object does."""
        with contextlib.suppress(FileNotFoundError):  # not written yet, or another process has stopped the run
            self.owner = _read(self.folder / _OWNER, Owner)
        return self.is_mine

    def remove(self) -> None:
        """Remove the folder: all jobs have ended."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @functools.cached_property
    def system(self) -> BatchSystem:
        """The batch system, with the dialect of the run's start."""
        return get(self.record.batch, **self.record.dialect)

    @property
    def name(self) -> str:
        """The name of its jobs."""
        return self.document.settings.job_name

    @property
    def names(self) -> set[str]:
        """All names of the run."""
        job_ids = {name for job_id in self.jobs for name in (job_id, *re.findall(r"^\d+", job_id))}
        return {self.name, self.folder.name, *job_ids} - {""}

    # --- the owner

    @property
    def is_mine(self) -> bool:
        """True if this object owned the run at its last look."""
        return self._token == self.owner.token

    @property
    def is_taken_over(self) -> bool:
        """True if this object owned the run, and at its last look another one did."""
        return bool(self._token) and not self.is_mine

    @property
    def owner_state(self) -> str:
        """``alive``, ``dead`` or ``detached``; reads files."""
        if lease.is_detached(self.folder):
            return "detached"
        owner = self.owner
        if owner.host == socket.gethostname() and process.start_time(owner.pid) == owner.start_time:
            return "alive"
        # on another host, or an object that is attached: its signs of life count
        return "alive" if lease.is_held(self.folder, self.document.settings.client_grace_s) else "dead"

    def must_own(self, action: str) -> None:
        """Raise JobError if another object owns the run, with its owner and the way to take it over."""
        if not self.look():
            head = next((job.id for job in self.jobs.values() if job.is_head), self.name)
            why = {"dead": ", but has ended", "detached": ", and has detached it"}.get(self.owner_state, "")
            raise JobError(
                f"this object cannot {action} the cluster: {self.owner} owns it{why}. To take it over: "
                f"attach({head!r}, take_over=True)"
            )

    def claim(self, action: str) -> None:
        """Take over a run whose owner is dead or has detached it; raise JobError if the owner is alive."""
        if self.owner_state == "alive":
            self.must_own(action)
        else:
            self.take_over()

    def take_over(self) -> None:
        """Make this object the owner, with a guard, and the jobs that were recorded; its end is now the run's."""
        owner = Owner.here()
        private.write(self.folder / _OWNER, _render(owner))
        self.record = _read(self.folder / _RECORD, Record)  # after the owner: nothing is recorded by another one now
        self._follow(0.0)
        self.owner, self._token = owner, owner.token
        lease.take_up(self.folder)
        self.start_guard()

    def start_guard(self, *, at_once: bool = False) -> None:
        """Start :mod:`hpcgpu.deploy.guard`, which ends the run's jobs ``at_once`` or when the owner's process dies."""
        owner = self.owner
        start = -1 if at_once else owner.start_time  # of no process: it need not wait
        argv = ("hpcgpu.deploy.guard", str(self.folder), str(owner.pid), str(start), owner.token)
        self._guard = programs.start(Command(process.python_argv(*argv)), log=str(self.folder / "guard.log"))

    def keep_guard(self) -> None:
        """Start the guard anew if it was killed: without one jobs that wait outlive their owner until they start."""
        if self._guard and self.is_mine and not programs.is_running(self._guard):
            with contextlib.suppress(LaunchError):  # the next poll tries it again
                self.start_guard()

    def end_guard(self) -> None:
        """End the guard: no job is left, or another object owns the run."""
        guard, self._guard = self._guard, None  # it is not to be started anew
        if guard:
            programs.end(guard)

    # --- the jobs

    def target_of(self, pool: str) -> int:
        """Return the number of jobs to keep in a pool; "": the cluster's own members."""
        return self.pools[pool].target if pool else self.target

    def aim(self, pool: str, target: int) -> None:
        """Set that number."""
        if pool:
            self.pools[pool] = replace(self.pools[pool], target=target)
        else:
            self.target = target

    def expected_of(self, role: str, pool: str = "") -> int:
        """Return the number of workers of a job; 0: unknown."""
        return self.pools[pool].workers if pool else self.expected.get(role, 0)

    @property
    def head(self) -> Job | None:
        """The job with the scheduler; None if the scheduler is on this machine."""
        return next((job for job in self.jobs.values() if job.is_head), None)

    @property
    def members(self) -> tuple[Job, ...]:
        """The present jobs that come and go."""
        return tuple(job for job in self.jobs.values() if not job.is_head)

    @property
    def past_ids(self) -> set[str]:
        """The ids of all jobs that have ever been submitted."""
        return {*self.jobs, *self._forgotten}

    @property
    def not_ended(self) -> list[str]:
        """The ids of the jobs that the batch system's last answer lists, and that have not ended."""
        return [job.id for job in self.jobs.values() if job.status and job.state is not JobState.ENDED]

    def add(self, jobs: Iterable[Job]) -> None:
        """Add jobs that have been submitted."""
        self.jobs.update((job.id, job) for job in jobs)

    def unknown(self, present: Mapping[str, JobWorkers]) -> list[str]:
        """Return jobs with workers that are not recorded: an answer was lost, or an ended job has started again."""
        return [
            job_id
            for job_id, workers in present.items()
            if job_id not in self.jobs and workers.restarts > self._forgotten.get(job_id, -1)
        ]

    def listed(self, ids: Iterable[str], listed: Mapping[str, JobStatus], now_s: float) -> None:
        """Apply the batch system's answer about the polled jobs."""
        for job_id in ids:
            if job := self.jobs.get(job_id):
                self.jobs[job_id] = job.listed(listed.get(job_id), now_s)

    def unanswered(self, now_s: float) -> None:
        """Mark the scheduler's job as unknown if no worker is heard: the batch system does not answer."""
        if (head := self.head) and not head.heard:
            self.jobs[head.id] = head.listed(_SILENT, now_s)

    def script_ended(self, job_id: str, has_left: bool, code: int | None, now_s: float) -> bool:
        """Record whether a job's script has ended; return True if that changed."""
        before = self.jobs[job_id]
        self.jobs[job_id] = before.script_ended(has_left, code, now_s)
        return (before.script_ended_s is not None) != has_left

    def registered(self, present: Mapping[str, JobWorkers], now_s: float) -> None:
        """Apply the registered workers."""
        for job in tuple(self.jobs.values()):
            here = present.get(job.id, NO_WORKERS)
            now = job.registered(len(here.addresses), now_s, here.restarts, silent=here.silent)
            # of a job that was found when the answer to its submission was lost, only its workers show the pool
            right = job.is_head or not here.addresses or here.pool == job.pool
            self.jobs[job.id] = now if right else replace(now, pool=here.pool)

    def cancelled(self, job_ids: Iterable[str], now_s: float) -> None:
        """Record that jobs have been cancelled."""
        for job_id in job_ids:
            if job := self.jobs.get(job_id):
                self.jobs[job_id] = replace(job, cancelled_s=now_s)

    def retired(self, job_id: str, now_s: float) -> None:
        """Record that a job has been asked to leave."""
        self.jobs[job_id] = replace(self.jobs[job_id], retired_s=now_s)

    def ended(self, job_id: str, why: str, at: datetime) -> None:
        """Remove a job that has ended, and keep it among the gone ones if its end was not asked for."""
        job = self._forget(job_id)
        if not job.leaving:
            self.gone.appendleft(job.gone(why, at))

    def _follow(self, now_s: float) -> None:
        """Take exactly the jobs of the record."""
        self.pools = dict(self.record.pools)
        recorded = {job.id: job for job in self.record.jobs}
        for job_id in self.jobs.keys() - recorded.keys():
            self._forget(job_id)
        for job in [job for job_id, job in recorded.items() if job_id not in self.jobs]:
            nodes = self.document.settings.nodes if job.is_head else job.nodes
            self.add([replace(job, nodes=nodes, submitted_s=now_s, expected=self.expected_of(job.role, job.pool))])
        self.gone = deque(self.record.gone, maxlen=_GONE)  # the last few that ended unasked, the newest first
        self.target, self.submitting = self.record.target, self.record.submitting

    def _forget(self, job_id: str) -> Job:
        job = self.jobs.pop(job_id)
        self._forgotten[job_id] = job.restarts
        return job


def home() -> Path:
    """Return the folder of all runs, on the file system that the nodes share."""
    return user_folder("runs")


def sweep(home: Path) -> None:
    """Remove the folders of runs without a record, whose clients died before they wrote it."""
    for folder in private.files_in(home):
        with contextlib.suppress(FileNotFoundError):  # its client removes it now
            newest = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
            if not private.mode_of(folder / _RECORD) and time.time() - newest > _UNWRITTEN_S:
                shutil.rmtree(folder, ignore_errors=True)


def _listed(runs: Sequence[Run]) -> str:
    return ", ".join(
        f"{run.name} ({'job ' + next(iter(run.jobs)) if run.jobs else 'no job yet'}, "
        f"since {run.record.created.astimezone():%Y-%m-%d %H:%M})"
        for run in runs
    )


def _read(path: Path, kind: type[Content]) -> Content:
    """Read a file of a run; raise as :meth:`Run.open`."""
    text = private.read(path)
    try:
        return _parse(text, kind)
    except (ValueError, msgspec.MsgspecError) as e:  # a ValueError from msgspec 0.22 on
        raise ParseError(
            f"{path} is no {path.name} of a run that this hpcgpu understands ({type(e).__name__}: {e}); "
            "use the hpcgpu that submitted it, or remove the folder when its jobs have ended",
            evidence=text,
        ) from e


def _parse(text: str, kind: type[Content]) -> Content:
    fields = json.loads(text)
    content = msgspec.convert(fields, kind)
    if isinstance(content, Record):
        items = content.dialect.items()
        content = replace(content, dialect={k: tuple(v) if isinstance(v, list) else v for k, v in items})
    kept = json.loads(_render(content))
    if more := [name for name, value in fields.items() if kept.get(name) != value]:  # the next write would drop it
        raise ValueError(f"holds more than this hpcgpu reads - at `$.{more[0]}`")
    return content


def _render(content: Record | Owner) -> str:
    plain = msgspec.to_builtins(content, builtin_types=(datetime,), enc_hook=dict)  # msgspec has no MappingProxyType
    for name in {"jobs", "gone"} & plain.keys():
        plain[name] = [{field: job[field] for field in _OF_A_JOB} for job in plain[name]]
    return json.dumps(plain, default=datetime.isoformat)

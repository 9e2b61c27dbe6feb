"""The folder of a checkpoint: names with their manifests, segments, and the process that may write.

``NAME.name`` is a manifest, replaced atomically; ``owner`` names the writing process; ``*.segment`` are the chunks.
Only the owner changes manifests. Methods touch files: none is called on an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from hpcgpu.batch import get
from hpcgpu.checkpoint.computation import Computation
from hpcgpu.checkpoint.segments import OWNER, Index, sync_folder
from hpcgpu.deploy.jobs.batch_client import ask
from hpcgpu.deploy.jobs.run import Owner
from hpcgpu.errors import CheckpointError, ConfigError, HpcGpuError
from hpcgpu.host import path_writers, private, process
from hpcgpu.launch import environment
from hpcgpu.model import JobState

FORMAT = 2  # 1: checksums before the frames
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,99}")
_MANIFEST = ".name"
# In these a job's processes have ended, or not begun.
_NOT_RUNNING = (JobState.ENDED, JobState.PENDING, JobState.HELD, JobState.STUCK)
# Returns the state of a job by its batch system and id; SubmitError if that does not answer.
Poll = Callable[[str, str], JobState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The computation of a name, and its chunks' run."""

    run: str  # in the records of its chunks
    computation: Computation
    count: int  # of chunks
    template: str  # the collection without data: pickled, compressed, in base 64
    created: datetime
    format: int = FORMAT
    python: str = PYTHON

    @property
    def unreadable(self) -> str:
        """Why chunks are computed again; "" if they are of this version of hpcgpu and Python."""
        how = f"in format {self.format}" if self.format != FORMAT else f"by Python {self.python}"
        return "" if how == f"by Python {PYTHON}" else f"was written {how}: its chunks are computed again"


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that may write, and its job."""

    owner: Owner
    batch: str = ""
    job_id: str = ""
    restarts: int = 0  # of the job: a requeued one keeps its id

    @classmethod
    def here(cls) -> Holder:
        """Make the holder for an object of this process."""
        job = environment.read_allocation(os.environ)
        return cls(Owner.here(), job.batch, job.job_id, job.restart_count)

    def __str__(self) -> str:
        return f"{self.owner}{f', job {self.job_id}' if self.job_id else ''}"

    def state(self, poll: Poll) -> str:
        """Return ``alive``, ``dead`` or ``unknown``: only what is proved is dead."""
        me = Holder.here()
        if self.job_id and (self.batch, self.job_id) == (me.batch, me.job_id) and self.restarts < me.restarts:
            return "dead"
        if self.owner.host == socket.gethostname():
            return "alive" if process.start_time(self.owner.pid) == self.owner.start_time else "dead"
        if not self.batch:
            return "unknown"
        try:
            state = poll(self.batch, self.job_id)
        except HpcGpuError:
            return "unknown"
        return "dead" if state in _NOT_RUNNING else "unknown" if state is JobState.UNKNOWN else "alive"


def poll(batch: str, job_id: str) -> JobState:
    """Return the state of a job, where no event loop runs; a job that is not listed has ended."""
    states = asyncio.run(ask(get(batch), [job_id]))
    return states[job_id].state if job_id in states else JobState.ENDED


class Folder:
    """A checkpoint's folder."""

    def __init__(self, path: Path, *, trusted: bool = False) -> None:
        self.path = path
        self.index = Index(path)
        self.token = ""  # of this object's ownership
        if not trusted and private.mode_of(path):
            self._check()

    def make(self, *, trusted: bool) -> None:
        """Make the folder if it is not there, for this user alone."""
        if trusted:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            return
        try:
            private.make_folder(self.path)
        except HpcGpuError as e:
            raise ConfigError(f"{e}; or pass trust_folder=True") from e
        except OSError as e:
            raise ConfigError(f"a checkpoint cannot be made in {self.path}: {e}") from e
        self._check()

    def manifest(self, name: str) -> Manifest | None:
        """Return what a name stands for; None for a new name."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name: give up to 100 letters, digits, and . _ + - after the first")
        path = self.path / f"{name}{_MANIFEST}"
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except FileNotFoundError:
            return None
        except (ValueError, msgspec.MsgspecError) as e:
            how = f"hpcgpu checkpoint {self.path} --remove {name}"
            raise CheckpointError(f"{path} is damaged, or of another hpcgpu: {e}; {how} removes it") from e

    @property
    def names(self) -> tuple[str, ...]:
        """All names, sorted."""
        names = [path.name for path in private.files_in(self.path)]
        return tuple(sorted(name.removesuffix(_MANIFEST) for name in names if name.endswith(_MANIFEST)))

    def write(self, name: str, computation: Computation, count: int, template: str) -> Manifest:
        """Begin a name anew: chunks that it had do not count any more."""
        manifest = Manifest(
            run=secrets.token_hex(8),
            computation=computation,
            count=count,
            template=template,
            created=datetime.now(UTC),
        )
        private.write(self.path / f"{name}{_MANIFEST}", msgspec.json.encode(manifest).decode())
        sync_folder(self.path)
        return manifest

    def require(self, name: str) -> None:
        """Raise ConfigError if the folder does not have a name."""
        if name not in self.names:
            raise ConfigError(f"{self.path} has no {name!r}; it has: {', '.join(self.names) or 'none'}")

    def remove(self, name: str) -> None:
        """Forget a name, and remove the segments that have no chunk of another one."""
        self.require(name)
        (self.path / f"{name}{_MANIFEST}").unlink()
        self.clean()

    def clean(self) -> None:
        """Remove segments whose chunks are all of former names; a worker that writes there begins a new one."""
        manifests = [manifest for name in self.names if (manifest := self.manifest(name))]
        runs = {manifest.run for manifest in manifests}
        self.index.refresh()
        used = {
            place.segment
            for chunks in (self.index.chunks, self.index.unsure)
            for chunk, place in chunks.items()
            if chunk.run in runs
        }
        places = (*self.index.chunks.values(), *self.index.unsure.values())
        for name in {place.segment for place in places} - used:
            (self.path / name).unlink(missing_ok=True)
        self.index.refresh()

    # --- the owner

    @property
    def holder(self) -> Holder | None:
        """The process that may write; None if the folder is free."""
        try:
            return msgspec.json.decode(private.read(self.path / OWNER), type=Holder)
        except FileNotFoundError:
            return None
        except (ValueError, msgspec.MsgspecError) as e:
            raise CheckpointError(f"{self.path / OWNER} is damaged: {e}; remove it if nothing writes there") from e

    @property
    def is_mine(self) -> bool:
        """True if this object may write."""
        return bool(self.token) and (holder := self.holder) is not None and holder.owner.token == self.token

    def take(self, poll: Poll) -> None:
        """Become the owner; ConfigError if another process is, or may be. Objects of one process follow each other."""
        with private.locked(self.path):
            before = self.holder
            if before and before.owner.token == self.token:
                return
            if before and before.owner.pid != os.getpid() and (state := before.state(poll)) != "dead":
                advice = "wait for its end, or give another folder"
                if state == "unknown":
                    advice = f"it may live, as nothing proves its end; if it has ended, remove {self.path / OWNER}"
                raise ConfigError(f"{self.path} is written by {before}: {advice}")
            if self.token:
                raise ConfigError(f"{self.path} has been taken over by {before or 'another process'}")
            mine = Holder.here()
            private.write(self.path / OWNER, msgspec.json.encode(mine).decode())
            sync_folder(self.path)
            self.token = mine.owner.token

    def release(self) -> None:
        """Let another process write."""
        with contextlib.suppress(OSError, HpcGpuError), private.locked(self.path):
            if self.token and (holder := self.holder) and holder.owner.token == self.token:
                (self.path / OWNER).unlink(missing_ok=True)
        self.token = ""

    def _check(self) -> None:
        """Raise ConfigError if another user could have put files here: they are unpickled, and so run code as you."""
        facts = self.path.lstat()
        reason = path_writers.changed_by(self.path)
        if not reason and facts.st_uid != os.getuid():
            reason = f"{self.path} is not yours"
        if not reason and facts.st_mode & 0o022:
            reason = f"other users can write to {self.path}"
        if reason:
            raise ConfigError(
                f"a checkpoint in {self.path} is not safe, as to load one runs code: {reason}. Give a folder that is "
                "yours alone, or pass trust_folder=True, --trust-folder, if you trust these users"
            )

"""The parts that outlive a cluster object: the record of its run, and the guard that ends a dead client's jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import guard, record
from hpcgpu.deploy.jobs.record import Record
from hpcgpu.deploy.network import lease
from hpcgpu.host.run import end
from hpcgpu.model import Started
from hpcgpu.plan.jobs.job import Job


class WrittenRun:
    """The record and the guard of one run. Its methods touch files: they are called in threads, one at a time."""

    def __init__(self, folder: Path, written: Record) -> None:
        self._folder, self._record = folder, written
        self._guard: Started | None = None

    @property
    def system(self) -> BatchSystem:
        """The batch system of its jobs."""
        return self._record.system

    def write(self, jobs: Sequence[Job], gone: Sequence[Job] = (), *, submitting: bool) -> None:
        """Update the record; ``submitting``: a submission has not been answered yet."""
        with contextlib.suppress(FileNotFoundError):  # the process that took the run over stays its client
            self._record = replace(self._record, client=record.read(self._folder).client)
        self._record = replace(self._record, jobs=tuple(jobs), gone=tuple(gone), submitting=submitting)
        record.write(self._folder, self._record)

    def members(self) -> tuple[tuple[Job, ...], tuple[Job, ...]]:
        """Return the member jobs, and the gone jobs, as any object has recorded them last."""
        try:
            written = record.read(self._folder)
        except FileNotFoundError:  # another process has stopped the run
            return (), ()
        return tuple(job for job in written.jobs if not job.is_head), written.gone

    def take_over(self) -> None:
        """Make this process the run's client, with a guard."""
        self._record = replace(record.read(self._folder), client=record.Process.here())
        record.write(self._folder, self._record)
        lease.take_up(self._folder)
        self.start_guard()

    def start_guard(self) -> None:
        """Start the process that ends the run's jobs when its client has died."""
        self._guard = guard.start(self._folder, self._record.client)

    async def close(self) -> None:
        """End the guard: no job is left, or another process has a guard."""
        if self._guard:
            await asyncio.to_thread(end, self._guard)
            self._guard = None

"""The parts that outlive a cluster object: the record of its run, and the guard that ends a dead client's jobs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpcgpu.batch import BatchSystem
from hpcgpu.deploy.jobs import guard, record
from hpcgpu.deploy.jobs.record import Gone, Record, RecordedJob
from hpcgpu.deploy.network import lease
from hpcgpu.host.run import end
from hpcgpu.model import Started


class WrittenRun:
    """The record and the guard of one run. Its methods touch files: they are called in threads, one at a time.

    Parameters
    ----------
    folder : Path
        The run's.
    written : Record
        As it was written last, or is to be.

    """

    def __init__(self, folder: Path, written: Record) -> None:
        self._folder, self._written = folder, written
        self._guard: Started | None = None

    @property
    def system(self) -> BatchSystem:
        """The batch system of its jobs."""
        return self._written.system

    def write(self, jobs: Sequence[RecordedJob], gone: Sequence[Gone] = (), *, submitting: bool) -> None:
        """Bring the record up to date.

        Parameters
        ----------
        jobs : sequence of RecordedJob
            Those that are there.
        gone : sequence of Gone
            The last few that are not.
        submitting : bool
            A submission has not been answered yet.

        """
        with contextlib.suppress(FileNotFoundError):  # the process that took the run over stays its client
            self._written = replace(self._written, client=record.read(self._folder).client)
        self._written = replace(self._written, jobs=tuple(jobs), gone=tuple(gone), submitting=submitting)
        record.write(self._folder, self._written)

    def members(self) -> tuple[tuple[RecordedJob, ...], tuple[Gone, ...]]:
        """Return the jobs beside the first one, and those that are gone, as any object has written them down last."""
        try:
            written = record.read(self._folder)
        except FileNotFoundError:  # somebody has stopped the run
            return (), ()
        return tuple(job for job in written.jobs if job.kind == "member"), written.gone

    def take_over(self) -> None:
        """Be the run's client from now on, with a guard."""
        self._written = replace(record.read(self._folder), client=record.Process.here())
        record.write(self._folder, self._written)
        lease.take_up(self._folder)
        self.start_guard()

    def start_guard(self) -> None:
        """Have the run's jobs ended when its client has died."""
        self._guard = guard.start(self._folder, self._written.client)

    async def close(self) -> None:
        """End the guard: nothing is left for it, or another process has one."""
        if self._guard:
            await asyncio.to_thread(end, self._guard)
            self._guard = None

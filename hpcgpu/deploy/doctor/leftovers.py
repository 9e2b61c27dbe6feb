"""Clean up after doctors that were killed together with their guards, as by a reboot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from hpcgpu.deploy.jobs import record as records
from hpcgpu.deploy.jobs import runs
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.host.private import user_folder


def home() -> Path:
    """Return the folder of all trials, on the file system that the nodes share."""
    return user_folder("doctor")


def clean_up(say: Callable[[str], None]) -> None:
    """End the jobs of doctors that were killed together with their guards, and remove their folders."""
    records.sweep(home())
    if not (found := records.runs(home(), say)):
        return

    async def clean() -> None:
        for one in await runs.look_at(found):
            if one.client == "dead":
                await runs.finish(one.run)
                jobs = ", ".join(runs.ids(one.run.record)) or "none"
                say(f"a doctor that was killed has left {one.run.folder}: removed (its jobs: {jobs})")

    try:
        asyncio.run(clean())
    except (SubmitError, JobError) as error:
        say(f"what a doctor that was killed has left in {home()} is still there: {error}")

"""The jobs of a dead owner: its run's guard ends them."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

from hpcgpu import supervise
from hpcgpu.deploy.jobs.batch_client import answered, ask, cancel, look, poll
from hpcgpu.deploy.jobs.ending import BY_ITSELF_S, PATIENCE, finish
from hpcgpu.deploy.jobs.planned_job import mark_of
from hpcgpu.deploy.jobs.run import Run
from hpcgpu.deploy.network.lease import is_detached, is_held
from hpcgpu.errors import SubmitError
from hpcgpu.host import log
from hpcgpu.model.job import WAITING
from hpcgpu.plan.jobs.job import Job

# An sbatch outlives its client, and tries for 2 minutes where slurmctld is "temporarily unable to accept job".
_SUBMITTING_S = 130.0


async def abandon(folder: Path, token: str) -> None:
    """End the jobs that a dead owner has left, unless its run has been taken over; called by its guard.

    Pending jobs are cancelled at once. Running jobs end by their lease. They are left alone as long as an object that
    is attached to the run renews it. It takes as many tries as necessary: no other process ends them.
    """

    async def once() -> bool:
        try:
            await _abandon(folder, token)
        except FileNotFoundError:
            if await supervise.to_thread(folder.exists):
                raise
        return True  # also if another process has stopped the run, and removed its folder

    await supervise.Loop(once, f"the end of the run in {folder}").task


async def _abandon(folder: Path, token: str) -> None:
    run = await asyncio.to_thread(Run.open, folder)
    if run.owner.token != token or not await _cancel_pending(run, token):
        return
    grace_s = run.document.settings.client_grace_s
    now_s = asyncio.get_running_loop().time
    end_s = now_s() + grace_s + BY_ITSELF_S
    while True:
        await asyncio.to_thread(run.look)
        if run.owner.token != token or await asyncio.to_thread(is_detached, folder):
            return  # the run goes on without this owner
        if not await poll(run):
            break
        if await asyncio.to_thread(is_held, folder, grace_s):
            end_s = now_s() + BY_ITSELF_S
        elif now_s() > end_s:
            break
        await asyncio.sleep(PATIENCE.guard_s)
    await finish(run)


async def _cancel_pending(run: Run, token: str) -> bool:
    """Cancel pending jobs, even with lost ids, and add these to the run; return False if it has another owner."""
    now_s = asyncio.get_running_loop().time
    submitted_s = now_s() + _SUBMITTING_S
    # its last job may be unlisted for minutes where squeue or qstat answers from a file
    end_s = submitted_s + PATIENCE.unlisted_s if run.submitting else now_s()

    while True:
        await asyncio.to_thread(run.reload)
        if run.owner.token != token:
            return False
        recorded = list(run.jobs)
        lost = await answered(functools.partial(look, run.system, run.name, mark_of(run.folder), recorded))
        states = await answered(functools.partial(ask, run.system, [*recorded, *lost]))
        if pending := [i for i, status in states.items() if status.state in WAITING]:
            try:
                await answered(functools.partial(cancel, run.system, pending))
            except SubmitError as e:
                log.say(str(e))  # a final refusal
        run.add(Job(id=job_id) for job_id in lost)
        if lost or now_s() > end_s:
            return True
        await asyncio.sleep(PATIENCE.ask_s if now_s() < submitted_s else PATIENCE.refused_s)

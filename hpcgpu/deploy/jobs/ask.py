"""What a batch system is asked to do, done: submit, tell, cancel."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Collection, Sequence

from hpcgpu.batch import BatchSystem
from hpcgpu.batch.text import requested
from hpcgpu.errors import SubmitError
from hpcgpu.host.run import run
from hpcgpu.model import JobSpec, JobState, JobStatus

# After each of these waits the job is looked for and, but for the last, submitted again.
_PAUSES_S = (1.0, 2.0, 4.0, 4.0)
_TIMED_OUT, _NOT_THERE = 124, 127
_ELSEWHERE = "jobs are submitted from a login node of a cluster; on this machine alone it is LocalGPUCluster"
# States that a job does not leave by itself when nobody wants it any more.
WAITING = (JobState.PENDING, JobState.HELD, JobState.STUCK)


async def submit(
    system: BatchSystem, spec: JobSpec, script: str, tell: Callable[[str], None], known: Collection[str] = ()
) -> tuple[str, ...]:
    """Submit a job or an array, and return the ids of its jobs.

    Raises
    ------
    SubmitError
        The batch system refused it, in its own words; what may pass was tried again.

    """
    command, pauses_s = system.submit(script, spec), list(_PAUSES_S)
    while True:
        result = await run(command)
        try:
            return system.elements(system.read_submit(result), spec.count)
        except SubmitError as e:
            if result.returncode == _NOT_THERE:
                raise SubmitError(f"{str(e).strip()}; {_ELSEWHERE}", evidence=e.evidence) from e
            if e.over_limit:
                raise
            if not e.transient:  # of a resource that it does not have, a batch system says no more than that
                words = f"{e}\nIt was asked for {requested(script)}"
                raise SubmitError(words, evidence=e.evidence, unsure=e.unsure) from None
            refusal = e
        found: tuple[str, ...] | None = None
        while found is None and pauses_s:
            tell(f"{refusal}; looking again in {pauses_s[0]:g} s")
            await asyncio.sleep(pauses_s.pop(0))
            found = await _accepted(system, spec, known) if refusal.unsure else ()
        if found:
            return found
        # after a time-out the job may still come: a second one would be one too many
        if not pauses_s or result.returncode == _TIMED_OUT:
            raise refusal


async def _accepted(system: BatchSystem, spec: JobSpec, known: Collection[str]) -> tuple[str, ...] | None:
    """Return the jobs that are there although the answer was lost; None when nobody can say."""
    try:
        return await look(system, spec.name, spec.mark, known)
    except SubmitError:
        return None


async def look(system: BatchSystem, name: str, mark: str, known: Collection[str]) -> tuple[str, ...]:
    """Return the jobs of a run that are there and not known: the answer to their submission was lost.

    Raises
    ------
    SubmitError
        The batch system does not answer now.

    """
    command = system.find(name, mark) if mark else None
    if command is None:
        return ()
    try:
        if not (found := system.read_found(await run(command), mark)):
            return ()
        listed = system.read_status(await run(system.status(found)), found)
    except SubmitError as e:
        if e.transient:
            raise
        return ()  # a site that does not let its users ask this
    there = [job_id for job_id, status in listed.items() if status.state is not JobState.ENDED]
    return tuple(sorted((job_id for job_id in there if job_id not in known), key=_numbers))


def _numbers(job_id: str) -> list[int]:
    """Return what brings jobs, and elements of an array, in the order of their submission."""
    return [int(number) for number in re.findall(r"\d+", job_id)]


async def ask(system: BatchSystem, ids: Sequence[str]) -> dict[str, JobStatus]:
    """Return what is known of jobs: one question for all, and more only for those that it does not list."""
    found: dict[str, JobStatus] = {}
    missing = list(ids)
    while missing:
        listed = system.read_status(await run(system.status(missing)), missing)
        if not (new := {job_id: listed[job_id] for job_id in missing if job_id in listed}):
            break
        found |= new
        # OpenPBS of 2026-04 lists no job after one that it does not know: what is missing may be alive
        missing = [job_id for job_id in missing if job_id not in found]
    if missing:
        try:
            listed = system.read_status(await run(system.history(missing)), missing)
            found |= {job_id: listed[job_id] for job_id in missing if job_id in listed}
        except SubmitError as e:
            if e.transient:
                raise
            # a site without accounting: what its squeue does not list is nowhere
    return found


async def cancel(system: BatchSystem, ids: Sequence[str]) -> None:
    """End jobs, pending or running; those that are gone already are none the worse.

    Raises
    ------
    SubmitError
        The batch system did not do it, in its own words.

    """
    for command in system.cancel(ids):
        system.read_cancel(await run(command))

"""The batch system's client: submit jobs, poll them, cancel them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from hpcgpu.batch import BatchSystem
from hpcgpu.batch.script import requested
from hpcgpu.errors import SubmitError
from hpcgpu.host.run import run
from hpcgpu.launch.environment import inherited_variables
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Patience
from hpcgpu.plan.jobs.offer import shortfalls
from hpcgpu.plan.jobs.refusal import Step, after_pause, after_refusal

_ELSEWHERE = (
    "jobs are submitted from a login node of a cluster; 'hpcgpu jobscript' prints the script anywhere, and on this "
    "machine alone it is LocalGPUCluster"
)


async def submit(
    system: BatchSystem,
    spec: JobSpec,
    script: str,
    tell: Callable[[str], None],
    patience: Patience,
    known: Collection[str] = (),
) -> tuple[str, ...]:
    """Submit a job or an array, and return its job ids; raise SubmitError in the batch system's words.

    A transient refusal is tried again.
    """
    own = inherited_variables(os.environ)  # this process may run in a job: a notebook's kernel, a script
    command = replace(system.submit(script, spec), timeout_s=patience.submission_s, without=own)
    pauses_s = list(patience.retries_s)
    while True:
        result = await run(command)
        try:
            return system.elements(system.read_submit(result), spec.count)
        except SubmitError as e:
            refusal = e
        step = after_refusal(refusal, result.returncode, len(pauses_s))
        while step is Step.PAUSE:
            tell(f"{refusal}; looking again in {pauses_s[0]:g} s")
            await asyncio.sleep(pauses_s.pop(0))
            found = await _accepted(system, spec, known) if refusal.unsure else ()
            if found:
                return found
            step = after_pause(found, result.returncode, len(pauses_s))
        if step is Step.NAME_CLUSTER:
            raise SubmitError(f"{str(refusal).strip()}; {_ELSEWHERE}", evidence=refusal.evidence) from refusal
        if step is Step.NAME_LACK:
            words = "\n".join((f"{refusal}\nIt was asked for {requested(script)}", *await beyond(system, spec)))
            raise SubmitError(words, evidence=refusal.evidence, unsure=refusal.unsure)
        if step is Step.RAISE:
            raise refusal


async def _accepted(system: BatchSystem, spec: JobSpec, known: Collection[str]) -> tuple[str, ...] | None:
    """Return the jobs that exist although the answer was lost; None if the batch system does not answer."""
    try:
        return await look(system, spec.name, spec.mark, known)
    except SubmitError:
        return None


async def look(system: BatchSystem, name: str, mark: str, known: Collection[str]) -> tuple[str, ...]:
    """Return jobs of a run that exist but are unknown: the answer to their submission was lost.

    Raises SubmitError if the batch system does not answer now.
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
        return ()  # the site refuses this query to users
    there = [job_id for job_id, status in listed.items() if status.state is not JobState.ENDED]
    return tuple(sorted((job_id for job_id in there if job_id not in known), key=_numbers))


def _numbers(job_id: str) -> list[int]:
    """Return the key that sorts jobs, and elements of an array, in the order of their submission."""
    return [int(number) for number in re.findall(r"\d+", job_id)]


async def ask(system: BatchSystem, ids: Sequence[str]) -> dict[str, JobStatus]:
    """Return the statuses of jobs, by one query for all, and more only for jobs that the answer does not list."""
    found: dict[str, JobStatus] = {}
    missing = list(ids)
    while missing:
        listed = system.read_status(await run(system.status(missing)), missing)
        if not (new := {job_id: listed[job_id] for job_id in missing if job_id in listed}):
            break
        found |= new
        # OpenPBS of 2026-04 lists no job after an unknown one: a missing job may be alive
        missing = [job_id for job_id in missing if job_id not in found]
    if missing:
        try:
            listed = system.read_status(await run(system.history(missing)), missing)
            found |= {job_id: listed[job_id] for job_id in missing if job_id in listed}
        except SubmitError as e:
            if e.transient:
                raise
            # a site without accounting: a job that squeue does not list does not exist
    return found


async def beyond(system: BatchSystem, spec: JobSpec) -> tuple[str, ...]:
    """Return the parts of a request that the batch system does not have, as far as known."""
    command = system.offers(spec)
    return shortfalls(spec, system.read_offers(await run(command))) if command else ()


async def proven(system: BatchSystem, spec: JobSpec, listed: dict[str, JobStatus]) -> dict[str, JobStatus]:
    """Return the statuses of jobs of this request, with those that can never run as stuck.

    A job whose reason has an advice is suspect, and the batch system's resources prove it: a limit of a QOS may be
    changed, and a node may come back.
    """
    suspect = {i: s for i, s in listed.items() if s.advice and s.state is JobState.PENDING}
    if not suspect or not (why := "; ".join(await beyond(system, spec))):
        return listed
    stuck = {i: replace(s, state=JobState.STUCK, reason=f"{s.reason}: {why}") for i, s in suspect.items()}
    return {**listed, **stuck}


async def on_lost_nodes(
    system: BatchSystem,
    listed: dict[str, JobStatus],
    heard: Collection[str] = (),
    ran_on: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> dict[str, JobStatus]:
    """Add the troubles of the jobs' nodes, or of the nodes that they had last, to their statuses.

    ``heard``: jobs whose workers send heartbeats, which are skipped. ``ran_on``: nodes of earlier answers, as Slurm
    names for a requeued job no node, or only the nodes that it has not lost.
    """
    ended = {i for i, s in listed.items() if s.state is JobState.ENDED}
    on = {i: s.hosts or (() if i in ended else ran_on.get(i, ())) for i, s in listed.items() if i not in heard}
    hosts = sorted({host for of_job in on.values() for host in of_job})
    if not hosts or not (command := system.nodes(hosts)):
        return listed
    lost = system.read_nodes(await run(command))
    troubles = {i: ", ".join(lost[host] for host in of_job if host in lost) for i, of_job in on.items()}
    return listed | {i: replace(listed[i], trouble=words) for i, words in troubles.items() if words}


async def cancel(system: BatchSystem, ids: Sequence[str]) -> None:
    """Cancel jobs, pending or running, as many as possible; jobs that are gone or ending are no error.

    Raises SubmitError in the batch system's words if some were not cancelled; ``transient`` if they may be yet.
    """
    refused = [e for e in await asyncio.gather(*(_refusal(system, command) for command in system.cancel(ids))) if e]
    if refused:
        words = dict.fromkeys(str(e).strip() for e in refused)
        raise SubmitError(
            "; ".join(words),
            evidence="\n".join(e.evidence for e in refused),
            transient=any(e.transient for e in refused),
        )


async def _refusal(system: BatchSystem, command: Command) -> SubmitError | None:
    """Cancel jobs, by force on nodes that do not answer; return the refusal, or None."""
    forced: set[tuple[str, ...]] = set()
    try:
        while again := system.force(result := await run(command)):
            if again.argv in forced:
                return None
            forced.add(again.argv)
            system.read_cancel(await run(again))
        system.read_cancel(result)
    except SubmitError as e:
        return e
    return None

"""The batch system's client: submit jobs, poll them, cancel them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from hpcgpu.batch import BatchSystem
from hpcgpu.batch.common import options_text
from hpcgpu.errors import SubmitError
from hpcgpu.host.run import run
from hpcgpu.launch import inherited_variables
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Patience
from hpcgpu.plan.jobs.request import shortfalls

# Return codes of host.run: the program timed out, or does not exist.
_TIMED_OUT, _NOT_THERE = 124, 127
_ELSEWHERE = (
    "submit jobs on a login node of a cluster; 'hpcgpu plan --script' prints the script anywhere, and LocalGPUCluster "
    "uses this machine alone"
)


async def submit(
    system: BatchSystem,
    spec: JobSpec,
    script: str,
    tell: Callable[[str], None],
    patience: Patience,
    past_ids: Collection[str] = (),
) -> tuple[str, ...]:
    """Submit a job or an array, and return its job ids; raise SubmitError in the batch system's words.

    A transient refusal is tried again.
    """
    inherited = inherited_variables(os.environ)  # this process may run in a job: a notebook's kernel, a script
    command = replace(system.submit(script, spec), timeout_s=patience.submission_s, without=inherited)
    pauses_s = list(patience.retries_s)
    while True:
        result = await run(command)
        try:
            return system.elements(system.read_submit(result), spec.count)
        except SubmitError as e:
            refusal = e
        if result.returncode == _NOT_THERE:
            raise SubmitError(f"{str(refusal).strip()}; {_ELSEWHERE}", evidence=refusal.evidence) from refusal
        if not refusal.transient and not refusal.over_limit:  # batch systems do not name the missing resource
            text = "\n".join((f"{refusal}\nThe request was {options_text(script)}", *await beyond(system, spec)))
            raise SubmitError(text, evidence=refusal.evidence, unsure=refusal.unsure)
        jobs: tuple[str, ...] | None = None  # None: the batch system has not told whether they exist
        while jobs is None:
            if refusal.over_limit or not pauses_s:
                raise refusal
            tell(f"{refusal}; hpcgpu tries again in {pauses_s[0]:g} s")
            await asyncio.sleep(pauses_s.pop(0))
            with contextlib.suppress(SubmitError):
                jobs = await look(system, spec.name, spec.mark, past_ids) if refusal.unsure else ()
        if jobs:
            return jobs
        # after a time-out the job may still appear: do not submit a second one
        if not pauses_s or result.returncode == _TIMED_OUT:
            raise refusal


async def look(system: BatchSystem, name: str, mark: str, past_ids: Collection[str]) -> tuple[str, ...]:
    """Return the ids of a run's existing jobs that are not in ``past_ids``: the answer to their submission was lost.

    Raises SubmitError if the batch system does not answer now.
    """
    command = system.find(name, mark) if mark else None
    if command is None:
        return ()
    try:
        if not (ids := system.read_found(await run(command), mark)):
            return ()
        listed = system.read_status(await run(system.status(ids)), ids)
    except SubmitError as e:
        if e.transient:
            raise
        return ()  # the site refuses this query to users
    lost = [i for i, status in listed.items() if status.state is not JobState.ENDED and i not in past_ids]
    # in the order of submission, elements of an array too
    return tuple(sorted(lost, key=lambda job_id: [int(number) for number in re.findall(r"\d+", job_id)]))


async def ask(system: BatchSystem, ids: Sequence[str]) -> dict[str, JobStatus]:
    """Return the statuses of jobs, by one query for all, and more only for jobs that the answer does not list."""
    statuses: dict[str, JobStatus] = {}
    missing = list(ids)
    while missing:
        listed = system.read_status(await run(system.status(missing)), missing)
        if not (new := {job_id: listed[job_id] for job_id in missing if job_id in listed}):
            break
        statuses |= new
        # OpenPBS of 2026-04 lists no job after an unknown one: a missing job may be alive
        missing = [job_id for job_id in missing if job_id not in statuses]
    if missing:
        try:
            listed = system.read_status(await run(system.history(missing)), missing)
            statuses |= {job_id: listed[job_id] for job_id in missing if job_id in listed}
        except SubmitError as e:
            if e.transient:
                raise
            # a site without accounting: a job that squeue does not list does not exist
    return statuses


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
    return listed | {i: replace(listed[i], trouble=trouble) for i, trouble in troubles.items() if trouble}


async def cancel(system: BatchSystem, ids: Sequence[str]) -> None:
    """Cancel jobs, pending or running, as many as possible; jobs that are gone or ending are no error.

    Raises SubmitError in the batch system's words if some were not cancelled; ``transient`` if they may be yet.
    """
    refused = [e for e in await asyncio.gather(*(_refusal(system, command) for command in system.cancel(ids))) if e]
    if refused:
        raise SubmitError(
            "; ".join(dict.fromkeys(str(e).strip() for e in refused)),
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

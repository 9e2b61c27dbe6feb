"""The doctor's short job, from its submission to its findings."""

from __future__ import annotations

import asyncio
import functools
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

from hpcgpu.config import document
from hpcgpu.deploy.doctor import exchange, login, node
from hpcgpu.deploy.doctor.leftovers import home
from hpcgpu.deploy.jobs import batch_client, ending, guard, logs
from hpcgpu.deploy.jobs import record as records
from hpcgpu.deploy.jobs.job_plan import PlannedJob, plan_job
from hpcgpu.deploy.jobs.record import Record
from hpcgpu.deploy.jobs.submitter import Submitter, submit_guarded
from hpcgpu.deploy.network import lease
from hpcgpu.deploy.network.tls import Certificate
from hpcgpu.errors import SubmitError
from hpcgpu.host import private
from hpcgpu.host import run as programs
from hpcgpu.model import JobState, JobStatus, Patience, RunDocument, Settings, Started
from hpcgpu.plan.doctor.facts import Link, TrialFacts
from hpcgpu.plan.doctor.finding import Finding, examine, failed
from hpcgpu.plan.doctor.login import refusal_advice
from hpcgpu.plan.doctor.nodes import checks_for
from hpcgpu.plan.jobs.job import HEAD, Job
from hpcgpu.plan.jobs.phase import describe, format_end, format_missing
from hpcgpu.supervise import tasks

_NODES, _WALLTIME_S = 2, 300
_GRACE_S = 10.0  # a doctor that is silent for longer has been killed
_LOOK_S, _ASK_S = 0.5, 2.0
_CANCEL_S = 20.0
# PBS cannot write the output of a job into a folder that its nodes do not have: the job is in state E for 90 s
# (OpenPBS 23.06.06). Files of nodes are there within this time.
_WRITTEN_S = 10.0
_OUTPUT_LINES = 12


class Outcome(NamedTuple):
    """The findings of the trial; ``facts`` is None if there was no job."""

    findings: tuple[Finding, ...]
    facts: TrialFacts | None = None


def run(job: PlannedJob, say: Callable[[str], None]) -> Outcome:
    """Submit a job of two nodes like ``job`` but shorter, wait for it, return its findings; ``say`` prints progress.

    Ctrl-C cancels it; when this process is killed, its guard does. Raises SubmitError if the batch system does not
    answer or the job could not be cancelled, HpcGpuError if the home is not writable.
    """
    folder = private.make_folder(home() / secrets.token_hex(8))
    try:
        facts = asyncio.run(_Trial(job, folder, say).facts())
    except SubmitError as error:
        if error.transient:
            raise
        return Outcome((Finding("job", *failed(str(error), refusal_advice(job[0].batch, str(error)))),))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(examine(checks_for(facts), facts), facts)


class _Trial:
    """One job of the doctor, on an event loop."""

    def __init__(self, job: PlannedJob, folder: Path, say: Callable[[str], None]) -> None:
        user, _, self._system = job
        self._folder, self._say = folder, say
        self._settings, self._token = _short(user.settings, folder), secrets.token_hex(16)
        document_ = RunDocument(settings=self._settings, shape="gang", folder=str(folder))
        words = ("doctor", "--on-nodes", str(folder))
        self._spec, _ = plan_job(document_, user.site, user.batch, words)
        run_ = document.render(replace(document_, folder=""))
        self._order = exchange.Order(token=self._token, nodes=self._spec.nodes, run=run_)
        exchange.write(folder, exchange.ORDER, self._order)
        made = Certificate.make()
        private.write(folder / exchange.CERTIFICATE, f"{made.cert_pem}{made.key_pem}")
        self._record = Record.begin(document_, user.batch, user.site)
        self._submitter = Submitter(
            self._system, self._spec, lambda text: self._say_new(f"job -: {text}"), Patience(), role=HEAD
        )
        self._job: Job | None = None
        self._guard: Started | None = None
        self._said, self._ask_at_s = "", 0.0
        self._links: tuple[Link, ...] | None = None
        self._status: JobStatus | None = None
        self._ending_s: float | None = None

    async def facts(self) -> TrialFacts:
        """Submit the job, wait until it ends or all nodes have answered, and return the facts."""
        await tasks.in_thread(functools.partial(lease.touch, self._folder))
        alive = lease.keep_touched(self._folder, self._settings.client_grace_s)
        try:
            return await self._facts()
        finally:
            alive.cancel()
            if self._guard:
                await tasks.in_thread(functools.partial(programs.end, self._guard))

    async def _facts(self) -> TrialFacts:
        try:
            await submit_guarded(self._submit, self._settings.log_directory, self._write_down, self._start_guard)
            answered = await tasks.until(self._have_answered, _LOOK_S)
            found = await tasks.in_thread(self._seen)
        except BaseException:
            await self._cancel()
            raise
        await (self._end() if answered else self._cancel())
        return found

    async def _submit(self) -> None:
        self._job = await self._submitter.submit_head()

    async def _end(self) -> None:
        await ending.close_head(self._system, self._job, self._say_new, self._submitter)

    def _write_down(self) -> None:
        if self._job:
            self._record = replace(self._record, jobs=(self._job,), submitting=False)
        records.write(self._folder, self._record)

    def _start_guard(self) -> None:
        self._guard = guard.start(self._folder, self._record.client)

    def _say_new(self, text: str) -> None:
        """Print a text, unless the job's plan has printed it before."""
        if not text.endswith(self._system.notes(self._spec)):
            self._say(text)

    async def _cancel(self) -> None:
        """Cancel the job, pending or running, unless it has ended."""
        job = self._job
        if not job:
            await self._end()  # its submission may have been accepted all the same
        elif self._ending_s is None and (not self._status or self._status.state is not JobState.ENDED):
            await ending.close(self._system, [job], _CANCEL_S, self._say)

    async def _have_answered(self) -> bool | None:
        """Return True if all nodes have answered, False if the job has ended, None if they may still answer."""
        now_s = asyncio.get_running_loop().time
        if now_s() >= self._ask_at_s:
            await self._ask()
            self._ask_at_s = now_s() + _ASK_S
        over = self._is_over(now_s())
        if await tasks.in_thread(self._look):
            return True
        return False if over else None

    def _is_over(self, now_s: float) -> bool:
        """Return whether no more answers will come; a job may be ending for minutes."""
        status = self._status
        if status is None or not status.is_ending:
            self._ending_s = None
        elif self._ending_s is None:
            self._ending_s = now_s
        waited = self._ending_s is not None and now_s - self._ending_s > _WRITTEN_S
        return waited or (status is not None and status.state in (JobState.ENDED, JobState.STUCK))

    async def _ask(self) -> None:
        job = self._job
        assert job
        try:
            listed = await batch_client.ask(self._system, [job.id])
        except SubmitError as error:
            if not error.transient:
                raise
            self._tell(str(error))
            return
        self._status = listed.get(job.id)
        self._tell(f"job {job.id}: {describe(replace(job, status=self._status), date.today(), reached=False).text}")

    def _tell(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)

    def _look(self) -> bool:
        """Knock when all nodes listen; return whether all have answered."""
        listening = exchange.read_listening(self._folder)
        if self._links is None and len(listening) >= self._spec.nodes:
            me = os.uname().nodename
            found = (node.knock(me, there, self._order, self._folder) for there in listening)
            self._links = tuple(link for links in found for link in links)
            exchange.write(self._folder, exchange.KNOCKED, True)
        return self._links is not None and len(exchange.read_nodes(self._folder)) >= self._spec.nodes

    def _ended(self, job_id: str) -> str:
        if self._status is None:
            return format_missing(job=f"job {job_id}")
        if self._ending_s is not None:
            return f"job {job_id} is ending ({self._status.trouble})"
        return format_end(job_id, self._status)

    def _seen(self) -> TrialFacts:
        job = self._job
        assert job
        nodes = exchange.read_nodes(self._folder)
        all_there = len(nodes) >= self._spec.nodes
        unknown = {"launcher": "the job has not come so far", "links": "the nodes did not listen"}
        return TrialFacts(
            job_id=job.id,
            folder=str(self._folder),
            wanted_nodes=self._spec.nodes,
            wanted_gpus=self._spec.gpus_per_node,
            protocol=self._settings.protocol or "",
            python=login.python(),
            nodes=nodes,
            ended=self._ended(job.id),
            output="" if all_there else _output(Path(job.log)),
            launcher=exchange.read_launcher(self._folder),
            links=self._links,
            unknown=unknown,
        )


def _short(settings: Settings, folder: Path) -> Settings:
    """Return the settings of the short job, which asks for the same of each node as the user's job."""
    nodes = _NODES if settings.where("nodes") == "default" else min(settings.nodes, _NODES)
    return replace(
        settings,
        nodes=nodes,
        walltime_s=min(settings.walltime_s or _WALLTIME_S, _WALLTIME_S),
        log_directory=str(folder),
        client_grace_s=_GRACE_S,
        job_name=f"{settings.job_name}-doctor",
    )


def _output(log: Path) -> str:
    """Return the last lines of the job's output; "" without any."""
    try:
        text, _ = logs.last(log, _OUTPUT_LINES)
    except OSError:
        return ""
    return " / ".join(text.splitlines())

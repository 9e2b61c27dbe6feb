"""The doctor on a login node: its facts and findings, and its short job, from submission to removal."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

from hpcgpu import batch, config, supervise
from hpcgpu.deploy import settings
from hpcgpu.deploy.doctor import node
from hpcgpu.deploy.jobs import Run, batch_client, runs, sweep
from hpcgpu.deploy.jobs.batch_client import PlannedJob, Submitter, plan_job, read_job, submit_guarded
from hpcgpu.deploy.jobs.runs import last_lines
from hpcgpu.deploy.network import lease
from hpcgpu.errors import ConfigError, JobError, SubmitError
from hpcgpu.host import private
from hpcgpu.host import run as programs
from hpcgpu.host.private import user_folder
from hpcgpu.model import JobState, JobStatus, Patience, Result, RunDocument, Settings
from hpcgpu.plan.doctor import findings, login
from hpcgpu.plan.doctor.facts import Launcher, Link, NodeFacts, TrialFacts
from hpcgpu.plan.doctor.findings import CheckResult, examine
from hpcgpu.plan.doctor.login import LoginFacts
from hpcgpu.plan.doctor.nodes import checks_for
from hpcgpu.plan.jobs import HEAD, Job, describe, format_end, format_missing

_NODES, _WALLTIME_S = 2, 300
_GRACE_S = 10.0  # a doctor that is silent for longer has been killed
_POLL_S, _ASK_S = 0.5, 2.0
_CANCEL_S = 20.0
# PBS cannot write the output of a job into a folder that its nodes do not have: the job is in state E for 90 s
# (OpenPBS 23.06.06). Files of nodes are there within this time.
_WRITTEN_S = 10.0
_OUTPUT_LINES = 12


def clean_up(say: Callable[[str], None]) -> None:
    """End the jobs of doctors that were killed together with their guards, and remove their folders."""
    home = user_folder("doctor")
    sweep(home)

    async def clean() -> None:
        for run in Run.all(home, say):
            if run.owner_state == "dead":
                await runs.finish(run)
                jobs = ", ".join(run.jobs) or "none"
                say(f"a doctor that was killed has left {run.folder}: removed (its jobs: {jobs})")

    try:
        asyncio.run(clean())
    except (SubmitError, JobError) as error:
        say(f"the files of a killed doctor are still in {home}: {error}")


def run(job: PlannedJob, say: Callable[[str], None]) -> tuple[tuple[CheckResult, ...], TrialFacts | None]:
    """Submit a job of two nodes like ``job`` but shorter, wait for it; return its findings, and its facts if it ran.

    Ctrl-C cancels the job; when this process is killed, its guard does. Raises SubmitError if the batch system does not
    answer or the job could not be cancelled, HpcGpuError if the home is not writable.
    """
    folder = private.make_folder(user_folder("doctor") / secrets.token_hex(8))
    try:
        facts = asyncio.run(_DoctorJob(job, folder, say).facts())
    except SubmitError as error:
        if error.transient:
            raise
        return (findings.failed(str(error), login.refusal_advice(job[0].batch, str(error)))._replace(name="job"),), None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return examine(checks_for(facts), facts), facts


class _DoctorJob:
    """The doctor's job, on an event loop."""

    def __init__(self, job: PlannedJob, folder: Path, say: Callable[[str], None]) -> None:
        user, _, self._system = job
        self._folder, self._say = folder, say
        self._settings, self._token = _short(user.settings, folder), secrets.token_hex(16)
        document_ = RunDocument(settings=self._settings, shape="gang", folder=str(folder))
        argv = ("doctor", "--on-nodes", str(folder))
        self._spec, _ = plan_job(document_, user.site, user.batch, argv)
        run_ = config.render_document(replace(document_, folder=""))
        self._order = node.Order(token=self._token, nodes=self._spec.nodes, run=run_)
        node.write_value(folder, node.ORDER, self._order)
        self._run = Run.begin(document_, user.batch, user.site)
        self._submitter = Submitter(
            self._system, self._spec, lambda text: self._say_new(f"job -: {text}"), Patience(), role=HEAD
        )
        self._job: Job | None = None
        self._progress, self._ask_at_s = "", 0.0
        self._links: tuple[Link, ...] | None = None
        self._status: JobStatus | None = None
        self._ending_s: float | None = None

    async def facts(self) -> TrialFacts:
        """Submit the job, wait until it ends or all nodes have answered, and return the facts."""
        await supervise.to_thread(partial(lease.touch, self._folder))
        alive = lease.keep_touched(self._folder, self._settings.client_grace_s)
        try:
            await submit_guarded(self._run, self._submit)
            answered = await supervise.until(self._have_answered, _POLL_S)
            facts = await supervise.to_thread(self._gather)
        except BaseException:
            await self._cancel()
            raise
        else:
            await (self._end() if answered else self._cancel())
            return facts
        finally:
            alive.cancel()
            await supervise.to_thread(self._run.end_guard)

    async def _submit(self) -> None:
        self._job = await self._submitter.submit_head()
        self._run.add([self._job])

    async def _end(self) -> None:
        await runs.close_head(self._system, self._job, self._say_new, self._submitter)

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
            await runs.close(self._system, [job], _CANCEL_S, self._say)

    async def _have_answered(self) -> bool | None:
        """Return True if all nodes have answered, False if the job has ended, None if they may still answer."""
        now_s = asyncio.get_running_loop().time
        if now_s() >= self._ask_at_s:
            await self._ask()
            self._ask_at_s = now_s() + _ASK_S
        status = self._status
        if status is None or not status.is_ending:
            self._ending_s = None
        elif self._ending_s is None:
            self._ending_s = now_s()
        is_late = self._ending_s is not None and now_s() - self._ending_s > _WRITTEN_S  # a job may end for minutes
        over = is_late or (status is not None and status.state in (JobState.ENDED, JobState.STUCK))
        if await supervise.to_thread(self._have_all):
            return True
        return False if over else None

    async def _ask(self) -> None:
        job = self._job
        assert job
        try:
            states = await batch_client.ask(self._system, [job.id])
        except SubmitError as error:
            if not error.transient:
                raise
            self._tell(str(error))
            return
        self._status = states.get(job.id)
        self._tell(f"job {job.id}: {describe(replace(job, status=self._status), date.today(), reached=False).text}")

    def _tell(self, text: str) -> None:
        if text != self._progress:
            self._progress = text
            self._say(text)

    def _have_all(self) -> bool:
        """Connect when all nodes listen; return True if all have answered."""
        listening = node.read_listening(self._folder)
        if self._links is None and len(listening) >= self._spec.nodes:
            token = self._order.token
            self._links = tuple(link for place in listening.items() for link in node.connect_all(*place, token))
            node.write_value(self._folder, node.CONNECTED, True)
        answers = node.read_all(self._folder, node.NODE, NodeFacts)
        return self._links is not None and len(answers) >= self._spec.nodes

    def _gather(self) -> TrialFacts:
        job, status = self._job, self._status
        assert job
        nodes = tuple(node.read_all(self._folder, node.NODE, NodeFacts).values())
        ended = format_end(job.id, status) if status else format_missing(job=f"job {job.id}")
        if status and self._ending_s is not None:
            ended = f"job {job.id} is ending ({status.trouble})"
        output = ""
        with suppress(OSError):
            if len(nodes) < self._spec.nodes:
                output = " / ".join(last_lines(Path(job.log), _OUTPUT_LINES)[0].splitlines())
        return TrialFacts(
            job_id=job.id,
            folder=str(self._folder),
            wanted_nodes=self._spec.nodes,
            wanted_gpus=self._spec.gpus_per_node,
            protocol=self._settings.protocol or "",
            python=node.python(),
            nodes=nodes,
            ended=ended,
            output=output,
            launcher=node.read_all(self._folder, node.LAUNCHER, Launcher).get(""),
            links=self._links,
            unknown={"launcher": "the job has not come so far", "links": "the nodes did not listen"},
        )


def _short(settings: Settings, folder: Path) -> Settings:
    """Return the settings of the short job, whose request for each node is that of the user's job."""
    nodes = _NODES if settings.where("nodes") == "default" else min(settings.nodes, _NODES)
    return replace(
        settings,
        nodes=nodes,
        walltime_s=min(settings.walltime_s or _WALLTIME_S, _WALLTIME_S),
        log_directory=str(folder),
        client_grace_s=_GRACE_S,
        job_name=f"{settings.job_name}-doctor",
    )


_LIMIT_S = 4.0
_WRITE_BYTES = 4 << 20
_SYSTEMS = (("slurm", "sbatch"), ("pbs", "qsub"))
_NO_SYSTEM = "no batch system here (neither sbatch nor qsub): this is no login node of a cluster"


def read(
    options: Mapping[str, object], options_from: str, batch: str | None, *, must: bool
) -> tuple[PlannedJob | None, str]:
    """Read the job of these options, or the reason against one, for a batch system that is named, the site's or here.

    Raises ConfigError for wrong values, and if the job ``must`` be submitted also for too few.
    """
    here = batch or next((name for name, program in _SYSTEMS if shutil.which(program)), "")
    try:
        return read_job(options, options_from, (), batch if "site" in options else here or None), ""
    except ConfigError as error:
        if must or (options and here):
            raise
        settings.read(options, options_from)  # a wrong value is an error without a batch system, too
        return None, str(error) if here else _NO_SYSTEM


def facts(job: PlannedJob | None, no_job: str) -> LoginFacts:
    """Gather this machine's facts within a few seconds; nothing is submitted."""
    scratch = (job[0].settings.local_directory if job else None) or os.environ.get("SCRATCH")
    checks: dict[str, Callable[[], Any]] = {
        "python": node.python,
        "environment": partial(node.mounted, Path(sys.prefix)),
        "home": partial(node.folder, Path.home(), _WRITE_BYTES),
        "limits": node.limits,
        "names": node.names,
    }
    if job:
        checks["request"] = partial(_request, job)
    if scratch and Path(scratch).is_dir():
        checks["scratch"] = partial(node.folder, Path(scratch), _WRITE_BYTES)
    results, unknown = node.gather(checks, _LIMIT_S)
    no_scratch = "no --local-directory and no $SCRATCH; --submit checks the nodes' own"
    if scratch:
        no_scratch = f"{scratch} is not here; --submit checks it on the nodes"
    return LoginFacts(**results, unknown={"request": no_job, "scratch": no_scratch, **unknown})


def _request(job: PlannedJob) -> CheckResult:
    """Ask the batch system whether it would accept the job; nothing is submitted."""
    user, spec, system = job
    command = system.test(system.script(spec))
    if command is None:
        return _queue(job)
    program = command.argv[0]
    if not shutil.which(program):
        return findings.not_looked_at(f"there is no {program} on this machine")
    try:
        starts = system.read_test(programs.run_sync(replace(command, timeout_s=_LIMIT_S - 0.5)))
    except SubmitError as error:
        if error.transient:
            return findings.not_looked_at(f"{program} does not answer now: {error}")
        return findings.failed(str(error), login.refusal_advice(user.batch, str(error)))
    return findings.ok(f"{user.batch} would take the job: {starts}")


def _queue(job: PlannedJob) -> CheckResult:
    """Check that the queue is open, for a batch system that tests a request by a submission only."""
    user, spec, _ = job

    async def ask() -> list[Result]:
        commands = (replace(command, timeout_s=_LIMIT_S - 0.5) for command in batch.questions(user.batch))
        return await asyncio.gather(*map(programs.run, commands))

    queues = batch.read(user.batch, asyncio.run(ask()))
    queue, open_ = spec.queue or queues.default, [queue.name for queue in queues.queues]
    if queue and open_ and queue not in open_:
        refused = f"queue {queue} takes no jobs; open queues: {', '.join(open_)}"
        return findings.failed(refused, login.refusal_advice(user.batch, refused))
    about_queue = f"; its queue {queue} takes jobs" if queue and open_ else ""
    return findings.not_looked_at(f"{user.batch} tests a request by a submission only, as --submit does{about_queue}")

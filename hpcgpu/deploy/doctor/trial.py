"""The doctor's short job: a Run, whose Fleet submits, polls and ends it."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from hpcgpu import supervise
from hpcgpu.deploy.doctor import node, probes
from hpcgpu.deploy.doctor.login_facts import size_of
from hpcgpu.deploy.jobs import Run, ending, home
from hpcgpu.deploy.jobs.batch_client import submit_guarded
from hpcgpu.deploy.jobs.fleet import Fleet, SchedulerView
from hpcgpu.deploy.jobs.logs import last_lines
from hpcgpu.deploy.jobs.planned_job import PlannedJob, plan_job
from hpcgpu.deploy.jobs.runs import jobs_of
from hpcgpu.deploy.network import lease
from hpcgpu.errors import SubmitError
from hpcgpu.host import private
from hpcgpu.model import JobState, RunDocument, Settings
from hpcgpu.plan.doctor import findings, login
from hpcgpu.plan.doctor.facts import Launcher, Link, NodeFacts, TrialFacts
from hpcgpu.plan.doctor.nodes import checks_for
from hpcgpu.plan.jobs.job import Phase
from hpcgpu.plan.jobs.job_text import format_end, format_missing
from hpcgpu.plan.jobs.reconcile import Policy

_NODES, _WALLTIME_S = 2, 300
_GRACE_S = 10.0  # a doctor that is silent for longer has been killed
_POLL_S = 0.5  # between two looks at the folder
_CANCEL_S = 20.0
# PBS cannot write the output of a job into a folder that its nodes do not have: the job is in state E for 90 s
# (OpenPBS 23.06.06). Files of nodes are there within this time.
_WRITTEN_S = 10.0
_OUTPUT_LINES = 12


def run(job: PlannedJob, say: Callable[[str], None]) -> tuple[tuple[findings.CheckResult, ...], TrialFacts | None]:
    """Submit a job of two nodes like ``job`` but shorter, wait for it; return its findings, and its facts if it ran.

    Ctrl-C cancels the job; when this process is killed, its guard does. Raises SubmitError if the batch system does not
    answer or the job could not be cancelled, HpcGpuError if the home is not writable.
    """
    try:
        facts = asyncio.run(Trial(job, say).facts())
    except SubmitError as error:
        if error.transient:
            raise
        return (
            findings.failed(str(error), login.refusal_advice(job.user.batch, str(error)))._replace(name="job"),
        ), None
    return findings.examine(checks_for(facts), facts), facts


class Trial:
    """The run of the doctor's job, on an event loop; ``say`` gets a line for each new state of the job."""

    def __init__(self, job: PlannedJob, say: Callable[[str], None]) -> None:
        user, _, self._system = job
        self._size = size_of(job)
        self._folder, self._say, self._progress = home() / secrets.token_hex(8), say, ""
        settings = _short(user.settings, self._folder)
        document = RunDocument(settings=settings, shape="gang", folder=str(self._folder))
        self._spec, _ = plan_job(document, user.site, user.batch, ("doctor", "--on-nodes", document.folder))
        self._run = Run.begin(document, user.batch, user.site)
        view = SchedulerView(  # there is no scheduler
            scheduler=lambda: None,
            workers=dict,
            searching=lambda: False,
            changed=self._tell_state,
            say=self._tell,
            end=lambda: None,
        )
        self._fleet = Fleet(self._run, Policy(walltime_s=settings.walltime_s), view)
        self._links: tuple[Link, ...] | None = None
        self._ending_s = math.inf  # since when the job is ending
        private.make_folder(self._folder)
        self._token = node.write_order(self._folder, settings)
        lease.touch(self._folder)

    async def facts(self) -> TrialFacts:
        """Submit the job, wait until it ends or all nodes have answered, and return the facts.

        If the job may still exist (SubmitError), guard and folder stay: the guard tries again when this process ends.
        """
        answered = False
        try:
            lease.keep_touched(self._folder, _GRACE_S)
            await submit_guarded(self._run, partial(self._fleet.submit_head, self._system, self._spec))
            answered = await supervise.until(self._have_answered, _POLL_S)
            return await supervise.to_thread(self._gather)
        finally:
            self._fleet.stop()
            job = self._run.head
            if answered or not job:  # without a job's id, its submission may have been accepted all the same
                await self._fleet.close_head()
            elif self._ending_s == math.inf and job.state is not JobState.ENDED:
                await ending.close(self._system, [job], _CANCEL_S, self._say)
            await supervise.to_thread(self._run.end_guard)
            await supervise.to_thread(self._run.remove)

    def _tell(self, text: str) -> None:
        """Print a text, unless the job's plan has printed it before."""
        if not text.endswith(self._system.notes(self._spec)):
            self._say(text)

    def _tell_state(self) -> None:
        """Print the job's state if it has changed."""
        for job in jobs_of(self._run):
            text = f"job {job.id}: {job.text}"
            if job.phase is not Phase.SUBMITTED and text != self._progress:
                self._progress = text
                self._say(text)

    async def _have_answered(self) -> bool | None:
        """Return True if all nodes have answered, False if the job has ended, None if they may still answer."""
        (job,), now_s = self._run.jobs.values(), asyncio.get_running_loop().time()
        self._ending_s = min(self._ending_s, now_s) if job.status and job.status.is_ending else math.inf
        is_over = job.state in (JobState.ENDED, JobState.STUCK) or now_s - self._ending_s > _WRITTEN_S
        if await supervise.to_thread(self._have_all):
            return True
        return False if is_over else None

    def _have_all(self) -> bool:
        """Connect when all nodes listen; return True if all have answered."""
        listening = node.read_listening(self._folder)
        if self._links is None and len(listening) >= self._spec.nodes:
            self._links = tuple(link for place in listening.items() for link in node.connect_all(*place, self._token))
            node.write_value(self._folder, node.CONNECTED, True)
        answers = node.read_all(self._folder, node.NODE, NodeFacts)
        return self._links is not None and len(answers) >= self._spec.nodes

    def _gather(self) -> TrialFacts:
        (job,) = self._run.jobs.values()
        status = job.status
        nodes = tuple(node.read_all(self._folder, node.NODE, NodeFacts).values())
        ended = format_end(job.id, status) if status else format_missing(job=f"job {job.id}")
        if status and status.is_ending:
            ended = f"job {job.id} is ending ({status.trouble})"
        output = ""
        with suppress(OSError):
            output = " / ".join(last_lines(Path(job.log), _OUTPUT_LINES)[0].splitlines())
        return TrialFacts(
            job_id=job.id,
            folder=str(self._folder),
            requested_nodes=self._spec.nodes,
            requested_gpus=self._spec.gpus_per_node,
            protocol=self._run.document.settings.protocol or "",
            size=self._size,
            python=probes.python(),
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

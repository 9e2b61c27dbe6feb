"""What people read of a job and of a whole cluster."""

from dataclasses import replace
from datetime import date, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.model import JobState, JobStatus
from hpcgpu.plan.jobs.job import Job, Phase
from hpcgpu.plan.jobs.job_text import End, describe, format_status, note_lines, phases_line, summary_line

TODAY = date(2026, 11, 21)
RUNNING = JobStatus(JobState.RUNNING, "RUNNING")
DOWN = replace(RUNNING, trouble="node2 is down")
LIMIT = JobStatus(JobState.PENDING, "PENDING", "PartitionTimeLimit", advice="a shorter walltime=")
NEVER = JobStatus(JobState.STUCK, "PENDING", "PartitionNodeLimit: nodes=5, but a has 4", advice="fewer nodes=")
TEXTS = st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=8)
STATUSES = st.builds(JobStatus, st.sampled_from(JobState), TEXTS, TEXTS, st.none() | st.integers(0, 255), TEXTS)
TIMES = st.none() | st.floats(0, 100)


def job(status: JobStatus | None = None, **more: Any) -> Job:
    return Job(**{"id": "123_4", "submitted_s": 0.0, "expected": 4, "status": status, **more})


def pending(reason: str = "", starts: str = "", state: JobState = JobState.PENDING) -> JobStatus:
    return JobStatus(state, "PENDING", reason, starts=starts)


AGAIN = replace(pending("BeginTime", "2026-11-21T14:05:00"), trouble="node2 is down: Not responding")
FULL = job().registered(4, 1.0)  # all workers
EMPTY = FULL.registered(0, 2.0)
JOBS: list[tuple[Job, str]] = [
    (job(), "SUBMITTED"),
    (job(missing_since_s=1.0), "UNKNOWN (the batch system does not list it)"),
    (job(pending()), "PENDING"),
    (job(pending("Priority")), "PENDING (Priority)"),
    (job(pending("Priority", "2026-11-21T14:05:00")), "PENDING (Priority), starts about 14:05"),
    (job(pending("Resources", "2026-11-22T04:05:59")), "PENDING (Resources), starts about 2026-11-22 04:05"),
    (job(pending("", "tomorrow")), "PENDING, starts about tomorrow"),
    (job(LIMIT), "PENDING (PartitionTimeLimit: ask for a shorter walltime=)"),
    (job(NEVER), "WILL NOT START (PartitionNodeLimit: nodes=5, but a has 4: ask for fewer nodes=)"),
    (job(AGAIN), "PENDING (BeginTime, node2 is down: Not responding), starts about 14:05"),
    (job(pending("JobHeldUser", state=JobState.HELD)), "PENDING (held, JobHeldUser)"),
    (job(RUNNING).listed(RUNNING, 1.0), "STARTING 0/4"),
    (job().registered(3, 1.0), "STARTING 3/4"),
    (FULL, "UP 4/4"),
    (FULL.registered(3, 2.0), "UP 3/4"),
    (job(RUNNING).registered(4, 1.0).registered(0, 2.0), "STARTING 0/4 (lost its workers)"),
    (EMPTY.listed(DOWN, 3.0), "STARTING 0/4 (lost its workers: node2 is down)"),
    (FULL.registered(4, 2.0, silent=True).listed(DOWN, 3.0), "UP 4/4 (node2 is down)"),
    (FULL.listed(DOWN, 3.0), "UP 4/4"),
    (job().listed(DOWN, 1.0), "STARTING 0/4 (node2 is down)"),
    (EMPTY, "STARTING 0/4 (lost its workers)"),
    (EMPTY.listed(None, 3.0), "UNKNOWN (the batch system does not list it)"),
    (FULL.listed(None, 2.0), "UP 4/4"),
    (job(expected=0).registered(3, 1.0), "UP 3"),
    (job(RUNNING, expected=0).listed(RUNNING, 1.0), "STARTING"),
    (job(pending()).registered(4, 1.0), "UP 4/4"),
    (job(workers=4).listed(JobStatus(JobState.SUSPENDED, "SUSPENDED", "Preempted"), 1.0), "SUSPENDED (Preempted)"),
    (job(JobStatus(JobState.UNKNOWN, "POWERING_DOWN")), "UNKNOWN (POWERING_DOWN)"),
    (job(workers=4, retired_s=1.0), "DRAINING"),
    (job(pending("Priority"), cancelled_s=1.0), "DRAINING (cancelled)"),
    (job(JobStatus(JobState.ENDED, "NODE_FAIL", "NodeDown", trouble="on n1")), "GONE (NODE_FAIL, NodeDown, on n1)"),
    (job(JobStatus(JobState.ENDED, "TIMEOUT", "", 1)), "GONE (exit code 1, TIMEOUT)"),
    (job(JobStatus(JobState.ENDED, "FAILED", "Why", 3), cancelled_s=1.0), "GONE (exit code 3, FAILED, Why)"),
    (job(JobStatus(JobState.ENDED, "")), "GONE"),
]


@pytest.mark.parametrize(("facts", "text"), JOBS)
def test_describe_job(facts: Job, text: str) -> None:
    shown = describe(facts, TODAY)
    assert shown.text == text
    assert text.startswith(shown.phase.value)


@given(
    st.builds(
        Job,
        id=st.just("1"),
        submitted_s=st.just(0.0),
        status=st.none() | STATUSES,
        **dict.fromkeys(("expected", "workers"), st.integers(0, 8)),
        **dict.fromkeys(("missing_since_s", "started_s", "alone_since_s", "retired_s", "cancelled_s"), TIMES),
    )
)
def test_describe_any_job_keeps_the_batch_systems_words(facts: Job) -> None:
    view = describe(facts, TODAY)
    assert (view.phase is Phase.GONE) == (facts.state is JobState.ENDED)
    assert view.text.startswith(view.phase.value)
    if view.phase is Phase.GONE:
        assert facts.status
        assert format_status(facts.status) in view.text
    if view.phase is Phase.PENDING:
        assert facts.status
        assert facts.status.reason in view.text
        assert facts.status.starts in view.text


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (End.CLOSED, "GONE (closed)"),
        (End.LEFT, "UNKNOWN (this object has left it)"),
        (End.LOST, "UNKNOWN (the cluster is lost)"),
    ],
)
def test_describe_after_the_end_of_the_cluster_object(end: End, text: str) -> None:
    shown = describe(job(RUNNING), TODAY, end)
    assert (shown.id, shown.text) == ("123_4", text)
    assert text.startswith(shown.phase.value)
    ended = describe(job(JobStatus(JobState.ENDED, "TIMEOUT", "", 1)), TODAY, end)
    assert (ended.phase, ended.text) == (Phase.GONE, "GONE (exit code 1, TIMEOUT)")


@pytest.mark.parametrize(("day", "moment"), [(21, "14:05"), (20, "2026-11-20 14:05")])
def test_describe_gone_job_has_time_and_reason(day: int, moment: str) -> None:
    shown = describe(job().gone("exit code 3, FAILED", datetime(2026, 11, day, 14, 5)), TODAY)  # noqa: DTZ001
    assert (shown.phase, shown.text) == (Phase.GONE, f"GONE at {moment} (exit code 3, FAILED)")


def jobs(*texts: str) -> list[Job]:
    """Return jobs described by these texts, ``PENDING Priority 14:05`` with reason and start."""
    out = []
    for phase, reason, starts in ((*t.split(), "", "")[:3] for t in texts):
        text = f"PENDING ({reason}), starts about {starts}" if starts else phase
        out.append(job(pending(reason), phase=Phase(phase), text=text, starts=starts))
    return out


LINES: list[tuple[list[Job], tuple[int, ...], str]] = [
    (jobs("PENDING Priority 14:05"), (0, 8), "PENDING (Priority), starts about 14:05"),
    ([describe(job().registered(3, 1.0), TODAY)], (3, 4), "STARTING 3/4"),
    (jobs("UP"), (8, 8, 2), "READY 8 workers on 2 nodes"),
    (jobs("UP"), (1, 1, 1), "READY 1 worker on 1 node"),
    (jobs("UP"), (8, 8), "READY 8 workers"),
    ([], (0, 0), "READY 0 workers"),
    (jobs("UP", "PENDING"), (4, 4, 1), "READY 4 workers on 1 node"),
    (jobs("PENDING A", "UP", "UP", "PENDING B", "UP"), (12, 20), "2 PENDING (A, B), 3 UP; 12 of 20 workers"),
    (  # the soonest start
        jobs("PENDING Priority 2026-11-22", "PENDING Priority 14:05", "PENDING Priority 09:10", "STARTING"),
        (0, 16),
        "3 PENDING (Priority), starts about 09:10, 1 STARTING; 0 of 16 workers",
    ),
    (jobs("GONE", "UP", "DRAINING"), (4, 8), "1 UP, 1 DRAINING; 4 of 8 workers"),
    (jobs("GONE"), (0, 8), "GONE"),
    (jobs("UP"), (3, 4), "1 UP; 3 of 4 workers"),
    ([replace(job(DOWN), phase=Phase.STARTING)] * 2, (0, 8), "2 STARTING (node2 is down); 0 of 8 workers"),
    ([], (0, 8), "no job; 0 of 8 workers"),
]


@pytest.mark.parametrize(("shown", "numbers", "line"), LINES)
def test_summary_line(shown: list[Job], numbers: tuple[int, ...], line: str) -> None:
    assert summary_line(shown, *numbers) == line


def test_phases_line() -> None:
    assert phases_line(jobs("PENDING Priority 14:05")) == "PENDING (Priority), starts about 14:05"
    assert phases_line(jobs("UP", "PENDING Priority", "GONE", "UP")) == "1 PENDING (Priority), 2 UP"
    assert (phases_line(jobs("GONE")), phases_line([])) == ("GONE", "no job")


def test_describe_without_the_scheduler_has_no_count() -> None:
    for status, text in ((RUNNING, "RUNNING"), (DOWN, "RUNNING (node2 is down)"), (pending("P"), "PENDING (P)")):
        assert describe(job(status), TODAY, reached=False).text == text


def test_what_several_nodes_say_is_said_once() -> None:
    said = [("node1", "a"), ("node1", "b"), ("node2", "a")]
    assert note_lines(said) == ["node1, node2: a", "node1: b"]
    assert note_lines((f"node{i}", "a") for i in range(64)) == ["node0 and 63 others: a"]
    assert note_lines([]) == []

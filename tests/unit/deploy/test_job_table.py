"""What is kept of jobs that are gone."""

from __future__ import annotations

from datetime import UTC, datetime

from hpcgpu.deploy.jobs.job_table import JobTable
from hpcgpu.plan.jobs.job import Job

NOW = datetime(2026, 11, 21, 14, 5, tzinfo=UTC)


def test_the_last_five_that_ended_unasked_are_kept_the_newest_first() -> None:
    roster = JobTable(expected=1)
    roster.add([Job(id=str(i), log="") for i in range(9)], 0.0)
    roster.cancelled(["7"], 1.0)
    roster.retired("8", 1.0)
    for job_id in roster.ids:
        roster.ended(job_id, f"exit code {job_id}", NOW)
    assert [(job.id, job.why) for job in roster.gone] == [(i, f"exit code {i}") for i in "65432"]
    assert roster.ids == []

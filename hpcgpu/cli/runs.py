"""The commands for existing runs: ps, logs, stop. Quick to import, as every job imports all commands."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.cli.command import command, completion, json_option, show
from hpcgpu.report import Column, Table
from hpcgpu.units import format_duration

if TYPE_CHECKING:
    from hpcgpu.deploy.jobs.run import Run

_COLUMNS = (
    *(Column("name", kind="name"), Column("shape", kind="name"), Column("jobs"), Column("state", kind="prose")),
    *(Column("workers", kind="name"), Column("owner", kind="name"), Column("age", kind="name")),
)


def _names() -> list[str]:
    from hpcgpu.deploy.jobs.run import Run, home

    return [name for run in Run.all(home()) for name in (run.name, *run.jobs)]


RUN = completion(_names)


@command(
    short_help="List your clusters on batch systems.",
    examples={"hpcgpu ps": "", "hpcgpu ps --json | jq '.[].name'": "for a script"},
)
@json_option("clusters")
def ps(as_json: bool) -> None:
    """List your clusters on batch systems, also of other processes and nodes; remove the files of ended clusters."""
    import asyncio

    from hpcgpu.deploy.jobs import runs
    from hpcgpu.deploy.jobs.run import Run, home, sweep
    from hpcgpu.spill import storage

    sweep(home())  # the leftovers of dead processes: runs without a record, and folders of this node
    storage.sweep(storage.home_of(None))
    clusters = Run.all(home())
    asyncio.run(runs.refresh(clusters))
    clusters = runs.clean_up(clusters)
    text = Table(_COLUMNS, [_row(cluster) for cluster in clusters]) if clusters else "no clusters\n"
    show(text, [_described(cluster) for cluster in clusters] if as_json else None)


@command(
    short_help="Print the end of a cluster's log.",
    examples={"hpcgpu logs hpcgpu -f": "by name, as it grows", "hpcgpu logs 4711": "by a job's id"},
)
@click.argument("name", shell_complete=RUN)
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=30, show_default=True, help="How many.")
def logs(name: str, follow: bool, lines: int) -> None:
    """Print the end of the log of cluster NAME: its name, its job's id, or the id of one of its jobs."""
    import asyncio

    from hpcgpu.deploy.jobs import runs
    from hpcgpu.deploy.jobs.run import Run, home

    run = Run.find(home(), name)
    log = runs.log_of(run, name)
    text, end = runs.last_lines(log, lines)
    click.echo(text, nl=False)
    if follow:
        asyncio.run(runs.follow_log(run, log, end, lambda part: click.echo(part, nl=False)))
    elif not end:
        asyncio.run(runs.refresh([run]))
        jobs = "; ".join(f"job {job.id}: {job.text}" for job in runs.jobs_of(run))
        click.echo(f"{log} is empty so far; {jobs}", err=True)


@command(short_help="End a cluster, whoever holds it.", examples={"hpcgpu stop 4711": ""})
@click.argument("name", shell_complete=RUN)
def stop(name: str) -> None:
    """End cluster NAME, whoever holds it: its name or its job's id. Returns when the batch system says it is gone."""
    import asyncio

    from hpcgpu.deploy.jobs import runs
    from hpcgpu.deploy.jobs.run import Run, home

    run = Run.find(home(), name)
    asyncio.run(runs.stop(run))
    jobs = ", ".join(run.jobs)
    click.echo(f"{run.name} has ended (jobs {jobs})" if jobs else f"{run.name} had no job; removed")


def _row(run: Run) -> tuple[str, ...]:
    from hpcgpu.deploy.jobs.run import now
    from hpcgpu.deploy.jobs.runs import jobs_of
    from hpcgpu.plan.jobs.phase import phases_line

    state = run.owner_state
    return (
        run.name,
        run.document.settings.shape,
        " ".join(run.jobs) or "-",
        phases_line(jobs_of(run)),
        "-" if run.workers is None else str(len(run.workers)),
        f"{run.owner.pid}@{run.owner.host}" if state == "alive" else state,
        format_duration(int((now() - run.record.created) / timedelta(seconds=1))),
    )


def _described(run: Run) -> dict[str, Any]:
    """Convert a cluster to plain data; ``workers`` is null if its scheduler cannot be reached from here."""
    from hpcgpu.deploy.jobs.runs import jobs_of

    owner = run.owner
    return {
        "name": run.name,
        "shape": run.document.settings.shape,
        "created": run.record.created.isoformat(),
        "owner": {"state": run.owner_state, "user": owner.user, "host": owner.host, "pid": owner.pid},
        "jobs": [{"id": job.id, "phase": job.phase.value, "state": job.text, "log": job.log} for job in jobs_of(run)],
        "workers": None if run.workers is None else list(run.workers),
    }

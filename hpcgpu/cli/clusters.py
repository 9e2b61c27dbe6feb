"""The commands about clusters that run: ps, logs and stop.

Together: logs and stop take the names and ids that ps lists.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.cli.command import command, completion, json_option, show_text
from hpcgpu.report.table import Column, Table
from hpcgpu.units import JOULES_PER_KWH, format_duration, format_energy

if TYPE_CHECKING:
    from hpcgpu.deploy.jobs import Run


_MOST_IDS = 16  # --json has all
_RUN_COLUMNS = (
    *(Column("name", kind="name"), Column("shape", kind="name"), Column("jobs"), Column("state", kind="prose")),
    *(Column("workers", kind="name"), Column("owner", kind="name"), Column("age", kind="name")),
    Column("energy", kind="name"),
)


def _names() -> list[str]:
    from hpcgpu.deploy.jobs import Run, home

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

    from hpcgpu.deploy.jobs import Run, home, runs, sweep
    from hpcgpu.host import scratch

    sweep(home())  # the leftovers of dead processes: runs without a record, and folders of this node
    scratch.sweep(scratch.home_of(None))
    clusters = Run.all(home())
    asyncio.run(runs.refresh(clusters))
    clusters = runs.clean_up(clusters)
    rows = [_row(cluster) for cluster in clusters]
    width = len(_RUN_COLUMNS) - all(energy == "-" for *_, energy in rows)  # a column that says nothing takes room
    text = Table(_RUN_COLUMNS[:width], [row[:width] for row in rows]) if clusters else "no clusters\n"
    show_text(text, [_described(cluster) for cluster in clusters] if as_json else None)


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

    from hpcgpu.deploy.jobs import Run, home, runs
    from hpcgpu.deploy.jobs.logs import follow_log, last_lines, log_of

    run = Run.find(home(), name)
    log = log_of(run, name)
    text, end = last_lines(log, lines)
    click.echo(text, nl=False)
    if follow:
        asyncio.run(follow_log(run, log, end, lambda part: click.echo(part, nl=False)))
    elif not end:
        asyncio.run(runs.refresh([run]))
        jobs = "; ".join(f"job {job.id}: {job.text}" for job in runs.jobs_of(run))
        click.echo(f"{log} is {'empty so far' if log.exists() else 'not there'}; {jobs}", err=True)


@command(short_help="End a cluster, whoever holds it.", examples={"hpcgpu stop 4711": ""})
@click.argument("name", shell_complete=RUN)
def stop(name: str) -> None:
    """End cluster NAME, whoever holds it: its name or its job's id. Returns when the batch system says it is gone."""
    import asyncio

    from hpcgpu.deploy.jobs import Run, ending, home

    run = Run.find(home(), name)
    asyncio.run(ending.stop(run))
    jobs = ", ".join(run.jobs)
    click.echo(f"{run.name} has ended (jobs {jobs})" if jobs else f"{run.name} had no job; removed")


def _row(run: Run) -> tuple[str, ...]:
    from hpcgpu.deploy.jobs.runs import jobs_of
    from hpcgpu.plan.jobs.job_text import phases_line

    state = run.owner_state
    ids = [word for c in run.system.cancel(tuple(run.jobs)) for word in c.argv[1:]]  # ranges of arrays
    more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
    return (
        run.name,
        run.document.settings.shape,
        f"{' '.join(ids[:_MOST_IDS])}{more}" if ids else "-",
        phases_line(jobs_of(run)),
        "-" if run.workers is None else str(len(run.workers)),
        f"{run.owner.pid}@{run.owner.host}" if state == "alive" else state,
        format_duration(int((datetime.now(UTC) - run.record.created).total_seconds())),
        "-" if (joules := _energy_j(run)) is None else format_energy(joules),
    )


def _energy_j(run: Run) -> float | None:
    """Return what a run's GPUs and CPUs have used, as its summary counts it; None if that is unknown."""
    known = [j for j in (run.use.get("gpu_energy_j"), run.use.get("cpu_energy_j")) if j is not None]
    return sum(known) if known else None


def _described(run: Run) -> dict[str, Any]:
    """Convert a cluster to plain data; null: unknown, as of a scheduler that cannot be reached from here."""
    from hpcgpu.deploy.jobs.runs import jobs_of

    owner = run.owner
    return {
        "name": run.name,
        "shape": run.document.settings.shape,
        "created": run.record.created.isoformat(),
        "owner": {"state": run.owner_state, "user": owner.user, "host": owner.host, "pid": owner.pid},
        "jobs": [{"id": job.id, "phase": job.phase.value, "state": job.text, "log": job.log} for job in jobs_of(run)],
        "workers": None if run.workers is None else list(run.workers),
        "energy_kwh": None if (joules := _energy_j(run)) is None else joules / JOULES_PER_KWH,
    }

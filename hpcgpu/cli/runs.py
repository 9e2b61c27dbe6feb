"""The commands for runs that are there: ps, logs, stop; quick to import, as every job imports all commands."""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from hpcgpu.cli.options import debug_option
from hpcgpu.units import format_duration

if TYPE_CHECKING:
    from hpcgpu.deploy.jobs.runs import Seen

# Which of them may take several lines in a narrow window.
_COLUMNS = (
    *(("name", False), ("shape", False), ("jobs", True), ("state", True)),
    *(("workers", False), ("client", False), ("age", False)),
)
_WIDE = 1000


@click.command()
@debug_option
def ps() -> None:
    """List your clusters on batch systems, also those of other processes and nodes; clean up what is over."""
    import asyncio

    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    from hpcgpu.deploy.jobs import record, runs

    runs.sweep(record.home())
    there = runs.clean_up(asyncio.run(runs.see(record.home())))
    if not there:
        click.echo("no clusters")
        return
    table = Table(*(Column(name, no_wrap=not wraps) for name, wraps in _COLUMNS), box=None, pad_edge=False)
    for one in there:
        table.add_row(*map(Text, _row(one)))
    # what goes into a pipe or a file keeps each cluster on one line
    Console(width=None if sys.stdout.isatty() else _WIDE).print(table)


@click.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="Go on until the job ends.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=30, show_default=True, help="how many")
@debug_option
def logs(name: str, follow: bool, lines: int) -> None:
    """Print the end of the log of cluster NAME: its name, its job's id, or that of one of its jobs."""
    import asyncio

    from hpcgpu.deploy.jobs import logs as job_logs
    from hpcgpu.deploy.jobs import record, runs

    run = runs.find(record.home(), name)
    log = job_logs.log_of(run, name)
    text, end = job_logs.last(log, lines)
    click.echo(text, nl=False)
    if follow:
        asyncio.run(job_logs.follow(run, log, end, lambda part: click.echo(part, nl=False)))
    elif not end:
        click.echo(f"nothing in {log} yet", err=True)


@click.command()
@click.argument("name")
@debug_option
def stop(name: str) -> None:
    """End cluster NAME, whoever holds it: its name or its job's id. Returns when the batch system says it is gone."""
    import asyncio

    from hpcgpu.deploy.jobs import record, runs

    run = runs.find(record.home(), name)
    asyncio.run(runs.stop(run))
    jobs = ", ".join(job.id for job in run.record.jobs)
    click.echo(f"{run.record.name} has ended (jobs {jobs})" if jobs else f"{run.record.name} had no job; removed")


def _row(seen: Seen) -> tuple[str, ...]:
    from hpcgpu.deploy.jobs import record
    from hpcgpu.plan.jobs.phase import reason_of

    run = seen.run.record
    natives = [status.native for status in seen.states.values()]
    counted = [f"{natives.count(word)} {word}" if len(natives) > 1 else word for word in dict.fromkeys(natives)]
    reasons = {f" ({reason_of(status)})" for status in seen.states.values() if status.reason}
    age = record.now() - run.created
    return (
        run.name,
        run.shape,
        " ".join(job.id for job in run.jobs) or "-",
        (", ".join(counted) or "not known") + (reasons.pop() if len(reasons) == 1 else ""),
        "-" if seen.workers is None else str(seen.workers),
        f"{run.client.host}:{run.client.pid}" if seen.client == "alive" else seen.client,
        format_duration(int(age / timedelta(seconds=1))),
    )

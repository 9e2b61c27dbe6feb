"""The commands for when something is wrong: doctor, report and version."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgpu import __version__
from hpcgpu.cli.clusters import RUN
from hpcgpu.cli.command import FILE, FROM, command, json_option, setting_options, show_text, typed_settings
from hpcgpu.errors import LaunchError
from hpcgpu.report.table import Column, Table

if TYPE_CHECKING:
    from hpcgpu.plan.doctor.findings import CheckResult


_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "not looked at": "cyan"}
_CHECK_COLUMNS = (
    *(Column("name", kind="name"), Column("verdict", kind="name", styles=_COLOURS), Column("seen", kind="prose")),
    Column("advice", kind="note", mark="-> "),
)


@command(
    short_help="Write a folder for a bug report.",
    examples={
        "hpcgpu report": "of this machine",
        "hpcgpu report 4711 --output report": "and of a run, by its job's id",
    },
)
@click.option("--output", type=FILE, metavar="DIR", help="The folder to write; hpcgpu-report if not given.")
@json_option("the folder and its files")
@click.argument("run", required=False, shell_complete=RUN)
def report(run: str | None, output: str | None, as_json: bool) -> None:
    """Write a folder for a bug report: versions, topology and plan of this machine, and jobs and logs of RUN.

    RUN is a cluster's name or its job's id. Names of people, hosts and accounts, paths, addresses, UUIDs and serial
    numbers are replaced by neutral words.
    """
    from hpcgpu.deploy import bug_report

    folder = bug_report.write(run, output)
    facts = {"folder": str(folder), "files": sorted(path.name for path in folder.iterdir())}
    show_text(f"{folder}: look through it before you hand it on\n", facts if as_json else None)


@command(
    short_help="Show versions, also of what workers must share.",
    examples={"hpcgpu version": "", "hpcgpu version --json": "for a script"},
)
@json_option("the versions")
def version(as_json: bool) -> None:
    """Show the versions of hpcgpu, of Python, and of the packages that the workers of a cluster must share."""
    from hpcgpu.deploy.doctor import probes

    python = probes.python()
    here = {"path": python.path, "version": python.version, "machine": python.machine, "packages": python.packages}
    lines = [f"hpcgpu {__version__}, Python {python.version} ({python.machine}) in {python.path}"]
    lines += [f"  {name} {number}" for name, number in python.packages.items() if name != "hpcgpu"]
    show_text("".join(f"{line}\n" for line in lines), {"hpcgpu": __version__, "python": here} if as_json else None)


@command(
    short_help="Say what keeps workers away, or makes them slow.",
    examples={
        "hpcgpu doctor": "this login node",
        "hpcgpu doctor --submit --gpus-per-node 4 --queue gpu": "and two nodes, in a job of a minute",
        "hpcgpu doctor --cluster 4711": "the workers of a cluster that runs, by its name or a job's id",
    },
)
@click.option(
    "--batch", type=click.Choice(["slurm", "pbs"]), help="Batch system; by default the site's, or this machine's."
)
@click.option("--submit", is_flag=True, help="Submit a job of two nodes for a minute, and check them, too.")
@click.option("--cluster", metavar="NAME", shell_complete=RUN, help="Check the workers of a cluster that runs.")
@json_option("the findings")
@click.option("--on-nodes", "on_nodes", hidden=True, help="In the job: start the doctor on each node.")
@click.option("--on-node", "on_node", hidden=True, help="In the job: check this node.")
@setting_options("hpcgpu doctor")
def doctor(batch: str | None, submit: bool, cluster: str | None, as_json: bool, **arguments: Any) -> int:
    """Say what keeps workers from connecting, or makes them slow: each line ok, warning, failed or not looked at.

    The options are those of the job that does not do well. The exit code is 1 if something failed, else 0.
    """
    on_nodes, on_node = arguments.pop("on_nodes"), arguments.pop("on_node")
    if on_nodes or on_node:
        from hpcgpu.deploy.doctor import node

        return node.on_nodes(Path(on_nodes)) if on_nodes else node.on_node(Path(on_node))
    from hpcgpu.deploy.doctor import login_facts, trial
    from hpcgpu.host import log
    from hpcgpu.plan.doctor.findings import examine, exit_code
    from hpcgpu.plan.doctor.login import LOGIN_CHECKS, confirmed

    findings = _of_workers(cluster) if cluster else ()
    if not cluster:
        job, no_job = login_facts.read(typed_settings(arguments), FROM, batch, must=submit)
        facts = login_facts.facts(job, no_job)
        if submit and job:
            findings, job_facts = trial.run(job, log.say)
            facts = confirmed(facts, job_facts) if job_facts else facts
        findings = (*examine(LOGIN_CHECKS, facts), *findings)
    table = Table(_CHECK_COLUMNS, [(f.name, f.verdict.value, f.seen, f.advice) for f in findings])
    show_text(table, {"exit_code": exit_code(findings), "findings": table.to_json()} if as_json else None)
    return exit_code(findings)


def _of_workers(cluster: str) -> tuple[CheckResult, ...]:
    """Ask the workers of a cluster that runs."""
    import asyncio

    from hpcgpu.deploy.dashboard.worker_requests import read_bindings
    from hpcgpu.deploy.jobs import Run, home
    from hpcgpu.deploy.network import scheduler_file
    from hpcgpu.report.workers import examine

    folder = Run.find(home(), cluster).folder
    if bindings := asyncio.run(scheduler_file.call(folder, read_bindings)):
        return examine(bindings.workers)
    raise LaunchError(f"the scheduler of {cluster} does not answer here; hpcgpu logs {cluster} has its log")

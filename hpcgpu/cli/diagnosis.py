"""The commands that look at this machine and its clusters: topo, doctor, version and report.

Together: a report for others has what topo and version print, and all are for when something is wrong.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgpu import __version__
from hpcgpu.cli.clusters import RUN
from hpcgpu.cli.command import FILE, command, json_option, setting_options, show_text, typed_settings
from hpcgpu.config.values import flag
from hpcgpu.errors import ConfigError, HpcGpuError, LaunchError
from hpcgpu.model.settings import FROM
from hpcgpu.report.table import Column, Table

if TYPE_CHECKING:
    from hpcgpu.plan.doctor.findings import CheckResult


_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "not looked at": "cyan"}
_CHECK_COLUMNS = (
    *(Column("name", kind="name"), Column("verdict", kind="name", styles=_COLOURS), Column("seen", kind="prose")),
    Column("advice", kind="note", mark="-> "),
)


@command(
    short_help="Show GPUs, and what each one's worker is tied to.",
    examples={
        "hpcgpu topo --gpus sim:4": "simulated GPUs on this machine",
        "hpcgpu topo --from node.xml --svg node.svg": "a machine elsewhere, and its picture",
        "hpcgpu topo --diff node1.json node2.json": "what differs, of two files of --json",
    },
)
@json_option("machine, workers and ports")
@click.option("--svg", "picture", type=click.Path(dir_okay=False), help="Write a picture of the node to this file.")
@click.option("--from", "file", type=FILE, metavar="FILE", help="Plan for an XML file, hwloc's or NCCL's; - for stdin.")
@click.option("--cpuset", metavar="LIST", help="Plan with these PUs only, such as 0-7,16.")
@click.option("--gpus", metavar="LIST", help="Plan for these GPUs only, by position, PCI address or UUID; or sim:4.")
@click.option("--workers", type=int, metavar="N", help="Plan for so many workers.")
@click.option("--diff", is_flag=True, help="Say what differs between the machines of two FILES.")
@setting_options(
    "", *("simulate", "workers_per_gpu", "cpu_workers", "nthreads", "cores", "reserved_cores", "memory_policy", "nics")
)
@click.argument("files", nargs=-1, type=FILE, metavar="[FILES]...")
def topo(files: tuple[str, ...], diff: bool, as_json: bool, picture: str | None, **options: Any) -> int:
    """Show a machine's GPUs, and what each GPU's worker would be tied to.

    With --diff the exit code is diff's: 0 for machines that are alike, 1 for differences, 2 for trouble.
    """
    from hpcgpu.deploy.machine import compare_files, plan_machine, svg

    if diff:
        unused = {"json": as_json, "svg": picture, **options}
        if name := next((name for name, value in unused.items() if value not in (None, False, ())), ""):
            raise ConfigError(f"{flag(name)} with --diff, which compares machines and plans nothing: leave one out")
        try:
            differing = compare_files(files)
        except HpcGpuError as e:
            raise ConfigError(str(e), evidence=e.evidence) from e  # exit code 2, as diff(1) has it for trouble
        click.echo("".join(f"{line}\n" for line in differing), nl=False)
        return int(bool(differing))
    if files:
        raise ConfigError(f"{files[0]!r} stands alone: --from {files[0]} plans for the machine of a file")
    if simulate := options.pop("simulate"):
        if options["gpus"]:
            raise ConfigError(f"--gpus {options['gpus']} with --simulate {simulate}: give one of the two")
        options["gpus"] = f"sim:{simulate}"
    part = {name: options.pop(name) for name in ("file", "cpuset", "gpus", "workers")}
    planned = plan_machine(typed_settings(options), FROM, **part)
    if picture is not None:
        try:
            Path(picture).write_text(svg(planned))
        except OSError as e:
            raise ConfigError(
                f"--svg {picture} cannot be written: {e.strerror}; give a file in a folder that is yours"
            ) from e
    show_text(planned.table, planned.described() if as_json else None)
    return 0


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

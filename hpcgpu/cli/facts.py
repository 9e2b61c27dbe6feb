"""The commands for facts: ``hpcgpu topo``, ``report``, ``version`` and ``doctor``; ``hpcgpu`` alone."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import click

from hpcgpu import __version__
from hpcgpu.cli.command import FILE, FROM, command, example_lines, json_option, setting_options, show, typed_settings
from hpcgpu.cli.runs import RUN
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.report import Column, Table
from hpcgpu.units import counted

_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "not looked at": "cyan"}
_COLUMNS = (
    *(Column("name", kind="name"), Column("verdict", kind="name", styles=_COLOURS), Column("seen", kind="prose")),
    Column("advice", kind="note", mark="-> "),
)


def next_steps() -> str:
    """Return facts of this machine, and what to type next on it."""
    from hpcgpu.deploy import preview, sites
    from hpcgpu.host import discover

    site, batch, job, gpus = sites.recognize(os.environ), sites.batch_here(), preview.granted(), 0
    with contextlib.suppress(HpcGpuError):
        gpus = len(discover.topology().gpus)
    lines = {"hpcgpu demo": "two SVDs on simulated GPUs"}
    lines[f"hpcgpu run {'' if gpus else '--gpus sim:4 '}my_script.py"] = "on this machine"
    if not job.startswith("no job"):
        lines = {
            "hpcgpu launch my_script.py": "on all nodes of this job",
            "hpcgpu topo": "its GPUs and workers",
        }
    elif batch or site:
        size = f"--site {site[0]} --gpus 8" if site else f"--batch {batch} --nodes 2 --gpus-per-node 4"
        lines = {f"hpcgpu plan {size}": "look before you submit", "hpcgpu doctor": "can workers connect?"}
        lines |= {"hpcgpu template": "job scripts, to be changed and submitted"}
        lines |= {} if site else {"hpcgpu site new > mine.yaml": "draft of a site file"}
    seen = [counted(gpus, "GPU") if gpus else "no GPU", f"batch system: {batch or 'none'}"]
    seen += [f"known as site {site[0]}" if site else "not a known site", job]
    return "\n".join((f"{'; '.join(seen)}\n", *example_lines(lines), "\nAll commands: hpcgpu --help"))


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
    from hpcgpu.deploy.topo import Selection, compare, plan, svg

    if diff:
        unused = {"--json": as_json, "--svg": picture, **{f"--{n.replace('_', '-')}": v for n, v in options.items()}}
        if flag := next((flag for flag, value in unused.items() if value not in (None, False, ())), ""):
            raise ConfigError(f"{flag} with --diff, which compares machines and plans nothing: leave one out")
        try:
            differing = compare(files)
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
    part = Selection(**{name: options.pop(name) for name in ("file", "cpuset", "gpus", "workers")})
    planned = plan(part, typed_settings(options), FROM)
    if picture is not None:
        try:
            Path(picture).write_text(svg(planned))
        except OSError as e:
            raise ConfigError(
                f"--svg {picture} cannot be written: {e.strerror}; give a file in a folder that is yours"
            ) from e
    show(planned.table, planned.described() if as_json else None)
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
    show(f"{folder}: look through it before you hand it on\n", facts if as_json else None)


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
    show("".join(f"{line}\n" for line in lines), {"hpcgpu": __version__, "python": here} if as_json else None)


@command(
    short_help="Say what keeps workers away, or makes them slow.",
    examples={
        "hpcgpu doctor": "this login node",
        "hpcgpu doctor --submit --gpus-per-node 4 --queue gpu": "and two nodes, in a job of a minute",
    },
)
@click.option(
    "--batch", type=click.Choice(["slurm", "pbs"]), help="Batch system; by default the site's, or this machine's."
)
@click.option("--submit", is_flag=True, help="Submit a job of two nodes for a minute, and check them, too.")
@json_option("the findings")
@click.option("--on-nodes", "on_nodes", hidden=True, help="In the job: start the doctor on each node.")
@click.option("--on-node", "on_node", hidden=True, help="In the job: check this node.")
@setting_options("hpcgpu doctor")
def doctor(
    batch: str | None, submit: bool, as_json: bool, on_nodes: str | None, on_node: str | None, **arguments: object
) -> int:
    """Say what keeps workers from connecting, or makes them slow: each line ok, warning, failed or not looked at.

    The options are those of the job that does not do well. The exit code is 1 if something failed, else 0.
    """
    if on_nodes or on_node:
        from hpcgpu.deploy.doctor import node

        return node.on_nodes(Path(on_nodes)) if on_nodes else node.on_node(Path(on_node or ""))
    from hpcgpu.deploy.doctor import job as doctor_job
    from hpcgpu.deploy.doctor import login
    from hpcgpu.host import log
    from hpcgpu.plan.doctor import CheckResult, examine, exit_code
    from hpcgpu.plan.doctor.login import LOGIN_CHECKS, confirmed

    job, no_job = login.read(typed_settings(arguments), FROM, batch, must=submit)
    doctor_job.clean_up(log.say)
    facts, job_findings = login.facts(job, no_job), tuple[CheckResult, ...]()
    if submit and job:
        job_findings, job_facts = doctor_job.run(job, log.say)
        facts = confirmed(facts, job_facts) if job_facts else facts
    findings = (*examine(LOGIN_CHECKS, facts), *job_findings)
    table = Table(_COLUMNS, [(f.name, f.verdict.value, f.seen, f.advice) for f in findings])
    show(table, {"exit_code": exit_code(findings), "findings": table.to_json()} if as_json else None)
    return exit_code(findings)

"""The commands for facts, runs and site files: topo, report, version, doctor; ps, logs, stop; site.

Together: each command stands alone, and all only print what other rooms have found out.
"""

from __future__ import annotations

import contextlib
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgpu import __version__
from hpcgpu.cli.command import (
    FILE,
    FROM,
    SITE,
    Group,
    command,
    completion,
    example_lines,
    flag,
    json_option,
    setting_options,
    show_text,
    typed_settings,
)
from hpcgpu.errors import ConfigError, HpcGpuError, LaunchError
from hpcgpu.report.table import Column, Table
from hpcgpu.units import JOULES_PER_KWH, counted, format_duration, format_energy

if TYPE_CHECKING:
    from hpcgpu.deploy.jobs import Run
    from hpcgpu.plan.doctor.findings import CheckResult


_MOST_IDS = 16  # --json has all
_RUN_COLUMNS = (
    *(Column("name", kind="name"), Column("shape", kind="name"), Column("jobs"), Column("state", kind="prose")),
    *(Column("workers", kind="name"), Column("owner", kind="name"), Column("age", kind="name")),
    Column("energy", kind="name"),
)
_COLOURS = {"ok": "green", "warning": "yellow", "failed": "red", "not looked at": "cyan"}
_CHECK_COLUMNS = (
    *(Column("name", kind="name"), Column("verdict", kind="name", styles=_COLOURS), Column("seen", kind="prose")),
    Column("advice", kind="note", mark="-> "),
)
_SITES = (Column("site", kind="name"), Column("batch"), Column("machine", kind="prose"), Column("GPUs of a node"))


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


def next_steps() -> str:
    """Return facts of this machine, and what to type next on it."""
    from hpcgpu.deploy import preview, site_files
    from hpcgpu.host import discover

    site, batch, job, gpus = site_files.recognize(os.environ), site_files.batch_here(), preview.granted(), 0
    with contextlib.suppress(HpcGpuError):
        gpus = len(discover.topology().gpus)
    lines = {"hpcgpu demo": "two SVDs on simulated GPUs"}
    lines[f"hpcgpu run {'' if gpus else '--gpus sim:4 '}my_script.py"] = "on this machine"
    if not job.startswith("no job"):
        lines = {"hpcgpu launch my_script.py": "on all nodes of this job", "hpcgpu topo": "its GPUs and workers"}
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


@click.group(
    short_help="Show, check and draft what is known of machines.",
    cls=Group,
    name="site",
    examples={
        "hpcgpu site list": "",
        "hpcgpu site show perlmutter": "",
        "hpcgpu site new > mine.yaml": "on a login node of another machine",
        "hpcgpu plan --site ./mine.yaml --gpus 8": "its use",
    },
)
def site() -> None:
    """Show, check and draft what is known of machines: batch system, queues with limits, nodes, network."""


@site.command(
    short_help="List the machines that are known.",
    name="list",
    examples={"hpcgpu site list": "", "hpcgpu site list --json | jq keys": "for a script"},
)
@json_option("the machines")
def list_(as_json: bool) -> None:
    """List the machines that are known."""
    from hpcgpu.deploy import site_files

    facts: dict[str, dict[str, Any]] = {}
    rows = []
    for name in sorted(site_files.site_files()):
        try:
            machine = site_files.load_site(name)
        except ConfigError as error:
            facts[name] = {"error": str(error)}
            rows.append((name, "", f"cannot be read: {error}", ""))
            continue
        gpus = dict.fromkeys(f"{node.gpus} {node.gpu}".strip() for node in machine.nodes.values())
        facts[name] = {"batch": machine.batch, "title": machine.title or machine.name, "gpus_per_node": list(gpus)}
        rows.append((name, machine.batch, machine.title or machine.name, " or ".join(gpus)))
    show_text(Table(_SITES, rows), facts if as_json else None)


@site.command(
    short_help="Print what is known of a machine, with sources.",
    examples={"hpcgpu site show polaris": "", "hpcgpu site show ./mine.yaml --json": "a file of yours"},
)
@json_option("the facts")
@click.argument("name", shell_complete=SITE)
def show(name: str, as_json: bool) -> None:
    """Print the file of machine NAME (or a file) with the numbers of its lines, which messages name."""
    from hpcgpu.deploy import site_files

    machine, (text, file) = site_files.load_site(name), site_files.find_site(name)
    lines = [f"{file}:", *(f"{number:4}  {line}".rstrip() for number, line in enumerate(text.splitlines(), 1))]
    show_text("".join(f"{line}\n" for line in lines), site_files.described(machine) if as_json else None)


@site.command(
    short_help="Say what is wrong with a site file.",
    examples={"hpcgpu site check mine.yaml": "", "hpcgpu site check mine.yaml --json": "for a script"},
)
@json_option("name, batch system and queues of the file")
@click.argument("file", type=FILE)
def check(file: str, as_json: bool) -> None:
    """Check site file FILE: wrong keys, wrong values and rules that contradict each other, each with its line."""
    from hpcgpu.config.sites.read import contradictions
    from hpcgpu.deploy.site_files import load_site
    from hpcgpu.model.site import dotted

    machine = load_site(file if "/" in file or file.endswith((".yaml", ".yml")) else f"./{file}")
    if wrong := tuple(contradictions(machine)):
        raise ConfigError("\n".join(wrong))
    without = [dotted(path) for path, _, tags in machine.blocks() if not tags]
    queues = [queue.name for queue in machine.queues]
    facts = {"name": machine.name, "batch": machine.batch, "queues": queues, "without_source": without}
    text = f"{file} is a site file: {machine.name}, {machine.batch}, {len(queues)} queues\n"
    if without:
        text += f"without a source, so that no error can name one: {', '.join(without)}\n"
    show_text(text, facts if as_json else None)


@site.command(
    short_help="Print a draft for this machine.",
    examples={"hpcgpu site new > mine.yaml": "", "hpcgpu site new --name mine --batch slurm > mine.yaml": ""},
)
@click.option("--name", default="", help="Name of the site; by default from the environment or the host.")
@click.option("--batch", type=click.Choice(["slurm", "pbs"]), help="Batch system; this machine's by default.")
def new(name: str, batch: str | None) -> None:
    """Print a site file for this machine, with the facts that it reports, and '# unknown:' for others."""
    from hpcgpu.deploy.site_files import draft

    click.echo(draft(name, batch, os.environ), nl=False)

"""The commands for facts: ``hpcgpu topo``, ``hpcgpu report`` and ``hpcgpu version``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpcgpu import __version__
from hpcgpu.cli.command import FROM, Command, debug_option, json_option, show, some_setting_options, typed_settings
from hpcgpu.errors import ConfigError, HpcGpuError


@click.command(
    short_help="Show GPUs, and what each one's worker is tied to.",
    cls=Command,
    examples={
        "hpcgpu topo --gpus sim:4": "simulated GPUs on this machine",
        "hpcgpu topo --from node.xml --svg node.svg": "a machine elsewhere, and its picture",
        "hpcgpu topo --diff node1.json node2.json": "what differs, of two files of --json",
    },
)
@json_option("machine, workers and ports")
@click.option("--svg", "picture", type=click.Path(dir_okay=False), help="Write a picture of the node to this file.")
@click.option(
    "--from", "file", metavar="FILE", help="Plan for the machine of an XML file: hwloc's, or NCCL's; - for stdin."
)
@click.option("--cpuset", metavar="LIST", help="Plan with these PUs only, such as 0-7,16.")
@click.option("--gpus", metavar="LIST", help="Plan for these GPUs only, by position, PCI address or UUID; or sim:4.")
@click.option("--workers", type=int, metavar="N", help="Plan for so many workers.")
@click.option("--diff", is_flag=True, help="Say what differs between the machines of two FILES.")
@some_setting_options(
    *("simulate", "workers_per_gpu", "cpu_workers", "nthreads", "cores", "reserved_cores", "memory_policy", "nics")
)
@debug_option
@click.argument("files", nargs=-1, metavar="[FILES]...")
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
    if as_json:
        click.echo(json.dumps(planned.described(), indent=2))
    else:
        show(planned.table)
    return 0


@click.command(
    short_help="Write a folder for a bug report.",
    cls=Command,
    examples={
        "hpcgpu report": "of this machine",
        "hpcgpu report 4711 --output report": "and of a run, by its job's id",
    },
)
@click.option("--output", metavar="DIR", help="The folder to write; hpcgpu-report if not given.")
@json_option("the folder and its files")
@debug_option
@click.argument("run", required=False)
def report(run: str | None, output: str | None, as_json: bool) -> None:
    """Write a folder for a bug report: versions, topology and plan of this machine, and jobs and logs of RUN.

    RUN is a cluster's name or its job's id. Names of people, hosts and accounts, paths, addresses, UUIDs and serial
    numbers are replaced by neutral words.
    """
    from hpcgpu.deploy import bug_report

    folder = bug_report.write(run, output)
    if as_json:
        files = sorted(path.name for path in folder.iterdir())
        click.echo(json.dumps({"folder": str(folder), "files": files}, indent=2))
    else:
        click.echo(f"{folder}: look through it before you hand it on")


@click.command(
    short_help="Show versions, also of what workers must share.",
    cls=Command,
    examples={"hpcgpu version": "", "hpcgpu version --json": "for a script"},
)
@json_option("the versions")
@debug_option
def version(as_json: bool) -> None:
    """Show the versions of hpcgpu, of Python, and of the packages that the workers of a cluster must share."""
    from hpcgpu.deploy.doctor import probes

    python = probes.python()
    if as_json:
        here = {"path": python.path, "version": python.version, "machine": python.machine, "packages": python.packages}
        click.echo(json.dumps({"hpcgpu": __version__, "python": here}, indent=2))
        return
    click.echo(f"hpcgpu {__version__}, Python {python.version} ({python.machine}) in {python.path}")
    for name, number in python.packages.items():
        if name != "hpcgpu":
            click.echo(f"  {name} {number}")

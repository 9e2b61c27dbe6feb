"""``hpcgpu report`` and ``hpcgpu version``: the facts that a bug report must name."""

from __future__ import annotations

import json

import click

from hpcgpu import __version__
from hpcgpu.cli.command import Command
from hpcgpu.cli.options import debug_option, json_option


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
        return
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
    from hpcgpu.host import probes

    python = probes.python()
    if as_json:
        click.echo(json.dumps({"hpcgpu": __version__, "python": python}, indent=2))
        return
    click.echo(f"hpcgpu {__version__}, Python {python['version']} ({python['machine']}) in {python['path']}")
    for name, found in python["packages"].items():
        if name != "hpcgpu":
            click.echo(f"  {name} {found}")

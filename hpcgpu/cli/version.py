"""``hpcgpu version``: show the versions that a fault report must name."""

from __future__ import annotations

import json

import click

from hpcgpu import __version__
from hpcgpu.cli.command import Command
from hpcgpu.cli.options import debug_option, json_option


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

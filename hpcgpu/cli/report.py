"""``hpcgpu report``: a folder that can be attached to a bug."""

from __future__ import annotations

import click

from hpcgpu.cli.options import debug_option


@click.command()
@click.option("--output", metavar="DIR", help="The folder to write; hpcgpu-report if not given.")
@debug_option
@click.argument("run", required=False)
def report(run: str | None, output: str | None) -> None:
    """Write a folder for a bug report: versions, topology and plan of this machine, and jobs and logs of RUN.

    RUN is a cluster's name or its job's id. Names of people, hosts and accounts, paths, addresses, UUIDs and serial
    numbers are replaced by neutral words.
    """
    from hpcgpu.deploy import bug_report

    folder = bug_report.write(run, output)
    click.echo(f"{folder}: look through it before you hand it on")

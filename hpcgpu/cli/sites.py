"""The commands about site files: list, show, check and new."""

from __future__ import annotations

import os
from typing import Any

import click

from hpcgpu.cli.command import FILE, SITE, Group, json_option, show_text
from hpcgpu.errors import ConfigError
from hpcgpu.report.table import Column, Table

_SITES = (Column("site", kind="name"), Column("batch"), Column("machine", kind="prose"), Column("GPUs of a node"))


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
    from hpcgpu.config.sites.contradictions import contradictions
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

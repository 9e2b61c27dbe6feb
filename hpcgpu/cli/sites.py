"""The commands for site files: list, show, check, new. Quick to import, as every job imports all commands."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from hpcgpu.cli.command import Group
from hpcgpu.cli.options import debug_option, json_option
from hpcgpu.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpcgpu.model import Site
    from hpcgpu.model.site import Path
    from hpcgpu.model.site_facts import Tags


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
@debug_option
def list_(as_json: bool) -> None:
    """List the machines that are known."""
    from hpcgpu.deploy import sites
    from hpcgpu.host.sites import site_files

    known = sorted(site_files())
    facts: dict[str, dict[str, Any]] = {}
    for name in known:
        try:
            found = sites.read(name)
        except ConfigError as error:
            facts[name] = {"error": str(error)}
            continue
        gpus = dict.fromkeys(f"{node.gpus} {node.gpu}".strip() for node in found.nodes.values())
        facts[name] = {"batch": found.batch, "title": found.title or found.name, "gpus_per_node": list(gpus)}
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, known), default=0)
    for name, one in facts.items():
        if "error" in one:
            click.echo(f"{name:{width}}  cannot be read: {one['error']}")
        else:
            gpus_text = f": {' or '.join(one['gpus_per_node'])}" if one["gpus_per_node"] else ""
            click.echo(f"{name:{width}}  {one['batch']:5}  {one['title']}{gpus_text}")


@site.command(
    short_help="Print what is known of a machine, with sources.",
    examples={"hpcgpu site show polaris": "", "hpcgpu site show ./mine.yaml --json": "a file of yours"},
)
@json_option("what is known")
@click.argument("name")
@debug_option
def show(name: str, as_json: bool) -> None:
    """Print what is known of machine NAME (or in a file), each fact with its source, its file and its line."""
    from hpcgpu.deploy import sites

    found = sites.read(name)
    if as_json:
        click.echo(json.dumps(sites.described(found), indent=2))
        return
    for line in _lines(found):
        click.echo(line)


@site.command(
    short_help="Say what is wrong with a site file.",
    examples={"hpcgpu site check mine.yaml": "", "hpcgpu site check mine.yaml --json": "for a script"},
)
@json_option("what the file is")
@click.argument("file")
@debug_option
def check(file: str, as_json: bool) -> None:
    """Say what is wrong with site file FILE: keys, values, rules that contradict each other; with its line."""
    from hpcgpu.deploy import sites

    found = sites.read(file if "/" in file or file.endswith((".yaml", ".yml")) else f"./{file}")
    without = [where for where, tags in found.blocks() if not tags]
    if as_json:
        facts = {"name": found.name, "batch": found.batch, "queues": [queue.name for queue in found.queues]}
        click.echo(json.dumps({**facts, "without_source": without}, indent=2))
        return
    click.echo(f"{file} is a site file: {found.name}, {found.batch}, {len(found.queues)} queues")
    if without:
        click.echo(f"without a source, so that no error can name one: {', '.join(without)}")


@site.command(
    short_help="Print a draft for this machine.",
    examples={"hpcgpu site new > mine.yaml": "", "hpcgpu site new --name mine --batch slurm > mine.yaml": ""},
)
@click.option("--name", default="", help="Name of the site; found if not given.")
@click.option("--batch", type=click.Choice(["slurm", "pbs"]), help="Batch system; the one that is here if not given.")
@debug_option
def new(name: str, batch: str | None) -> None:
    """Print a draft for the machine that you are on: what it says of itself, and '# unknown:' where it does not."""
    from hpcgpu.deploy import sites

    click.echo(sites.draft(name, batch, os.environ), nl=False)


def _lines(found: Site) -> Iterator[str]:
    from hpcgpu.config.sites.read import as_plain

    yield f"{found.name}: {found.title or found.name} ({found.batch})"
    for name in ("match", "account", "network", "launcher", "scratch", "modules", "login", "dashboard", "charge"):
        block = getattr(found, name)
        if plain := {key: value for key, value in as_plain(block).items() if key != "source"}:
            yield from _block(found, name, plain, block.source, (name,))
    for name, plain in (("dialect", found.spoken), ("defaults", found.settings)):
        if plain:
            yield from _block(found, name, plain, getattr(found, name).get("source", ()), (name,))
    for name in ("rules", "queues", "notes"):
        for i, block in enumerate(getattr(found, name)):
            plain = {key: value for key, value in as_plain(block).items() if key != "source"}
            yield from _block(found, name.removesuffix("s"), plain, block.source, (name, i))
    for name, node in found.nodes.items():
        plain = {key: value for key, value in as_plain(node).items() if key != "source"}
        yield from _block(found, f"node {name}", plain, node.source, ("nodes", name))


def _block(found: Site, name: str, plain: dict[str, Any], tags: Tags, path: Path) -> Iterator[str]:
    block = found.at(*path)
    yield f"{name}:    {block}"
    for key, value in plain.items():
        own = found.at(*path, key)
        yield f"  {key}: {_text(value)}{f'    {own}' if own != block else ''}"
    if tags:
        yield f"  from: {found.cited(tags)}"


def _text(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_text(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return str(value).lower() if isinstance(value, bool) else str(value)

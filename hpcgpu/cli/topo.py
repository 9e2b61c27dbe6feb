"""``hpcgpu topo``: a machine's GPUs, and what each GPU's worker would be tied to."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import click

from hpcgpu.cli.command import Command
from hpcgpu.cli.options import FROM, debug_option, given_settings, json_option, some_setting_options
from hpcgpu.errors import ConfigError, HpcGpuError


@click.command(
    short_help="Show GPUs, and what each one's worker is tied to.",
    cls=Command,
    examples={
        "hpcgpu topo --gpus sim:4": "simulated GPUs on this machine",
        "hpcgpu topo --from node.xml --svg node.svg": "a machine elsewhere, and its picture",
        "hpcgpu topo --diff": "in a job: do its nodes differ?",
    },
)
@json_option("machine, workers and ports")
@click.option("--answer", is_flag=True, hidden=True, help="JSON for topo --diff, beside other nodes' answers.")
@click.option("--svg", "picture", type=click.Path(dir_okay=False), help="Write a picture of the node to this file.")
@click.option(
    "--from", "file", metavar="FILE", help="Plan for the machine of an XML file: hwloc's, or NCCL's; - for stdin."
)
@click.option("--cpuset", metavar="LIST", help="Plan with these PUs only, such as 0-7,16.")
@click.option("--gpus", metavar="LIST", help="Plan for these GPUs only, by position, PCI address or UUID; or sim:4.")
@click.option("--workers", type=int, metavar="N", help="Plan for so many workers.")
@click.option("--diff", is_flag=True, help="Say what differs between the nodes of this job, or between FILES.")
@some_setting_options(
    "simulate", "workers_per_gpu", "cpu_workers", "nthreads", "cores", "reserved_cores", "memory_policy", "nics"
)
@debug_option
@click.argument("files", nargs=-1, metavar="[FILES]...")
def topo(files: tuple[str, ...], diff: bool, as_json: bool, answer: bool, picture: str | None, **words: Any) -> int:
    """Show a machine's GPUs, and what each GPU's worker would be tied to.

    With --diff the exit code is diff's: 0 for machines that are alike, 1 for differences, 2 for trouble.
    """
    from hpcgpu.deploy.topo import Selection, plan

    if diff:
        vain = {"--json": as_json, "--svg": picture, **{f"--{n.replace('_', '-')}": v for n, v in words.items()}}
        if typed := [flag for flag, value in vain.items() if value not in (None, False, ())]:
            raise ConfigError(f"{typed[0]} with --diff, which compares machines and plans nothing: leave one out")
        return _diff(files)
    if files:
        raise ConfigError(f"{files[0]!r} stands alone: --from {files[0]} plans for the machine of a file")
    if simulate := words.pop("simulate"):
        if words["gpus"]:
            raise ConfigError(f"--gpus {words['gpus']} with --simulate {simulate}: give one of the two")
        words["gpus"] = f"sim:{simulate}"
    part = Selection(**{name: words.pop(name) for name in ("file", "cpuset", "gpus", "workers")})
    planned = plan(part, given_settings(words), FROM)
    if picture is not None:
        _write(Path(picture), planned.picture())
    if answer:
        from hpcgpu.deploy import topo_diff

        for line in topo_diff.answer_lines(json.dumps(planned.described())):
            os.write(1, line.encode())
    elif as_json:
        click.echo(json.dumps(planned.described(), indent=2))
    else:
        click.echo(planned.table(shutil.get_terminal_size((0, 0)).columns), nl=False)
    return 0


def _diff(files: tuple[str, ...]) -> int:
    from hpcgpu.deploy.topo_diff import compare

    try:
        text, differ = compare(files)
    except HpcGpuError as e:
        raise ConfigError(str(e), evidence=e.evidence) from e  # exit code 2, as diff(1) has it for trouble
    click.echo(text, nl=False)
    return int(differ)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as e:
        raise ConfigError(f"--svg {path} cannot be written: {e.strerror}; give a file in a folder that is yours") from e

"""The command topo: a machine and its bindings; and what to type next on this one."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import click

from hpcgpu.cli.command import (
    FILE,
    FROM,
    command,
    example_lines,
    json_option,
    setting_options,
    show_text,
    typed_settings,
)
from hpcgpu.config.flags import flag
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.units import counted


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

"""The command line, and what starts or would start ranks: demo, run, launch, bind, plan and template."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import click

from hpcgpu import __version__
from hpcgpu.cli.checkpoints import checkpoint
from hpcgpu.cli.clusters import logs, ps, stop
from hpcgpu.cli.command import (
    FILE,
    Group,
    completion,
    example_lines,
    json_option,
    setting_options,
    show_text,
    typed_settings,
)
from hpcgpu.cli.diagnosis import doctor, report, topo, version
from hpcgpu.cli.sites import site
from hpcgpu.cli.worker import worker
from hpcgpu.config import entry_points, read_document
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.model.allocation import DOCUMENT
from hpcgpu.model.settings import FROM
from hpcgpu.report.table import Column, Table
from hpcgpu.units import counted

# Words after the script are the script's.
_SCRIPT: dict[str, Any] = {"nargs": -1, "type": FILE, "metavar": "SCRIPT [ARGUMENTS]..."}
_NO_SCRIPT: dict[str, Any] = {**_SCRIPT, "metavar": "[SCRIPT [ARGUMENTS]...]"}
_SCRIPT_LAST = {"allow_interspersed_args": False}
_HEADINGS = {
    "Try it without a GPU": ("demo",),
    "On a cluster": ("site", "plan", "doctor"),
    "In a job, or on one machine": ("template", "launch", "run", "bind"),
    "Workers for another scheduler": ("worker",),
    "Running clusters": ("ps", "logs", "stop"),
    "Facts": ("topo", "checkpoint", "report", "version"),
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


@click.group(
    cls=Group,
    headings=_HEADINGS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    examples={
        "hpcgpu demo": "four simulated GPUs",
        "hpcgpu plan --batch slurm --nodes 2 --gpus sim:4": "look before you submit",
        "hpcgpu run my_script.py": "all GPUs of this machine",
    },
    epilog="\b\nEach command has --help, with examples. Completion in bash:\n"
    'eval "$(_HPCGPU_COMPLETE=bash_source hpcgpu)"',
    invoke_without_command=True,
)
@click.version_option(__version__, message="hpcgpu %(version)s")
@click.pass_context
def hpcgpu(context: click.Context) -> None:
    """Start a Dask cluster on the GPUs of a Slurm job, PBS job, or machine: one worker per GPU, which spills."""
    if context.invoked_subcommand is None:
        if not sys.stdout.isatty():
            raise click.exceptions.NoArgsIsHelpError(context)
        click.echo(next_steps())


for _command in (ps, logs, stop, site, doctor, report, topo, checkpoint, version, worker):
    hpcgpu.add_command(_command)


def _templates() -> dict[str, Path]:
    from hpcgpu.deploy.site_files import templates

    return templates()


@hpcgpu.command(short_help="Run two SVDs on four simulated GPUs.", examples={"hpcgpu demo": ""})
@click.option("--memory-limit", default="700MB", show_default=True, help="Host memory of each worker.")
def demo(memory_limit: str) -> None:
    """Run two SVDs on four simulated GPUs: no GPU, no batch system, no root."""
    from hpcgpu.deploy import demo as script
    from hpcgpu.deploy.start import run

    run({"gpus": "sim:4x256MiB", "memory_limit": memory_limit}, "hpcgpu demo", (str(script.__file__),))


@hpcgpu.command(
    short_help="Run a script on this machine's GPUs, or as one rank.",
    context_settings=_SCRIPT_LAST,
    examples={
        "hpcgpu run --gpus sim:4 my_script.py": "a laptop: four simulated GPUs",
        "hpcgpu run my_script.py": "all GPUs of this machine",
        "srun -n 9 --overcommit hpcgpu run my_script.py": "one rank each, in a Slurm job",
    },
)
@setting_options(entry_points.RUN)
@click.argument("script", **_SCRIPT)
def run(script: tuple[str, ...], **arguments: object) -> None:
    """Be one rank of a cluster that runs SCRIPT: under srun, under mpirun, or alone on this machine."""
    from hpcgpu.deploy import start

    start.run(typed_settings(arguments), FROM, _checked(script, entry_points.RUN))


@hpcgpu.command(
    short_help="Run a script on the GPUs of this allocation.",
    context_settings=_SCRIPT_LAST,
    examples={
        "hpcgpu launch my_script.py": "in an allocation: salloc, qsub -I",
        "hpcgpu plan --script my_script.py": "the srun or mpirun line that it takes",
    },
)
@click.option("--document", is_flag=True, hidden=True, help="Options and script are in the variable of a job.")
@setting_options(entry_points.LAUNCH)
@click.argument("script", **_SCRIPT)
def launch(script: tuple[str, ...], document: bool, **arguments: object) -> None:
    """Start the ranks of a cluster that runs SCRIPT in this allocation, with the launcher that is found."""
    from hpcgpu.deploy import start

    options = typed_settings(arguments)
    if document:
        if options or script:
            raise ConfigError("--document stands alone: it holds the options and the script")
        run_document = read_document(os.environ.pop(DOCUMENT, ""))
        if run_document.shape != "in-allocation":  # made by a cluster object, whose user typed nothing
            HpcGpuError.form = str
        start.launch_run(run_document)
    start.launch(options, FROM, _checked(script, entry_points.LAUNCH))


@hpcgpu.command(
    short_help="Bind a rank of any program as a worker, and run it.",
    context_settings=_SCRIPT_LAST,
    examples={
        "srun -n 4 --cpu-bind=none hpcgpu bind -- ./program": "each rank beside its GPU",
        "mpirun -n 4 --bind-to none hpcgpu bind --gpus sim:4 --report -- true": "look, without GPUs",
    },
)
@click.option("--report", is_flag=True, help="Say what was done, read back from the kernel.")
@click.option("--dry-run", is_flag=True, help="Print the variables for a shell; run nothing.")
@click.option("--any", "unbound", is_flag=True, help="Run the command also if it cannot be bound.")
@click.option(
    "--all-visible",
    is_flag=True,
    help="Leave the node's GPUs visible, in the order of the ranks: for programs that choose by LOCAL_RANK.",
)
@click.option("--gpus", metavar="sim:N", help="Bind to simulated GPUs.")
@click.argument("command", nargs=-1, type=FILE, metavar="-- COMMAND [ARGUMENTS]...")
def bind(command: tuple[str, ...], **options: Any) -> int:
    """Bind this rank of srun, mpirun, flux or torchrun as the worker of its GPU, and become COMMAND.

    Cores, memory, GPU and network ports are those that hpcgpu plans for a worker. One rank per GPU, several, or one
    for several GPUs.
    """
    from hpcgpu.cli import bound_command

    return bound_command.run(command, bound_command.Options(**options))


@hpcgpu.command(
    short_help="Show what would be submitted, or started here.",
    context_settings=_SCRIPT_LAST,
    examples={
        "hpcgpu plan --site perlmutter --gpus 8 --account m0000": "a machine that is known",
        "hpcgpu plan --batch slurm --nodes 2 --gpus sim:4 --no-ask --json > plan.json": "",
        "hpcgpu plan --batch slurm --nodes 2 --gpus sim:2 --no-ask --diff plan.json": "what differs",
        "hpcgpu plan --batch slurm --nodes 2 --gpus-per-node 4 --script my_script.py > job.sh": "the job script",
        "hpcgpu plan --gpus sim:4 my_script.py": "here: what hpcgpu launch or run would start",
    },
)
@click.option("--batch", type=click.Choice(["slurm", "pbs"]), help="Batch system; the site's if there is one.")
@click.option("--from", "file", type=FILE, metavar="FILE", help="XML of a node, of hwloc or NCCL; - for stdin.")
@click.option(
    "--ask/--no-ask", default=True, show_default=True, help="Ask for queues and nodes, and when the job would start."
)
@click.option("--script", "only_script", is_flag=True, help="Print the job script, or the line to start, alone.")
@json_option("the plan")
@click.option("--diff", "other", type=FILE, metavar="FILE", help="Say what differs from the plan of --json in FILE.")
@setting_options("hpcgpu plan")
@click.argument("script", **_NO_SCRIPT)
def plan(  # each is an option
    script: tuple[str, ...],
    batch: str | None,
    file: str | None,
    ask: bool,
    only_script: bool,
    as_json: bool,
    other: str | None,
    **arguments: object,
) -> int:
    """Show what would be submitted or started: request, layout, bindings, limits, network, cost, warnings, script.

    In a job it is what hpcgpu launch would start; elsewhere the job that would be submitted, with --batch or a site,
    or what hpcgpu run would start here, without. --batch, --from and options of a request mean a job anywhere.

    With --diff the exit code is diff's: 0 for plans that are alike, 1 for differences, 2 for trouble.
    """
    from hpcgpu.deploy import preview
    from hpcgpu.report.job import described, render

    script = _checked(script, "hpcgpu plan")
    ask = ask and not only_script
    planned = preview.plan(typed_settings(arguments), FROM, script, batch, file, ask=ask)
    if only_script:
        click.echo(planned.script.rstrip("\n"))
        return 0
    if other is not None:
        differing = preview.compare(other, planned)
        click.echo("".join(f"{line}\n" for line in differing), nl=False)
        return int(bool(differing))
    text = render(planned, shutil.get_terminal_size((0, 0)).columns)
    show_text(text, described(planned) if as_json else None)
    return 0


@hpcgpu.command(
    short_help="Print a job template, to be changed and submitted.",
    examples={"hpcgpu template": "list all", "hpcgpu template slurm.sbatch > job.sh": ""},
)
@click.option("--folder", "only_folder", is_flag=True, help="Print the folder in which the templates lie.")
@json_option("the templates")
@click.argument("name", required=False, shell_complete=completion(_templates))
def template(name: str | None, only_folder: bool, as_json: bool) -> None:
    """Print the job template NAME, to be changed and submitted; without NAME, list all templates."""
    from hpcgpu.deploy.site_files import package_folder, purpose_and_usage

    paths = _templates()
    about = {each: dict(zip(("about", "usage"), purpose_and_usage(path), strict=True)) for each, path in paths.items()}
    columns = (Column("template", kind="name"), Column("about"))
    text: Table | str = Table(columns, [(each, row["about"]) for each, row in about.items()])
    if name and name not in paths:
        raise ConfigError(f"there is no template {name!r}; there are: {', '.join(paths)}")
    if only_folder:
        text = f"{package_folder('jobscripts')}\n"
    elif name:
        text = paths[name].read_text()
    show_text(text, about if as_json else None)


def _checked(script: tuple[str, ...], command: str) -> tuple[str, ...]:
    """Return the script and its arguments; raise ConfigError if a command that needs it has none, or for no file."""
    if not script and command != "hpcgpu plan":
        raise ConfigError(f"the script is missing: {command} [options] script.py [arguments]")
    from hpcgpu.host import private

    if script and not stat.S_ISREG(private.mode_of(Path(script[0]))):
        raise ConfigError(f"there is no script {script[0]!r} (in {Path.cwd()}); give the path of a Python file")
    return script

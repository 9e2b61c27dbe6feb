"""The commands: they read options, call the floors below, and print."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgpu import __version__
from hpcgpu.cli import runs, sites
from hpcgpu.cli.command import FROM, Group, debug_option, json_option, setting_options, typed_settings, words_for
from hpcgpu.cli.doctor import doctor
from hpcgpu.cli.facts import report, topo, version
from hpcgpu.cli.worker import worker
from hpcgpu.config import entry_points
from hpcgpu.errors import ConfigError

if TYPE_CHECKING:
    from hpcgpu.report.job import Preview

# Words after the script are the script's.
_SCRIPT: dict[str, Any] = {"nargs": -1, "type": click.UNPROCESSED, "metavar": "SCRIPT [ARGUMENTS]..."}
_NO_SCRIPT: dict[str, Any] = {**_SCRIPT, "metavar": "[SCRIPT [ARGUMENTS]...]"}
_SCRIPT_LAST = {"allow_interspersed_args": False}
_DRY_JSON = json_option("the plan of --dry-run")
_DRY = click.option("--dry-run", is_flag=True, help="Print the plan for this node, as hpcgpu plan does; start nothing.")


_HEADINGS = {
    "Begin": ("demo", "site", "plan", "doctor"),
    "Run a script on GPUs": ("run", "launch", "jobscript", "template"),
    "Join a scheduler": ("worker",),
    "Clusters that are there": ("ps", "logs", "stop"),
    "Facts": ("topo", "report", "version"),
}


@click.group(
    cls=Group,
    headings=_HEADINGS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    examples={
        "hpcgpu demo": "four simulated GPUs",
        "hpcgpu run my_script.py": "all GPUs of this machine",
        "hpcgpu plan --batch slurm --nodes 2 --gpus sim:4": "look before you submit",
    },
    epilog="\b\nEach command has --help, with examples. Completion in bash:\n"
    'eval "$(_HPCGPU_COMPLETE=bash_source hpcgpu)"',
)
@click.version_option(__version__, message="hpcgpu %(version)s")
@debug_option
def hpcgpu() -> None:
    """Run a Dask cluster on the GPUs of a batch job: the scheduler on rank 0, one bound, spilling worker per GPU."""


for _command in (runs.ps, runs.logs, runs.stop, sites.site, doctor, report, topo, version, worker):
    hpcgpu.add_command(_command)


def _templates(_: click.Context, __: click.Parameter, typed: str) -> list[str]:
    from hpcgpu.deploy.templates import names

    return [name for name in names() if name.startswith(typed)]


@hpcgpu.command(short_help="Run two SVDs on four simulated GPUs.", examples={"hpcgpu demo": ""})
@click.option("--memory-limit", default="700MB", show_default=True, help="Host memory of each worker.")
def demo(memory_limit: str) -> None:
    """Run two SVDs on four simulated GPUs: no GPU, no batch system, no root."""
    from hpcgpu.deploy import demo as script
    from hpcgpu.deploy.start import launch

    options = {"gpus": "sim:4x256MiB", "memory_limit": memory_limit, "launcher": "mpirun"}
    launch(options, "hpcgpu demo", (str(script.__file__),))


@hpcgpu.command(
    short_help="Run a script on this machine's GPUs, or as one rank.",
    context_settings=_SCRIPT_LAST,
    examples={
        "hpcgpu run --gpus sim:4 my_script.py": "a laptop: four simulated GPUs",
        "hpcgpu run my_script.py": "all GPUs of this machine",
        "srun -n 9 --overcommit hpcgpu run my_script.py": "one rank each, in a Slurm job",
    },
)
@_DRY
@_DRY_JSON
@setting_options(entry_points.RUN)
@debug_option
@click.argument("script", **_SCRIPT)
def run(script: tuple[str, ...], dry_run: bool, as_json: bool, **arguments: object) -> None:
    """Be one rank of a cluster that runs SCRIPT: under srun, under mpirun, or alone on this machine."""
    from hpcgpu.deploy import start

    options, script = typed_settings(arguments), _checked(script, entry_points.RUN)
    if str(options.get("gpus", "")).isdecimal():
        options.setdefault("gpus_per_node", options.pop("gpus"))  # a rank has one node
    _check_json(as_json, dry_run)
    if not dry_run:
        start.run(options, FROM, script)
        return
    from hpcgpu.deploy import dry_run as dry
    from hpcgpu.launch.environment import read_allocation

    if not read_allocation(os.environ).rank.rank:  # of several ranks the first prints it
        _show(dry.run(options, FROM, script), as_json)


@hpcgpu.command(
    short_help="Run a script on the GPUs of this allocation.",
    context_settings=_SCRIPT_LAST,
    examples={
        "hpcgpu launch my_script.py": "in an allocation: salloc, qsub -I",
        "hpcgpu launch --print my_script.py": "the srun or mpirun line",
    },
)
@click.option("--print", "only_print", is_flag=True, help="Print the command that would be run.")
@_DRY
@_DRY_JSON
@click.option("--document", hidden=True, help="Run document of a cluster object, in place of options and script.")
@setting_options(entry_points.LAUNCH)
@debug_option
@click.argument("script", **_SCRIPT)
def launch(
    script: tuple[str, ...], only_print: bool, dry_run: bool, as_json: bool, document: str | None, **arguments: object
) -> None:
    """Start the ranks of a cluster that runs SCRIPT in this allocation, with the launcher that is found."""
    from hpcgpu.deploy import start

    options = typed_settings(arguments)
    if document is not None:
        if options or script or only_print or dry_run or as_json:
            raise ConfigError("--document stands alone: it holds the options and the script")
        start.launch_document(document)
    _check_json(as_json, dry_run)
    argv = (*words_for(entry_points.RUN, options), *_checked(script, entry_points.LAUNCH))
    if dry_run:
        from hpcgpu.deploy import dry_run as dry

        _show(dry.launch(options, FROM, argv), as_json)
    elif only_print:
        click.echo(start.launch_line(options, FROM, argv)[1])
    else:
        start.launch(options, FROM, script)


@hpcgpu.command(
    short_help="Print the job script that would be submitted.",
    context_settings=_SCRIPT_LAST,
    examples={
        "hpcgpu jobscript --batch slurm --nodes 2 --gpus-per-node 4 my_script.py > job.sh": "",
        "hpcgpu jobscript --site perlmutter --gpus 8 --account m0000": "of a cluster object",
    },
)
@click.option("--batch", type=click.Choice(["slurm", "pbs"]), help="Batch system; the site's if there is one.")
@setting_options("hpcgpu jobscript")
@debug_option
@click.argument("script", **_NO_SCRIPT)
def jobscript(script: tuple[str, ...], batch: str | None, **arguments: object) -> None:
    """Print the job script that would be submitted for SCRIPT, or for a cluster object without one."""
    from hpcgpu.deploy.jobs.job_plan import read_job

    if script:
        _checked(script, "hpcgpu jobscript")
    _, spec, system = read_job(typed_settings(arguments), FROM, script, batch)
    click.echo(system.script(spec), nl=False)


@hpcgpu.command(
    short_help="Show a job before it is submitted.",
    context_settings=_SCRIPT_LAST,
    examples={
        "hpcgpu plan --site perlmutter --gpus 8 --account m0000": "a machine that is known",
        "hpcgpu plan --batch slurm --nodes 2 --gpus sim:4 --no-ask --json > plan.json": "",
        "hpcgpu plan --batch slurm --nodes 2 --gpus sim:2 --no-ask --diff plan.json": "what differs",
    },
)
@click.option("--batch", type=click.Choice(["slurm", "pbs"]), help="Batch system; the site's if there is one.")
@click.option("--from", "file", metavar="FILE", help="What a node is like: hwloc's XML, or NCCL's; - for stdin.")
@click.option(
    "--ask/--no-ask", default=True, show_default=True, help="Ask for queues and nodes, and when the job would start."
)
@json_option("the plan")
@click.option("--diff", "other", metavar="FILE", help="Say what differs from the plan that --json has written to FILE.")
@setting_options("hpcgpu plan")
@debug_option
@click.argument("script", **_NO_SCRIPT)
def plan(  # each is an option
    script: tuple[str, ...],
    batch: str | None,
    file: str | None,
    ask: bool,
    as_json: bool,
    other: str | None,
    **arguments: object,
) -> int:
    """Show a job before it is submitted: request, layout, bindings, limits, network, start, cost, warnings, script.

    With --diff the exit code is diff's: 0 for plans that are alike, 1 for differences, 2 for trouble.
    """
    from hpcgpu.deploy.jobs import preview
    from hpcgpu.deploy.topo import named, read_machine

    if script:
        _checked(script, "hpcgpu plan")
    machine = None if file is None else (read_machine(file), named(file))
    planned = preview.plan(typed_settings(arguments), FROM, script, batch, machine, ask=ask)
    if other is not None:
        differing = preview.compare(other, planned)
        click.echo("".join(f"{line}\n" for line in differing), nl=False)
        return int(bool(differing))
    _show(planned, as_json)
    return 0


@hpcgpu.command(
    short_help="Print a job template, to be changed and submitted.",
    examples={"hpcgpu template": "list all", "hpcgpu template slurm.sbatch > job.sh": ""},
)
@click.option("--folder", "only_folder", is_flag=True, help="Print the folder in which the templates lie.")
@json_option("the templates")
@click.argument("name", required=False, shell_complete=_templates)
def template(name: str | None, only_folder: bool, as_json: bool) -> None:
    """Print the job template NAME, to be changed and submitted; without NAME, list all templates."""
    from hpcgpu.deploy.templates import folder, names, purpose_and_usage, render_list, text_of

    if as_json:
        rows = {name: dict(zip(("about", "usage"), purpose_and_usage(name), strict=True)) for name in names()}
        click.echo(json.dumps(rows, indent=2))
    elif only_folder:
        click.echo(folder())
    else:
        click.echo(text_of(name) if name else render_list(), nl=False)


def _check_json(as_json: bool, dry_run: bool) -> None:
    if as_json and not dry_run:
        raise ConfigError("--json needs --dry-run: a run prints the output of its script; give both, or neither")


def _show(plan: Preview, as_json: bool) -> None:
    from hpcgpu.report.job import described, render

    if as_json:
        click.echo(json.dumps(described(plan), indent=2))
        return
    click.echo(render(plan, shutil.get_terminal_size((0, 0)).columns), nl=False)


def _checked(script: tuple[str, ...], command: str) -> tuple[str, ...]:
    if not script:
        raise ConfigError(f"the script is missing: {command} [options] script.py [arguments]")
    if not Path(script[0]).is_file():
        raise ConfigError(f"there is no script {script[0]!r} (in {Path.cwd()}); give the path of a Python file")
    return script

"""The command line: plan, launch, run, template, and worker, which dask-jobqueue runs as ``hpcgpu.worker``."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from hpcgpu import __version__
from hpcgpu.cli import facts
from hpcgpu.cli.checkpoints import checkpoint
from hpcgpu.cli.command import (
    FILE,
    FROM,
    Command,
    Group,
    command,
    completion,
    json_option,
    setting_options,
    show_text,
    typed_settings,
)
from hpcgpu.cli.facts import doctor, next_steps, report, topo, version
from hpcgpu.config import layers, read_document
from hpcgpu.config.migration import DASK_CUDA, DASK_WORKER
from hpcgpu.errors import ConfigError, HpcGpuError
from hpcgpu.model import settings
from hpcgpu.model.allocation import DOCUMENT
from hpcgpu.report.table import Column, Table

_PROTOCOLS = ("tcp", "tls", "ucx", "ws", "wss")  # of distributed
_FILE = click.Path(exists=True, dir_okay=False, resolve_path=True)
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


class _LikeDasks(Command):
    """A command that names the replacement of each option of ``dask worker`` that it lacks."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the command line; called by click."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.removeprefix("--").removeprefix("no-").replace("-", "_")
            name = f"enable_{name.removeprefix('disable_')}" if name.startswith("disable_") else name
            if option := DASK_WORKER.get(name) or DASK_CUDA.get(name):
                raise ConfigError(f"{error.option_name}: {option.instead}") from error
            raise


@click.command(
    cls=_LikeDasks,
    short_help="Join a Dask scheduler with this node's GPUs.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    examples={
        "hpcgpu worker tls://10.0.0.1:8786 --device-memory-limit 0.8": "all GPUs of this node's job",
        "hpcgpu worker tls://10.0.0.1:8786 --gpus sim:2": "simulated ones",
    },
)
@click.argument("scheduler", required=False)
@click.option("--scheduler-file", type=_FILE, help="File in which the scheduler has written its address.")
@click.option("--tls-ca-file", type=_FILE, help="Certificates that are trusted.")
@click.option("--tls-cert", "tls_worker_cert", type=_FILE, help="The certificate of this end.")
@click.option("--tls-key", "tls_worker_key", type=_FILE, help="Its key.")
@click.option("--name", default="", help="Name of the worker; of several NAME-0, NAME-1 ...")
@click.option("--nworkers", type=click.IntRange(min=1), help="Number of workers; one for each GPU if not given.")
@click.option("--nanny/--no-nanny", default=True, help="Workers are always watched.")
@click.option("--host", help="Address at which the workers listen.")
@click.option("--lifetime", help="How long the workers live, such as '55m'.")
@click.option("--lifetime-stagger", help="Random part of the lifetime.")
@click.option(
    "--lifetime-restart/--no-lifetime-restart", default=None, help="Restart the workers after their lifetime."
)
@click.option("--preload", multiple=True, help="Module that each worker loads.")
@click.option("--preload-nanny", multiple=True, help="Module that each nanny loads.")
@click.option("--dashboard/--no-dashboard", default=None, help="Without effect: workers have no web server.")
@setting_options("", *settings.DASK_WORKER, *settings.WORKER, "allocator")
def worker(scheduler: str | None, scheduler_file: str | None, **options: Any) -> int:
    """Join the Dask scheduler SCHEDULER with one bound, spilling worker for each GPU of this node's job.

    Takes the options of 'dask worker' and dask-cuda-worker, and those of hpcgpu that are about a worker. 'dask
    gpu worker', 'dask gpu-worker' and 'python -m hpcgpu.worker' are the same command.
    """
    from hpcgpu.agent.fork_server import LeaderResources
    from hpcgpu.deploy import start
    from hpcgpu.deploy.settings import read

    if not options.pop("nanny"):
        raise ConfigError(f"--no-nanny: {DASK_WORKER['nanny'].instead}")
    options.pop("dashboard")
    if options["protocol"]:
        options["protocol"] = options["protocol"].removesuffix("://")  # dask-jobqueue 0.9 says --protocol tls://
    tls = {n: options.pop(n) for n in ("tls_ca_file", "tls_worker_cert", "tls_worker_key")}
    nanny = {n: options.pop(n) for n in ("host", "lifetime", "lifetime_stagger", "lifetime_restart")}
    nanny |= {n: list(options.pop(n)) or None for n in ("preload", "preload_nanny")}
    address, name, workers = _address(scheduler, scheduler_file), options.pop("name"), options.pop("nworkers")
    tls, nanny = {n: file for n, file in tls.items() if file}, {n: v for n, v in nanny.items() if v is not None}
    chosen = read(typed_settings(options), FROM).settings
    start.execute_with_rank_env(chosen)
    with LeaderResources.make(chosen) as resources:
        from hpcgpu.agent.standalone import run_standalone

        return run_standalone(chosen, resources, address, name, workers, tls=tls, nanny=nanny)


@command(short_help="Show bindings.", examples={"dask gpu config tls://HOST:8786": ""}, params=worker.params[:5])
@json_option("the bindings")
def config(scheduler: str | None, scheduler_file: str | None, as_json: bool, **tls: str | None) -> None:
    """Show how the workers of hpcgpu at SCHEDULER are bound, read back from the kernel: GPU, cores, memory, ports."""
    from hpcgpu.deploy.dashboard.worker_requests import bindings_at

    files = {name.replace("worker", "client"): file for name, file in tls.items() if file}
    table = bindings_at(_address(scheduler, scheduler_file), files).table
    show_text(table, table.to_json() if as_json else None)


def _address(address: str | None, file: str | None) -> str:
    if address and file:
        raise ConfigError(f"{address} and --scheduler-file {file}: give one of them")
    if file:
        try:
            address = str(json.loads(Path(file).read_text())["address"])
        except (OSError, ValueError, KeyError, TypeError) as e:
            why = f"--scheduler-file {file} has no address of a scheduler ({type(e).__name__}: {e})"
            give = "give the file that 'dask scheduler --scheduler-file' or dask-mpi has written, when it is complete"
            raise ConfigError(f"{why}; {give}") from e
    from hpcgpu.deploy.dask_config import scheduler_address

    if not (address := address or scheduler_address()):
        raise ConfigError("the scheduler is missing: hpcgpu worker tls://10.0.0.1:8786, or --scheduler-file FILE")
    protocol, separator, _ = address.partition("://")
    if separator and protocol not in _PROTOCOLS:
        raise ConfigError(f"{address!r} is no address of a scheduler; allowed: {', '.join(_PROTOCOLS)} before the ://")
    return address


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


for _command in (facts.ps, facts.logs, facts.stop, facts.site, doctor, report, topo, checkpoint, version, worker):
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
@setting_options(layers.RUN)
@click.argument("script", **_SCRIPT)
def run(script: tuple[str, ...], **arguments: object) -> None:
    """Be one rank of a cluster that runs SCRIPT: under srun, under mpirun, or alone on this machine."""
    from hpcgpu.deploy import start

    start.run(typed_settings(arguments), FROM, _checked(script, layers.RUN))


@hpcgpu.command(
    short_help="Run a script on the GPUs of this allocation.",
    context_settings=_SCRIPT_LAST,
    examples={
        "hpcgpu launch my_script.py": "in an allocation: salloc, qsub -I",
        "hpcgpu plan --script my_script.py": "the srun or mpirun line that it takes",
    },
)
@click.option("--document", is_flag=True, hidden=True, help="Options and script are in the variable of a job.")
@setting_options(layers.LAUNCH)
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
    start.launch(options, FROM, _checked(script, layers.LAUNCH))


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
    from hpcgpu.agent import bound_command

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
    if script and not Path(script[0]).is_file():
        raise ConfigError(f"there is no script {script[0]!r} (in {Path.cwd()}); give the path of a Python file")
    return script

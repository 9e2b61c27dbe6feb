"""The commands. What they do stands in the floors below; here they take words and print."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import click

from hpcgpu import __version__
from hpcgpu.cli import runs
from hpcgpu.cli.options import debug_option, given_settings, setting_options, some_setting_options, words_for
from hpcgpu.config import doors
from hpcgpu.errors import ConfigError, HpcGpuError

_SCRIPT: dict[str, Any] = {"nargs": -1, "type": click.UNPROCESSED, "metavar": "SCRIPT [ARGUMENTS]..."}
# what comes after the script is the script's
_SCRIPT_LAST = {"allow_interspersed_args": False}
_FROM = "option --{flag}"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, message="hpcgpu %(version)s")
@debug_option
def hpcgpu() -> None:
    """Run a Dask cluster on the GPUs of a batch job: the scheduler on rank 0, one bound, spilling worker per GPU."""


for _command in (runs.ps, runs.logs, runs.stop):
    hpcgpu.add_command(_command)


@hpcgpu.command()
@click.option("--memory-limit", default="700MB", show_default=True, help="host memory of each worker")
def demo(memory_limit: str) -> None:
    """Run two SVDs on four simulated GPUs: no GPU, no batch system, no root."""
    from hpcgpu.deploy import demo as script
    from hpcgpu.deploy.start import launch

    given = {"gpus": "sim:4x256MiB", "memory_limit": memory_limit, "launcher": "mpirun"}
    launch(given, "hpcgpu demo", (str(script.__file__),))


@hpcgpu.command(context_settings=_SCRIPT_LAST)
@setting_options(doors.RUN)
@debug_option
@click.argument("script", **_SCRIPT)
def run(script: tuple[str, ...], **arguments: object) -> None:
    """Be one rank of a cluster that runs SCRIPT: under srun, under mpirun, or alone on this machine."""
    from hpcgpu.deploy.start import run as run_rank

    run_rank(given_settings(arguments), _FROM, _checked(script, doors.RUN))


@hpcgpu.command(context_settings=_SCRIPT_LAST)
@click.option("--print", "only_print", is_flag=True, help="Print the command that would be run.")
@click.option("--document", hidden=True, help="Run document of a cluster object, in place of options and script.")
@setting_options(doors.LAUNCH)
@debug_option
@click.argument("script", **_SCRIPT)
def launch(script: tuple[str, ...], only_print: bool, document: str | None, **arguments: object) -> None:
    """Start the ranks of a cluster that runs SCRIPT in this allocation, with the launcher that is found."""
    from hpcgpu.deploy import start

    given = given_settings(arguments)
    if document is not None:
        if given or script or only_print:
            raise ConfigError("--document stands alone: it holds the options and the script")
        start.launch_document(document)
    if only_print:
        words = (*words_for(doors.RUN, given), *_checked(script, doors.LAUNCH))
        click.echo(start.launch_line(given, _FROM, words))
    else:
        start.launch(given, _FROM, _checked(script, doors.LAUNCH))


@hpcgpu.command(context_settings=_SCRIPT_LAST)
@click.option("--batch", type=click.Choice(["slurm", "pbs"]), help="Batch system; the site's if there is one.")
@setting_options("hpcgpu jobscript")
@debug_option
@click.argument("script", **_SCRIPT)
def jobscript(script: tuple[str, ...], batch: str | None, **arguments: object) -> None:
    """Print the job script that would be submitted for SCRIPT, or for a cluster object without one."""
    from hpcgpu.deploy.jobs.job_plan import job_script

    if script:
        _checked(script, "hpcgpu jobscript")
    click.echo(job_script(given_settings(arguments), _FROM, script, batch), nl=False)


@hpcgpu.command()
@click.option("--json", "as_json", is_flag=True, help="Print machine, workers and ports as JSON.")
@click.option("--answer", is_flag=True, hidden=True, help="JSON for topo --diff, beside other nodes' answers.")
@click.option("--svg", "picture", type=click.Path(dir_okay=False), help="Write a picture of the node to this file.")
@click.option(
    "--from", "file", metavar="FILE", help="Plan for the machine of an XML file: hwloc's, or NCCL's; - for stdin."
)
@click.option("--cpuset", metavar="LIST", help="Plan with these PUs only, such as 0-7,16.")
@click.option("--gpus", metavar="LIST", help="Plan for these GPUs only, by position, PCI address or UUID; or sim:4.")
@click.option("--workers", type=int, metavar="N", help="Plan for so many workers.")
@click.option("--diff", is_flag=True, help="Say what differs between the nodes of this job, or between FILES.")
@some_setting_options("workers_per_gpu", "cpu_workers", "nthreads", "cores", "reserved_cores", "memory_policy", "nics")
@debug_option
@click.argument("files", nargs=-1, metavar="[FILES]...")
def topo(files: tuple[str, ...], diff: bool, as_json: bool, answer: bool, picture: str | None, **words: Any) -> int:  # noqa: ANN401
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
    part = Selection(**{name: words.pop(name) for name in ("file", "cpuset", "gpus", "workers")})
    planned = plan(part, given_settings(words), _FROM)
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


def _checked(script: tuple[str, ...], command: str) -> tuple[str, ...]:
    if not script:
        raise ConfigError(f"no script was given: {command} [options] script.py [arguments]")
    if not Path(script[0]).is_file():
        raise ConfigError(f"there is no script {script[0]!r} (in {Path.cwd()}); give the path of a Python file")
    return script

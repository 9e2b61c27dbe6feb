"""The commands that dask's command line has, too: worker, and config of dask gpu."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hpcgpu.cli.command import Command, command, json_option, setting_options, show_text, typed_settings
from hpcgpu.config.migration import DASK_CUDA, DASK_WORKER
from hpcgpu.errors import ConfigError
from hpcgpu.model import settings

_PROTOCOLS = ("tcp", "tls", "ucx", "ws", "wss")  # of distributed
_FILE = click.Path(exists=True, dir_okay=False, resolve_path=True)


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
    chosen = read(typed_settings(options), settings.FROM).settings
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
    protocol, _, place = address.rpartition("://")
    why = "" if protocol in ("", *_PROTOCOLS) else f"; allowed: {', '.join(_PROTOCOLS)} before the ://"
    if not why and not protocol.startswith("ws") and not place.rpartition(":")[2].isdecimal():
        why = ": its port is missing; allowed: such as tls://10.0.0.1:8786"
    if why:
        raise ConfigError(f"{address!r} is no address of a scheduler{why}")
    return address

"""Lead this node's workers for a scheduler that others started, as ``dask worker`` does: no MPI, no rendezvous."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from distributed import rpc

from hpcgpu import supervise
from hpcgpu.agent.fork_server import LeaderResources
from hpcgpu.agent.leader import CANCELLED_S, Leader, LeaderContext
from hpcgpu.deploy import network
from hpcgpu.deploy.network.scheduler_file import ClusterSecurity, connect_first
from hpcgpu.deploy.processes import node
from hpcgpu.deploy.processes.nanny import hand_over
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import log, process
from hpcgpu.model import RunDocument, Settings, WorkerSpec
from hpcgpu.supervise import reason_of

# The part of the job's memory for this process and the fork server: twice the 62 MiB of both for 2 workers (Pss,
# distributed 2026.8).
_OWN_BYTES = 128 << 20


def run_standalone(
    settings: Settings,
    resources: LeaderResources,
    scheduler: str,
    name: str,
    workers: int | None,
    *,
    tls: Mapping[str, str],
    nanny: Mapping[str, Any],
) -> int:
    """Start the workers and stay while one lives; return the exit code, or raise ConfigError or LaunchError.

    Several workers are ``name-0``, ``name-1`` ..., by which dask-jobqueue counts; ``workers=None`` is one for each GPU.
    ``tls`` are files: tls_ca_file, tls_worker_cert, tls_worker_key; ``nanny`` more arguments of distributed's Nanny.
    """
    protocol = scheduler.partition("://")[0] if "://" in scheduler else "tcp"
    specs = _plan(settings, name, workers, str(resources.scratch.path), protocol)
    process.hide_gpus(protocol)
    run, fork_server = RunDocument(settings), resources.fork_server
    context = LeaderContext(run=run, environ=os.environ, fork_server=fork_server, scheduler={}, workers=specs)
    return asyncio.run(Standalone(context, scheduler, tls, nanny).run())


def _plan(settings: Settings, name: str, workers: int | None, scratch: str, protocol: str) -> tuple[WorkerSpec, ...]:
    """Return the workers, named as ``dask worker`` does; LaunchError for too many, ConfigError for a bad name."""
    machine = node.read_node(settings, dict(os.environ))
    most = len(machine.gpus) * settings.workers_per_gpu
    count = workers or most
    if count > most or count % settings.workers_per_gpu:
        raise LaunchError(
            f"--nworkers {count}: {machine.name} has {len(machine.gpus)} GPUs for this job, and each has "
            f"{settings.workers_per_gpu} of the workers; leave --nworkers out, or request more GPUs"
        )
    if "/" in name or "\0" in name:
        raise ConfigError(f"--name {name!r} has a slash; allowed: the name of a file")
    specs = node.plan_here(settings, machine, count, scratch=scratch, kept_bytes=_OWN_BYTES)
    notes = (*process.replaced(os.environ, settings.env), *node.lowered(settings, specs))
    log.say_of(machine.name, (*notes, *node.folder_notes(settings, count), network.exposed(protocol)))
    if not name:
        return specs
    return tuple(replace(spec, name=f"{name}-{i}" if len(specs) > 1 else name) for i, spec in enumerate(specs))


class Standalone(Leader):
    """The workers of this node, for a scheduler that others started: no MPI, no rendezvous."""

    close_s = 10.0  # as in dask worker

    def __init__(
        self, context: LeaderContext, scheduler: str, tls: Mapping[str, str], nanny: Mapping[str, Any]
    ) -> None:
        super().__init__(context)
        self.security = ClusterSecurity(**tls)
        self._scheduler, self._nanny = scheduler, nanny

    async def serve(self) -> int:
        """Start the workers, and stay while one lives; return the exit code."""
        specs = self.context.workers
        reached = await connect_first([self._scheduler], self.security, self.context.run.settings.death_timeout_s)
        if failed := await self.start_nannies(reached, **self._nanny):
            raise LaunchError(f"{len(failed)} of {len(specs)} workers could not be started: {failed[0]}")
        text = ", ".join(f"{s.name} on PUs {s.binding.cpuset} beside GPU {s.binding.gpus[0].pci}" for s in specs)
        log.say(f"{len(specs)} workers at {self._scheduler}: {text}")
        await self.workers_ended()
        return 0

    def stop(self, sig: signal.Signals, why: str) -> None:
        """End because of a signal. At SIGTERM the data is moved first that no other worker has."""
        if sig != signal.SIGTERM or not self.nannies:
            super().stop(sig, why)
        elif not self._leaving:
            text = "handing over the workers' data"
            self._leaving = supervise.start(self._hand_over, text, lambda e: self.end(128 + sig, reason_of(e)))

    async def _hand_over(self) -> None:
        """Have the scheduler move the data. Where all workers end, none can take it."""
        stay = {"close_workers": False, "remove": False}
        try:
            async with asyncio.timeout(CANCELLED_S):
                await self._save_here()
                left, count = await hand_over(self.nannies, self._scheduler, self.security, "retire_workers", **stay)
            log.say(f"handed over the data of {left} of {count} workers")
        except (OSError, TimeoutError) as error:
            log.say(f"data could not be handed over: {error or 'out of time'}")
        self.end(128 + signal.SIGTERM, "it got SIGTERM")

    async def _save_here(self) -> None:
        """Have the workers write what checkpoints lack; a scheduler that closes would log why it could not ask them."""
        arguments = self.security.get_connection_args("worker")

        async def save_one(name: str, address: str) -> None:
            async with rpc(address, connection_args=arguments) as to:
                log.say_of(name, await to.hpcgpu_save(limit_s=CANCELLED_S / 2))

        await asyncio.gather(*(save_one(n.name, n.worker_address) for n in self.nannies if n.worker_address))

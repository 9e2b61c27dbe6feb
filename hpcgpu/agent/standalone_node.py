"""Run this node's workers for a scheduler that others started: ``python -m hpcgpu.worker SCHEDULER``.

It stands where ``dask worker`` stands in the jobs of dask-jobqueue. No MPI, no rendezvous: one process plans the node,
forks the workers from one fork server as a leader does, and watches them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpcgpu.agent.fork_server import ForkServerSpawner
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import log, process
from hpcgpu.model import Settings, WorkerSpec

if TYPE_CHECKING:
    from distributed import Nanny
    from distributed.security import Security

    from hpcgpu.agent.fork_server import LeaderResources

_CLOSE_S = 10.0  # as in dask worker
# After SIGTERM: KillWait of Slurm is 30 s, and as little as 5 at some sites. distributed 2026.8 checks each 2 s.
_HAND_OVER_S = 4.0
# The part of the job's memory for this process and the fork server: twice the 62 MiB of both for 2 workers (Pss,
# distributed 2026.8).
_OWN_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneOptions:
    """Options of ``dask worker`` beside those of a worker."""

    scheduler: str
    name: str = ""  # several workers are name-0, name-1 ..., by which dask-jobqueue counts
    workers: int | None = None  # None: one for each GPU
    # files: tls_ca_file, tls_worker_cert, tls_worker_key
    tls: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    # further arguments of distributed's Nanny: lifetime, preload ...
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


def run(typed: Mapping[str, object], typed_from: str, options: StandaloneOptions) -> int:
    """Start the workers and stay while one lives; return the exit code, or raise ConfigError or LaunchError."""
    from hpcgpu.agent.fork_server import LeaderResources
    from hpcgpu.deploy import settings as read_settings
    from hpcgpu.deploy.start import ld_preload

    settings = read_settings.read(typed, typed_from).settings
    if process.rank_env(os.environ):  # parts of it are read before main only: execute this program again
        added = process.rank_env(os.environ, ld_preload(settings))
        process.execute((sys.executable, *sys.orig_argv[1:]), {**os.environ, **added})
    with LeaderResources.make(settings) as resources:
        specs = plan(settings, options, str(resources.scratch.path))
        process.hide_gpus(_protocol(options.scheduler))
        return asyncio.run(_StandaloneNode(settings, options, specs, resources).run())


def plan(settings: Settings, options: StandaloneOptions, scratch: str) -> tuple[WorkerSpec, ...]:
    """Return the workers, with the names by which the caller counts them."""
    from hpcgpu.deploy.network import protocols
    from hpcgpu.deploy.processes import node

    machine = node.Machine.read(settings, os.environ)
    most = len(machine.gpus) * settings.workers_per_gpu
    count = options.workers or most
    if count > most or count % settings.workers_per_gpu:
        raise LaunchError(
            f"--nworkers {count}: {machine.name} has {len(machine.gpus)} GPUs for this job, and each has "
            f"{settings.workers_per_gpu} of the workers; leave --nworkers out, or request more GPUs"
        )
    specs = node.plan_here(settings, machine, count, scratch=scratch, environ=dict(os.environ), kept_bytes=_OWN_BYTES)
    notes = (
        *process.replaced(os.environ, settings.env),
        *node.lowered(settings, specs),
        *node.folder_notes(settings, count),
    )
    log.say_of(machine.name, (*notes, protocols.exposed(_protocol(options.scheduler))))
    return tuple(replace(spec, name=name) for spec, name in zip(specs, names(options.name, specs), strict=True))


def _protocol(address: str) -> str:
    return address.partition("://")[0] if "://" in address else "tcp"


def names(name: str, specs: tuple[WorkerSpec, ...]) -> tuple[str, ...]:
    """Return the workers' names as ``dask worker`` makes them; raise ConfigError for a name that cannot be a file's."""
    if "/" in name or "\0" in name:
        raise ConfigError(f"--name {name!r} has a slash; allowed: the name of a file")
    if not name:
        return tuple(spec.name for spec in specs)
    return (name,) if len(specs) == 1 else tuple(f"{name}-{i}" for i in range(len(specs)))


class _StandaloneNode:
    """The nannies, from start to end."""

    def __init__(
        self, settings: Settings, options: StandaloneOptions, specs: tuple[WorkerSpec, ...], resources: LeaderResources
    ) -> None:
        from distributed.security import Security

        self._settings, self._options, self._specs, self._resources = settings, options, specs, resources
        self._security: Security = Security(**options.tls)
        self._nannies: list[Nanny] = []
        self._signal = 0

    async def run(self) -> int:
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me

        def stop(number: int) -> None:
            if not self._signal:
                self._signal = number
                me.cancel()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(number, stop, number)
        self._spawner = ForkServerSpawner(self._resources.fork_server, lambda: stop(0))
        try:
            await self._start()
            await asyncio.gather(*(nanny.finished() for nanny in self._nannies))
        except asyncio.CancelledError:
            if not self._signal:
                raise LaunchError("the fork server process died, and with it all workers of this node") from None
            if self._signal == signal.SIGTERM:
                await self._hand_over()
            return 128 + self._signal
        finally:
            why = f"it got {signal.Signals(self._signal).name}" if self._signal else "the workers are to end"
            await asyncio.gather(*(n.close(timeout=_CLOSE_S, reason=why) for n in self._nannies))
        return 0

    async def _start(self) -> None:
        from hpcgpu.deploy.network.connect_first import connect_first
        from hpcgpu.deploy.processes.nanny import make_nanny

        reached = await connect_first([self._options.scheduler], self._security, self._settings.death_timeout_s)
        common: dict[str, Any] = {"spawner": self._spawner, "security": self._security, **self._options.options}
        self._nannies = [make_nanny(reached, self._settings, spec, **common) for spec in self._specs]
        done = await asyncio.gather(*(n.start() for n in self._nannies), return_exceptions=True)
        if failed := [e for e in done if isinstance(e, BaseException)]:
            raise LaunchError(f"{len(failed)} of {len(done)} workers could not be started: {failed[0]}")
        text = ", ".join(f"{s.name} on PUs {s.binding.cpuset} beside GPU {s.binding.gpus[0].pci}" for s in self._specs)
        log.say(f"{len(done)} workers at {self._options.scheduler}: {text}")

    async def _hand_over(self) -> None:
        """Have the scheduler move the data that no other worker has. Where all workers end, none can take it."""
        from hpcgpu.deploy.processes.nanny import hand_over

        stay = {"close_workers": False, "remove": False}
        try:
            async with asyncio.timeout(_HAND_OVER_S):
                left, count = await hand_over(
                    self._nannies, self._options.scheduler, self._security, "retire_workers", **stay
                )
            log.say(f"handed over the data of {left} of {count} workers")
        except (OSError, TimeoutError) as error:
            log.say(f"data could not be handed over: {error or 'out of time'}")

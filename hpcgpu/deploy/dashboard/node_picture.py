"""Draw a node for the page: one of its workers does it, on request."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distributed import Scheduler, Worker

from hpcgpu.host import discover
from hpcgpu.model import Binding, Topology, WorkerSpec
from hpcgpu.pictures.svg import render_svg
from hpcgpu.plan.binding.ports import Ports, Why, label

_ANSWER_S = 10.0


def serve(worker: Worker, spec: WorkerSpec) -> None:
    """Let a worker send its binding and draw its node; called when it starts."""

    async def draw(names: Sequence[str], bindings: Sequence[bytes]) -> dict[str, Any]:
        # in a thread: libhwloc reads the machine for about 0.1 s
        return await asyncio.to_thread(_drawn_here, spec, names, [pickle.loads(binding) for binding in bindings])

    worker.handlers["hpcgpu_binding"] = lambda: pickle.dumps(spec.binding)
    worker.handlers["hpcgpu_picture"] = draw


def _drawn_here(spec: WorkerSpec, names: Sequence[str], bindings: Sequence[Binding]) -> dict[str, Any]:
    topology = discover.topology()
    if spec.simulated:
        gpus = {gpu.uuid: gpu for binding in bindings for gpu in binding.gpus[:1]}
        topology = replace(topology, gpus=tuple(gpus.values()))
    return drawn(topology, names, bindings)


def drawn(topology: Topology, names: Sequence[str], bindings: Sequence[Binding]) -> dict[str, Any]:
    """Return the picture of a node as SVG, and messages about its dead ports."""
    ports = Ports(topology)
    dead: dict[Why, list[str]] = {}
    for nic in ports.all:
        if not nic.active:
            dead.setdefault(ports.why_not[nic], []).append(label(nic))
    said = [f"{', '.join(sorted(who))}: {why.singular if len(who) == 1 else why.plural}" for why, who in dead.items()]
    return {"svg": render_svg(topology, bindings, names), "dead_ports": said}


async def ask(scheduler: Scheduler, workers: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return picture and dead ports of the node of these workers (address, name); raise OSError or TimeoutError."""
    async with asyncio.timeout(_ANSWER_S):
        bindings = await asyncio.gather(*(scheduler.rpc(address).hpcgpu_binding() for address, _ in workers))
        drawer = scheduler.rpc(workers[0][0])
        found: dict[str, Any] = await drawer.hpcgpu_picture(names=[name for _, name in workers], bindings=bindings)
        return found

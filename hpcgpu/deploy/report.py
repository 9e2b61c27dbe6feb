"""What the workers are tied to and what they have spilled: asked of them, as tables for people."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from distributed import Client, Worker

from hpcgpu.errors import ConfigError
from hpcgpu.host import bind
from hpcgpu.model import ActualBinding, WorkerSpec
from hpcgpu.plan.views import explain
from hpcgpu.units import format_bytes


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker as it is.

    Attributes
    ----------
    tiers : mapping of str to int
        Bytes that lie in each tier now.
    moved : mapping of str to int
        Bytes that have been moved since the start, by direction.

    """

    spec: WorkerSpec
    actual: ActualBinding
    tiers: Mapping[str, int]
    moved: Mapping[str, int]

    @property
    def differences(self) -> tuple[str, ...]:
        """Where the process differs from its plan."""
        return explain.differences(self.spec, self.actual)


@dataclass(frozen=True, slots=True)
class Bindings:
    """What all workers of a cluster are tied to, planned and actual; a table in a terminal and in a notebook."""

    workers: tuple[WorkerFacts, ...]

    @property
    def differences(self) -> dict[str, tuple[str, ...]]:
        """What is not as planned, by the worker's name; empty when all is."""
        return {w.spec.name: w.differences for w in self.workers if w.differences}

    def __str__(self) -> str:
        table = explain.render_actual([w.spec for w in self.workers], [w.actual for w in self.workers])
        if wrong := self.differences:
            return f"{table}{len(wrong)} of {len(self.workers)} workers are not as planned\n"
        return f"{table}read back from the kernel: all threads are where they were planned\n"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def bindings(client: Client) -> Any:  # noqa: ANN401 - a coroutine from an asynchronous client
    """Return what each worker is tied to, read back from the kernel now: threads, memory policy, environment.

    Parameters
    ----------
    client : Client
        Of a cluster whose workers hpcgpu has started.

    Returns
    -------
    Bindings
        An awaitable of it where the client is asynchronous.

    Raises
    ------
    ConfigError
        A worker was started by something else.

    """
    return client.sync(_bindings, client)


def workers(client: Client) -> tuple[WorkerFacts, ...]:
    """Ask all workers of the client's cluster, in the order of their names."""
    found: Bindings = bindings(client)
    return found.workers


async def _bindings(client: Client) -> Bindings:
    facts = await client.run(_facts)
    return Bindings(tuple(sorted(facts.values(), key=lambda f: by_number(f.spec.name))))


def by_number(name: str) -> tuple[str, bool, int, str]:
    """Return a key by which workers' names are sorted: those of a host by their numbers, ``cpu0`` after all GPUs'."""
    host, _, number = name.rpartition("-")
    digits = number.removeprefix("cpu")
    return host, digits != number, int(digits) if digits.isdigit() else 0, name


def _facts(dask_worker: Worker) -> WorkerFacts:
    store, spec = dask_worker.data, getattr(dask_worker.plugins.get("hpcgpu"), "spec", None)
    if spec is None:
        raise ConfigError(
            f"worker {dask_worker.name} was not started by hpcgpu, so that nobody has planned its binding; "
            "bindings() asks workers of SLURMGPUCluster, PBSGPUCluster, LocalGPUCluster and 'hpcgpu launch'"
        )
    moved = {name: count.nbytes for name, count in store.counters.items()}
    env = tuple((name, os.environ[name]) for name, _ in spec.env if name in os.environ)
    return WorkerFacts(spec, replace(bind.read_binding(), env=env), dict(store.tiers), moved)


def spilled(facts: tuple[WorkerFacts, ...]) -> dict[str, Any]:
    """Return the bytes moved by all workers together, by direction."""
    out: dict[str, int] = {}
    for worker in facts:
        for name, size in worker.moved.items():
            out[name] = out.get(name, 0) + size
    return out


def spill_line(moved: Mapping[str, int]) -> str:
    """Return the moves in one line."""
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in moved.items())

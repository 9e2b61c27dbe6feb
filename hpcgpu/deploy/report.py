"""What the workers are tied to and what they have spilled: asked of them, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed import Client, Worker

from hpcgpu.host import bind
from hpcgpu.model import ActualBinding, WorkerSpec
from hpcgpu.plan.explain import binding_table, render_table
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
        return bind.differences(self.spec.binding, self.actual)


def workers(client: Client) -> tuple[WorkerFacts, ...]:
    """Ask all workers of the client's cluster, in the order of their names."""
    return tuple(sorted(client.run(_facts).values(), key=lambda f: f.spec.name))


def _facts(dask_worker: Worker) -> WorkerFacts:
    store = dask_worker.data
    moved = {name: count.nbytes for name, count in store.counters.items()}
    return WorkerFacts(dask_worker.plugins["hpcgpu"].spec, bind.read_binding(), dict(store.tiers), moved)


def bindings(facts: tuple[WorkerFacts, ...]) -> str:
    """Return the table worker → GPU, cores, memory nodes, NIC; differences from the plan stand below it."""
    wrong = [f"  {f.spec.name}: {difference}\n" for f in facts for difference in f.differences]
    proof = "read back from the kernel: all threads are where they were planned\n"
    return render_table(binding_table([f.spec for f in facts])) + (
        "".join(["not as planned:\n", *wrong]) if wrong else proof
    )


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

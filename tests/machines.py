"""The recorded machines, as the tests of plans take them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from hpcgpu.model import CpuSet, Gpu, Topology
from hpcgpu.plan.binding import place_simulated
from hpcgpu.topology import document

DATA = Path(__file__).parent / "data" / "topology"
MACHINES = sorted(p.stem for p in DATA.glob("*.xml"))
GIB = 2**30


@cache
def machine(name: str) -> Topology:
    return document.read((DATA / f"{name}.xml").read_text())


def pus(topology: Topology) -> CpuSet:
    return CpuSet(i for c in topology.cores for i in c)


def gpus_of(topology: Topology) -> tuple[Gpu, ...]:
    """Its GPUs, or four simulated ones where it has none."""
    return topology.gpus or place_simulated(topology, 4, GIB, "node")

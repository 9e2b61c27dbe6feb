"""Plans for machines that documents describe: golden ones to read, and laws."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from documented import DOCUMENTED, GRANTED, LUMI_CORES
from paths import TOPOLOGIES

from hpcgpu.model import Binding, CpuSet, WorkerSpec
from hpcgpu.plan.binding.bindings import plan_bindings
from hpcgpu.plan.views.overview import render_workers

GOLDEN = TOPOLOGIES / "golden"


def granted(name: str) -> CpuSet:
    return GRANTED.get(name) or CpuSet(i for c in DOCUMENTED[name].cores for i in c)


def plan(name: str) -> tuple[Binding, ...]:
    return plan_bindings(DOCUMENTED[name], DOCUMENTED[name].gpus, granted(name))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_expected_plan(name: str) -> None:
    """UPDATE_GOLDEN=1 writes the files anew; read their difference before you commit it."""
    text = render_workers(DOCUMENTED[name], [WorkerSpec(name=str(i), binding=b) for i, b in enumerate(plan(name))])
    path = GOLDEN / f"documented-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_worker_has_cores_and_memory_next_to_its_gpu(name: str) -> None:
    nodes = {n.os_index: n.cpuset for n in DOCUMENTED[name].numa_nodes}
    bindings = plan(name)
    for b in bindings:
        home = b.gpus[0].numa_node
        assert home is not None
        assert b.cpuset & nodes[home]
        assert home in b.memory_nodes
        assert b.memory_nodes <= nodes.keys()  # never a GPU's own memory
    counts = [len(b.cpuset) for b in bindings]
    assert sum(counts) == len(granted(name)) == len(CpuSet().union(*(b.cpuset for b in bindings)))
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize("name", DOCUMENTED)
def test_ports_have_loads_within_one(name: str) -> None:
    topology = DOCUMENTED[name]
    used = Counter(n.name for b in plan(name) for n in b.nics)
    loads = [used[n.name] for n in topology.nics]
    assert sum(loads) == (len(topology.gpus) if topology.nics else 0)
    assert max(loads, default=0) - min(loads, default=0) <= 1


@pytest.mark.parametrize("name", ["polaris-a100", "delta-a100x4", "frontier", "lumi-g", "daint-gh200"])
def test_where_each_node_has_as_many_gpus_no_core_is_remote(name: str) -> None:
    nodes = {n.os_index: n.cpuset for n in DOCUMENTED[name].numa_nodes}
    assert all(b.cpuset <= nodes[b.gpus[0].numa_node or 0] for b in plan(name))


def test_polaris_gpus_next_to_a_port_have_it_and_the_tied_ones_one_each() -> None:
    ports = [b.nics[0].name for b in plan("polaris-a100")]
    assert (ports[3], ports[1]) == ("mlx5_0", "mlx5_1")
    assert sorted([ports[0], ports[2]]) == ["mlx5_0", "mlx5_1"]


def test_lumi_workers_are_on_the_documented_numa_nodes() -> None:
    nodes = [n.cpuset for n in DOCUMENTED["lumi-g"].numa_nodes]
    for core, binding in zip(LUMI_CORES, plan("lumi-g"), strict=True):
        assert binding.cpuset <= next(n for n in nodes if core in n)


def test_slingshot_workers_have_an_interface() -> None:
    assert {b.interface for b in plan("daint-gh200")} == {"hsn0", "hsn1", "hsn2", "hsn3"}

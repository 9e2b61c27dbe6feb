"""Plans for machines that documents describe, to read; the laws are in test_binding_laws."""

from __future__ import annotations

import os

import pytest
from documented import DOCUMENTED, GRANTED, LUMI_CORES
from paths import TOPOLOGIES

from hpcgpu.model import Binding, CpuSet, WorkerSpec
from hpcgpu.plan.binding.bindings import plan_bindings
from hpcgpu.report.machine import workers_table

GOLDEN = TOPOLOGIES / "golden"


def granted(name: str) -> CpuSet:
    return GRANTED.get(name) or CpuSet(i for c in DOCUMENTED[name].cores for i in c)


def plan(name: str) -> tuple[Binding, ...]:
    return plan_bindings(DOCUMENTED[name], DOCUMENTED[name].gpus, granted(name))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_expected_plan(name: str) -> None:
    """UPDATE_GOLDEN=1 writes the files anew; read their difference before you commit it."""
    text = workers_table(
        DOCUMENTED[name], [WorkerSpec(name=str(i), binding=b) for i, b in enumerate(plan(name))]
    ).to_text()
    path = GOLDEN / f"documented-{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", ["polaris-a100", "delta-a100x4", "frontier", "lumi-g", "daint-gh200"])
def test_where_each_node_has_as_many_gpus_no_core_is_remote(name: str) -> None:
    nodes = {n.os_index: n.cpuset for n in DOCUMENTED[name].numa_nodes}
    assert all(b.cpuset <= nodes[b.gpus[0].numa_node or 0] for b in plan(name))


def test_polaris_daint_and_lumi_are_planned_as_documented() -> None:
    ports = [b.nics[0].name for b in plan("polaris-a100")]
    assert (ports[3], ports[1]) == ("mlx5_0", "mlx5_1")
    assert sorted([ports[0], ports[2]]) == ["mlx5_0", "mlx5_1"]
    assert {b.interface for b in plan("daint-gh200")} == {"hsn0", "hsn1", "hsn2", "hsn3"}
    nodes = [n.cpuset for n in DOCUMENTED["lumi-g"].numa_nodes]
    for core, binding in zip(LUMI_CORES, plan("lumi-g"), strict=True):
        assert binding.cpuset <= next(n for n in nodes if core in n)

"""The rules that the topology benchmark sets beside ours do what their owners' do: counts known from those machines."""

from __future__ import annotations

import sys
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT, TOPOLOGIES

from hpcgpu.model import CpuSet, Gpu, NumaNode, Topology
from hpcgpu.topology import hwloc_xml

sys.path.append(str(ROOT / "benchmarks"))

import _rules as rules


@cache
def machine(name: str) -> Topology:
    return hwloc_xml.read((TOPOLOGIES / f"{name}.xml").read_text())


def node(packages: int, numa: int, cores: int, homes: list[int]) -> Topology:
    """Even NUMA nodes and packages, one PU per core, a GPU on each of ``homes``."""
    share = cores // numa
    nodes = [NumaNode(n, CpuSet(range(n * share, (n + 1) * share)), 1, n * packages // numa) for n in range(numa)]
    gpus = [Gpu(f"0000:{i + 1:02x}:00.0", numa_node=home) for i, home in enumerate(homes)]
    return Topology(tuple(nodes), tuple(CpuSet([i]) for i in range(cores)), tuple(gpus))


SD665, CORONA, LASSEN = machine("turin-4gpu-nvml"), machine("epyc-corona"), machine("coral-lassen")
JUWELS = node(2, 8, 48, [3, 1, 7, 5])  # GPU -> NUMA node of JUWELS Booster, JURECA-DC, MeluXina, XE8640 H100
TIOGA = node(1, 4, 64, [3, 3, 1, 1, 0, 0, 2, 2])
PASCAL = node(2, 2, 36, [0, 0])


def homes(topology: Topology) -> list[int | None]:
    return [g.numa_node for g in rules.in_pci_order(topology)]


def on_the_right_node(topology: Topology, rule: rules.CoreRule) -> int:
    """Workers whose first core is on their GPU's NUMA node."""
    where = {pu: n.os_index for n in topology.numa_nodes for pu in n.cpuset}
    return sum(where[min(c)] == home for c, home in zip(rule(topology), homes(topology), strict=True))


def on_the_right_package(topology: Topology, rule: rules.CoreRule) -> int:
    package = {pu: n.package for n in topology.numa_nodes for pu in n.cpuset}
    of_node = {n.os_index: n.package for n in topology.numa_nodes}
    return sum(package[min(c)] == of_node[home] for c, home in zip(rule(topology), homes(topology), strict=True))


def test_recorded_machines_have_gpus_where_documented() -> None:
    assert homes(SD665) == [1, 2, 6, 7]
    assert homes(CORONA) == [1, 2, 5, 7]
    assert homes(LASSEN) == [0, 0, 8, 8]


@pytest.mark.parametrize(
    ("topology", "bindpcie", "block", "socket", "dask_cuda"),
    [
        pytest.param(JUWELS, 1, 0, 4, 1, id="JUWELS Booster"),
        pytest.param(SD665, 0, 1, 4, 1, id="SD665-N"),
        pytest.param(CORONA, 0, 1, 4, 1, id="Corona"),
        pytest.param(TIOGA, 2, 2, 8, 2, id="Tioga"),
        pytest.param(PASCAL, 1, 1, 1, 2, id="Pascal"),
        pytest.param(LASSEN, 4, 4, 4, 2, id="Lassen"),
    ],
)
def test_workers_placed_right(topology: Topology, bindpcie: int, block: int, socket: int, dask_cuda: int) -> None:
    assert on_the_right_node(topology, rules.bindpcie) == bindpcie
    assert on_the_right_node(topology, rules.block_of_cores) == block
    assert on_the_right_package(topology, rules.socket_by_rank) == socket
    assert on_the_right_node(topology, rules.dask_cuda_worker) == dask_cuda


def test_a_block_of_cores_may_hold_local_cores_behind_its_first() -> None:
    """The first core says too little of a block over two NUMA nodes: the benchmark counts half of the cores."""
    local = [c & rules.local_cores(CORONA, g) for c, g in zip(rules.block_of_cores(CORONA), CORONA.gpus, strict=True)]
    assert [len(c) for c in local] == [12, 12, 12, 12]  # of 24 PUs each


def test_mpibind_gives_two_gpus_to_a_task_of_uneven_nodes() -> None:
    """As mpibind does on this machine: tasks 0 and 1 one GPU each, task 2 none, task 3 two."""
    nodes = {n.os_index: n.cpuset for n in SD665.numa_nodes}
    runs = [CpuSet(nodes[i] | nodes[i + 1]) for i in (0, 2, 4, 6)]
    assert list(rules.mpibind_like(SD665)) == [runs[0], runs[1], runs[3], runs[3]]


def test_mpibind_divides_a_numa_node_among_its_gpus() -> None:
    first, second, *_ = rules.mpibind_like(LASSEN)
    assert (str(first), str(second)) == ("8-47", "48-87")


def test_ports() -> None:
    def names(rule: rules.NicRule, topology: Topology) -> list[list[str]]:
        return [[n.name for n in ports] for ports in rule(topology)]

    down, up = ["mlx5_0", "mlx5_3"], ["mlx5_4", "mlx5_5"]
    assert names(rules.nearest_port, SD665) == [[down[0]], [down[1]], [up[0]], [up[1]]]  # blind to state
    assert [n.active for ports in rules.nearest_port(SD665) for n in ports] == [False, False, True, True]
    assert names(rules.nearest_port, LASSEN) == [["mlx5_0"]] * 2 + [["mlx5_2"]] * 2  # blind to the other worker
    assert names(rules.first_port, SD665) == [["mlx5_0"]] * 4
    assert names(rules.best_class, SD665) == [up, up, [up[0]], [up[1]]]
    assert names(rules.best_class, LASSEN) == [["mlx5_0", "mlx5_1"]] * 2 + [["mlx5_2", "mlx5_3"]] * 2
    assert names(rules.all_ports, SD665) == [up] * 4
    assert names(rules.first_port, CORONA) == [["mlx5_0"]] * 4  # its Ethernet comes first in the file


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.data())
def test_every_rule_gives_every_gpu_some_cores(packages: int, each: int, cores: int, data: st.DataObject) -> None:
    numa = packages * each
    topology = node(packages, numa, numa * cores, data.draw(st.lists(st.integers(0, numa - 1), min_size=1, max_size=9)))
    for rule in rules.CORE_RULES.values():
        placed = rule(topology)
        assert len(placed) == len(topology.gpus)
        assert all(c and c <= CpuSet(range(numa * cores)) for c in placed)

"""Bindings: the expected plan of every recorded machine, and the laws on all of them."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgpu.errors import BindingError, ConfigError
from hpcgpu.model import Binding, CpuSet, Gpu, Nic, NumaNode, Topology, WorkerSpec
from hpcgpu.plan import network
from hpcgpu.plan.binding import place_simulated, plan_bindings
from hpcgpu.plan.cores import split_cores, usable_cores
from hpcgpu.plan.explain import binding_table, render_table
from hpcgpu.plan.memory import plan_device_memory_limit_bytes, plan_memory_limit_bytes, plan_memory_nodes
from hpcgpu.topology import hwloc_xml

DATA = Path(__file__).parent / "data" / "topology"
MACHINES = sorted(p.stem for p in DATA.glob("*.xml") if p.stem != "aws-p4de-24xl-topo")
GIB = 2**30


@cache
def machine(name: str) -> Topology:
    return hwloc_xml.read((DATA / f"{name}.xml").read_text())


def pus(topology: Topology) -> CpuSet:
    return CpuSet(i for c in topology.cores for i in c)


def gpus_of(topology: Topology) -> tuple[Gpu, ...]:
    return topology.gpus or place_simulated(topology, 4, GIB, "node")


@pytest.mark.parametrize("name", MACHINES)
def test_expected_plan(name: str) -> None:
    """UPDATE_GOLDEN=1 writes the files anew; read their difference before you commit it."""
    topology = machine(name)
    bindings = plan_bindings(topology, gpus_of(topology), pus(topology))
    text = render_table(binding_table([WorkerSpec(name=str(i), binding=b) for i, b in enumerate(bindings)]))
    path = DATA / "golden" / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)
    assert text == path.read_text()


# --- laws ------------------------------------------------------------------------------------------------------


@st.composite
def plans(draw: st.DrawFn) -> tuple[Topology, tuple[Gpu, ...], CpuSet, int]:
    """A recorded machine, some of its GPUs in any order, some of its PUs, and workers per GPU."""
    topology = machine(draw(st.sampled_from(MACHINES)))
    gpus = tuple(draw(st.lists(st.sampled_from(gpus_of(topology)), min_size=1, unique=True)))
    lost = draw(st.sets(st.sampled_from(gpus)))
    gpus = tuple(replace(g, numa_node=None) if g in lost else g for g in gpus)
    whole = draw(st.booleans())
    pieces = topology.cores if whole else tuple(CpuSet([i]) for i in sorted(pus(topology)))
    some = draw(st.one_of(st.just(pieces), st.lists(st.sampled_from(pieces), min_size=1, unique=True)))
    return topology, gpus, CpuSet(i for c in some for i in c), draw(st.sampled_from([1, 1, 2]))


@given(plans())
@settings(deadline=None, max_examples=150)
def test_cores_are_granted_whole_disjoint_and_even(plan: tuple[Topology, tuple[Gpu, ...], CpuSet, int]) -> None:
    topology, gpus, allowed, each = plan
    bindings = plan_bindings(topology, gpus, allowed, each)
    assert [b.gpus[0] for b in bindings] == [g for g in gpus for _ in range(each)]
    cores = usable_cores(topology, allowed)
    for b in bindings:
        assert b.cpuset
        assert b.cpuset <= allowed
        assert all(core <= b.cpuset for core in cores if core & b.cpuset)
        assert set(b.gpus) == set(gpus)
        assert b.shared_cores == (len(cores) < len(bindings))
    if len(cores) >= len(bindings):
        assert sum(len(b.cpuset) for b in bindings) == len(allowed)  # disjoint, and nothing is left over
        counts = [sum(core <= b.cpuset for core in cores) for b in bindings]
        assert max(counts) - min(counts) <= 1


@given(plans(), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_order_of_devices_does_not_matter(plan: tuple[Topology, tuple[Gpu, ...], CpuSet, int], random) -> None:
    topology, gpus, allowed, each = plan
    shuffled = [list(x) for x in (topology.gpus, topology.nics, topology.hops, topology.cores, topology.numa_nodes)]
    for x in (*shuffled, mixed := list(gpus)):
        random.shuffle(x)
    g, n, h, c, m = (tuple(x) for x in shuffled)
    other = replace(topology, gpus=g, nics=n, hops=h, cores=c, numa_nodes=m)
    first = {b.gpus[0].pci: b for b in plan_bindings(topology, gpus, allowed)}
    again = {b.gpus[0].pci: b for b in plan_bindings(other, mixed, allowed)}
    assert first == again
    assert each in (1, 2)


@given(plans())
@settings(deadline=None, max_examples=60)
def test_a_plan_on_its_own_cores_is_the_same_plan(plan: tuple[Topology, tuple[Gpu, ...], CpuSet, int]) -> None:
    topology, gpus, allowed, each = plan
    bindings = plan_bindings(topology, gpus, allowed, each)
    used = CpuSet(i for b in bindings for i in b.cpuset)
    assert plan_bindings(topology, gpus, used, each) == bindings


@given(plans())
@settings(deadline=None, max_examples=60)
def test_memory_nodes_hold_dram_near_the_gpu(plan: tuple[Topology, tuple[Gpu, ...], CpuSet, int]) -> None:
    topology, gpus, allowed, _ = plan
    nodes = {n.os_index: n for n in topology.numa_nodes}
    for b in plan_bindings(topology, gpus, allowed):
        assert b.memory_nodes <= nodes.keys()
        assert b.memory_policy in ("none", "preferred-many")  # never strict
        if b.memory_policy == "preferred-many":
            assert len(nodes) > 1
            assert b.gpus[0].numa_node in b.memory_nodes
        elif len(nodes) > 1:
            assert b.gpus[0].numa_node is None


@given(plans(), st.data())
@settings(deadline=None, max_examples=100)
def test_only_active_ports_balanced_within_one(
    plan: tuple[Topology, tuple[Gpu, ...], CpuSet, int], data: st.DataObject
) -> None:
    topology, gpus, allowed, each = plan
    dead = data.draw(st.sets(st.sampled_from(range(len(topology.nics)))) if topology.nics else st.just(set()))
    nics = tuple(replace(n, state="down") if i in dead else n for i, n in enumerate(topology.nics))
    topology = replace(topology, nics=nics)
    usable = network.usable_nics(topology)
    bindings = plan_bindings(topology, gpus, allowed, each)
    used = [n for b in bindings for n in b.nics]
    assert set(used) <= {n for n in nics if n.active and n.kind != "ethernet"}
    assert all(len(b.nics) == (1 if usable else 0) for b in bindings)
    if usable:
        loads = [used.count(n) for n in usable]
        assert max(loads) - min(loads) <= 1


def cost(topology: Topology, homes: list[int | None], shares: tuple[tuple[CpuSet, ...], ...]) -> int:
    """0 for a core on the worker's NUMA node, 1 on its package, 2 elsewhere."""
    package = {n.os_index: n.package for n in topology.numa_nodes}
    total = 0
    for home, cores in zip(homes, shares, strict=True):
        for core in cores:
            at = next(n.os_index for n in topology.numa_nodes if n.cpuset & core)
            total += 0 if at == home else 1 if home is not None and package[at] == package[home] else 2
    return total


def least_cost(topology: Topology, homes: list[int | None], cores: tuple[CpuSet, ...]) -> int:
    """By trying every way to hand out the cores evenly."""
    best = 10**9
    low, more = divmod(len(cores), len(homes))
    for owners in itertools.product(range(len(homes)), repeat=len(cores)):
        counts = [owners.count(w) for w in range(len(homes))]
        if all(low <= c <= low + bool(more) for c in counts):
            shares = tuple(tuple(c for c, o in zip(cores, owners, strict=True) if o == w) for w in range(len(homes)))
            best = min(best, cost(topology, homes, shares))
    return best


SMALL = Topology(
    numa_nodes=tuple(NumaNode(i, CpuSet([2 * i, 2 * i + 1]), GIB, i // 2) for i in range(4)),
    cores=tuple(CpuSet([i]) for i in range(8)),
)


@given(
    st.lists(st.sampled_from([0, 1, 2, 3, None]), min_size=1, max_size=3),
    st.sets(st.sampled_from(range(8)), min_size=3, max_size=7),
)
@settings(deadline=None, max_examples=120)
def test_no_even_share_is_nearer(homes: list[int | None], allowed: set[int]) -> None:
    cores = usable_cores(SMALL, CpuSet(allowed))
    shares = split_cores(SMALL, cores, homes)
    assert cost(SMALL, homes, shares) == least_cost(SMALL, homes, cores)


@given(st.data())
@settings(deadline=None, max_examples=100)
def test_no_other_assignment_of_ports_is_nearer(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 4))
    columns = data.draw(st.integers(rows, 5))
    costs = [data.draw(st.lists(st.integers(-50, 50), min_size=columns, max_size=columns)) for _ in range(rows)]
    found = network._assign(costs)
    assert len(set(found)) == rows
    total = sum(costs[r][c] for r, c in enumerate(found))
    assert total == min(sum(costs[r][c] for r, c in enumerate(p)) for p in itertools.permutations(range(columns), rows))


# --- single cases ----------------------------------------------------------------------------------------------


def test_a_dead_port_next_to_the_gpu_is_passed_over_and_said() -> None:
    topology = machine("turin-4gpu-nvml")
    bindings = plan_bindings(topology, topology.gpus, pus(topology))
    assert [b.nics[0].name for b in bindings] == ["mlx5_4", "mlx5_5", "mlx5_4", "mlx5_5"]
    assert "nearer than mlx5_4:1, but port down: mlx5_0:1, mlx5_3:1, mlx5_1:1, mlx5_2:1" in bindings[0].reasons
    assert [network.ucx_env(b) for b in bindings[:2]] == [
        (("UCX_NET_DEVICES", "mlx5_4:1"),),
        (("UCX_NET_DEVICES", "mlx5_5:1"),),
    ]
    assert [b.interface for b in bindings] == ["ib1x", "ib0", "ib1x", "ib0"]


def test_the_same_machine_in_versions_1_and_2_has_the_same_plan() -> None:
    def plan(name: str) -> list[tuple[object, ...]]:
        t = machine(name)
        return [(b.gpus[0].pci, b.cpuset, b.nics, b.memory_nodes) for b in plan_bindings(t, t.gpus, pus(t))]

    assert plan("epyc-corona-hwloc1") == plan("epyc-corona")


def test_names_of_ports_do_not_matter() -> None:
    """mlx5_0 of one node of a cluster can be mlx5_3 of the next: the plan is by PCI address."""
    topology = machine("coral-lassen")
    names = [n.name for n in topology.nics]
    swapped = replace(
        topology, nics=tuple(replace(n, name=m) for n, m in zip(topology.nics, reversed(names), strict=True))
    )
    plan, other = (
        [(b.gpus[0].pci, b.nics[0].pci) for b in plan_bindings(t, t.gpus, pus(t))] for t in (topology, swapped)
    )
    assert plan == other


def test_infiniband_before_roce_even_when_roce_is_nearer() -> None:
    topology = machine("test-topo")
    gpu = place_simulated(topology, 1, GIB, "n")[0]
    near_roce = tuple(replace(n, numa_node=0 if n.kind == "roce" else 3) for n in topology.nics)
    binding = plan_bindings(replace(topology, nics=near_roce), [gpu], pus(topology))[0]
    assert binding.nics[0].kind == "infiniband"
    assert "nearer than mlx5_ib0:1, but roce: mlx5_an0:1" in binding.reasons


def test_slow_ports_are_not_used() -> None:
    nics = tuple(Nic(f"mlx5_{i}", f"0000:0{i}:00.0", rate_gbps=r, numa_node=0) for i, r in enumerate((25.0, 200.0)))
    topology = replace(SMALL, nics=nics)
    assert [n.name for n in network.usable_nics(topology)] == ["mlx5_1"]


def test_slingshot_plans_an_interface_and_no_ucx_device() -> None:
    hsn = Nic("hsn0", "0000:c1:00.0", kind="slingshot", numa_node=0, interface="hsn0")
    topology = replace(SMALL, nics=(hsn,))
    binding = plan_bindings(topology, place_simulated(topology, 1, GIB, "n"), pus(topology))[0]
    assert binding.interface == "hsn0"
    assert network.ucx_env(binding) == ()


def test_fewer_cores_than_workers_are_shared_and_said() -> None:
    bindings = plan_bindings(SMALL, place_simulated(SMALL, 4, GIB, "n"), CpuSet([0, 1]))
    assert [str(b.cpuset) for b in bindings] == ["0-1"] * 4
    assert all(b.shared_cores and "2 cores for 4 workers" in b.reasons[0] for b in bindings)


def test_gpus_of_unknown_place_get_an_even_share_and_a_warning() -> None:
    gpus = [replace(g, numa_node=None) for g in place_simulated(SMALL, 4, GIB, "n")]
    bindings = plan_bindings(SMALL, gpus, pus(SMALL))
    assert [str(b.cpuset) for b in bindings] == ["0-1", "2-3", "4-5", "6-7"]
    assert {b.memory_policy for b in bindings} == {"none"}
    assert all("nobody knows which NUMA node" in b.reasons[0] for b in bindings)


def test_a_gpu_whose_node_was_not_granted_says_so() -> None:
    gpu = replace(place_simulated(SMALL, 1, GIB, "n")[0], numa_node=0)
    binding = plan_bindings(SMALL, [gpu], CpuSet([6, 7]))[0]
    assert binding.reasons == ("no core of its own NUMA node 0 for it: PUs 6-7 are on others",)


def test_nothing_granted_or_a_gpu_twice_is_an_error() -> None:
    gpu = place_simulated(SMALL, 1, GIB, "n")[0]
    with pytest.raises(BindingError, match="no core is granted"):
        plan_bindings(SMALL, [gpu], CpuSet())
    with pytest.raises(BindingError, match="given twice"):
        plan_bindings(SMALL, [gpu, gpu], pus(SMALL))
    assert plan_bindings(SMALL, [], pus(SMALL)) == ()


def test_one_numa_node_needs_no_policy_and_a_cgroup_takes_nodes_away() -> None:
    gpu = place_simulated(SMALL, 1, GIB, "n")[0]
    assert plan_memory_nodes(SMALL, gpu) == ("preferred-many", CpuSet([0, 1]))
    assert plan_memory_nodes(SMALL, gpu, CpuSet([1, 2])) == ("preferred-many", CpuSet([1]))
    assert plan_memory_nodes(SMALL, gpu, CpuSet([2, 3])) == ("none", CpuSet())
    assert plan_memory_nodes(SMALL, gpu, CpuSet([3])) == ("none", CpuSet([3]))


@given(st.sampled_from(MACHINES), st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_simulated_gpus_are_spread_evenly_and_stable(name: str, count: int) -> None:
    topology = machine(name)
    gpus = place_simulated(topology, count, GIB, "node0001")
    assert gpus == place_simulated(topology, count, GIB, "node0001")
    assert len({g.pci for g in gpus}) == len({g.uuid for g in gpus}) == count
    assert [g.pci for g in gpus] == sorted(g.pci for g in gpus)
    loads = [sum(g.numa_node == n.os_index for g in gpus) for n in topology.numa_nodes]
    assert max(loads) - min(loads) <= 1
    assert gpus[0].uuid == "GPU-SIM-node0001-0"


def test_no_simulated_gpus_is_an_error() -> None:
    with pytest.raises(ConfigError, match="0 simulated GPUs"):
        place_simulated(SMALL, 0, GIB, "n")


def test_host_memory_is_divided_without_the_simulated_devices() -> None:
    assert plan_memory_limit_bytes(None, 8 * GIB, 4) == 2 * GIB
    assert plan_memory_limit_bytes(None, 8 * GIB, 4, simulated_bytes=4 * GIB) == GIB
    assert plan_memory_limit_bytes(0.25, 8 * GIB, 4) == 2 * GIB
    assert plan_memory_limit_bytes(GIB, 8 * GIB, 4) == GIB
    assert plan_memory_limit_bytes(0, 8 * GIB, 4) is None
    with pytest.raises(ConfigError, match=r"12\.0 GiB"):
        plan_memory_limit_bytes(3 * GIB, 8 * GIB, 4)
    with pytest.raises(ConfigError, match="sim:2x256MiB"):
        plan_memory_limit_bytes(None, 2 * GIB, 4, simulated_bytes=4 * GIB)


def test_device_memory_limit_is_a_fraction_or_bytes() -> None:
    assert plan_device_memory_limit_bytes(0.5, 16 * GIB) == 8 * GIB
    assert plan_device_memory_limit_bytes(1.0, 16 * GIB) == 16 * GIB
    assert plan_device_memory_limit_bytes(5 * GIB, 16 * GIB) == 5 * GIB
    assert plan_device_memory_limit_bytes(50 * GIB, 16 * GIB) == 16 * GIB
    assert plan_device_memory_limit_bytes(0, 16 * GIB) == 0
    assert plan_device_memory_limit_bytes(5 * GIB, 0) == 5 * GIB
    with pytest.raises(ConfigError, match="NVML does not answer"):
        plan_device_memory_limit_bytes(0.8, 0)


def test_the_table_says_why() -> None:
    binding = Binding(CpuSet([0, 1]), (Gpu("0000:06:00.0", memory_bytes=GIB),), reasons=("because",))
    assert render_table(binding_table([WorkerSpec(name="w0", binding=binding)])) == (
        "worker  GPU                   cores  memory nodes  NIC  cores shared\n"
        "w0      0000:06:00.0 1.0 GiB  0-1    none          -    no\n"
        "    because\n"
    )

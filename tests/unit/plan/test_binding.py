"""Bindings: the plans of recorded and documented machines, single cases, and laws on every machine.

Names P1 to P18 are those of the project's law list; a plan is optimal if no exchange is nearer.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from golden import check_golden
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import DOCUMENTED, GIB, GRANTED, LUMI_CORES, MACHINES, gpus_of, machine, pus
from paths import TOPOLOGIES

from hpcgpu.errors import BindingError, ConfigError
from hpcgpu.model import Binding, CpuSet, Gpu, HostMemory, Nic, NodeLayout, NumaNode, Settings, Topology, WorkerSpec
from hpcgpu.model.allocation import BindingRules
from hpcgpu.model.settings import SHARE, Limit
from hpcgpu.plan.binding import network
from hpcgpu.plan.binding.bindings import plan_bindings, simulated_gpus
from hpcgpu.plan.binding.cores import split_cores, usable_cores
from hpcgpu.plan.binding.memory import plan_memory_nodes
from hpcgpu.plan.binding.network import NODE, ROOT, Ports, plan_nics
from hpcgpu.plan.binding.workers import NodeFacts, plan_memory_limit_bytes, plan_workers
from hpcgpu.report.machine import workers_table

NODES = tuple(NumaNode(i, CpuSet([2 * i, 2 * i + 1]), GIB, i // 2) for i in range(4))
SMALL = Topology(NODES, tuple(CpuSet([i]) for i in range(8)))


def documented(name: str) -> tuple[Binding, ...]:
    topology = DOCUMENTED[name]
    return plan_bindings(topology, topology.gpus, GRANTED.get(name) or pus(topology))


@pytest.mark.parametrize("name", [*MACHINES, *(f"documented-{name}" for name in DOCUMENTED)])
def test_expected_plan(name: str) -> None:
    document = name.removeprefix("documented-")
    topology = machine(name) if document == name else DOCUMENTED[document]
    bindings = plan_bindings(topology, gpus_of(topology), pus(topology)) if document == name else documented(document)
    text = workers_table(topology, [WorkerSpec(name=str(i), binding=b) for i, b in enumerate(bindings)]).to_text()
    check_golden(TOPOLOGIES / "golden" / f"{name}.txt", text)


def test_polaris_daint_and_lumi_are_planned_as_documented() -> None:
    ports = [b.nics[0].name for b in documented("polaris-a100")]
    assert (ports[3], ports[1]) == ("mlx5_0", "mlx5_1")
    assert sorted([ports[0], ports[2]]) == ["mlx5_0", "mlx5_1"]
    assert {b.interface for b in documented("daint-gh200")} == {"hsn0", "hsn1", "hsn2", "hsn3"}
    nodes = [n.cpuset for n in DOCUMENTED["lumi-g"].numa_nodes]
    for core, binding in zip(LUMI_CORES, documented("lumi-g"), strict=True):
        assert binding.cpuset <= next(n for n in nodes if core in n)


def cores_of(topology: Topology, gpus: Sequence[Gpu], allowed: CpuSet | None = None, **wanted: object) -> list[str]:
    """Plan with all cores, or those that are allowed; return each worker's."""
    options = Settings(**wanted)  # type: ignore[arg-type]
    return [str(b.cpuset) for b in plan_bindings(topology, gpus, allowed or pus(topology), options.binding_rules)]


# --- single cases ----------------------------------------------------------------------------------------------


def test_infiniband_before_roce_even_when_roce_is_nearer() -> None:
    topology = machine("test-topo")
    gpu = simulated_gpus(topology, 1, GIB, "n")[0]
    near_roce = tuple(n._replace(numa_node=0 if n.kind == "roce" else 3) for n in topology.nics)
    binding = plan_bindings(topology._replace(nics=near_roce), [gpu], pus(topology))[0]
    assert binding.nics[0].kind == "infiniband"
    assert "mlx5_an0 is nearest but it is roce beside infiniband → mlx5_ib0" in binding.reasons


def test_slow_and_virtual_ports_are_the_last_choice() -> None:
    nics = tuple(Nic(f"mlx5_{i}", f"0000:0{i}:00.0", rate_gbps=r, numa_node=0) for i, r in enumerate((25.0, 200.0)))
    ports = Ports(SMALL._replace(nics=nics))
    assert [n.name for n in ports.usable] == ["mlx5_1"]
    assert ports.why_not[nics[0]].singular == "it has 25 Gb/s where others have 200"
    nics = tuple(Nic(f"mlx5_{i}", f"0000:41:00.{i}", numa_node=0, virtual=i > 0) for i in range(3))
    assert [n.name for n in Ports(SMALL._replace(nics=nics)).usable] == ["mlx5_0"]
    assert [n.name for n in Ports(SMALL._replace(nics=nics[1:])).usable] == ["mlx5_1", "mlx5_2"]  # a VM's own


def test_slingshot_plans_an_interface_and_no_ucx_device() -> None:
    hsn = Nic("hsn0", "0000:c1:00.0", kind="slingshot", numa_node=0, interface="hsn0")
    topology = SMALL._replace(nics=(hsn,))
    binding = plan_bindings(topology, simulated_gpus(topology, 1, GIB, "n"), pus(topology))[0]
    assert binding.interface == "hsn0"
    assert network.ucx_env(binding) == ()


def test_cores_that_are_shared_even_or_far_have_a_reason() -> None:
    gpus = simulated_gpus(SMALL, 4, GIB, "n")
    shared = plan_bindings(SMALL, gpus, CpuSet([0, 1]))
    assert [str(b.cpuset) for b in shared] == ["0-1"] * 4
    assert all(b.shared_cores and "2 cores for 4 workers" in b.reasons[0] for b in shared)
    even = plan_bindings(SMALL, [g._replace(numa_node=None) for g in gpus], pus(SMALL))
    assert [str(b.cpuset) for b in even] == ["0-1", "2-3", "4-5", "6-7"]
    assert {b.memory_policy for b in even} == {"none"}
    assert all("NUMA node of this GPU is unknown" in b.reasons[0] for b in even)
    assert "  unknown  " in workers_table(SMALL, [WorkerSpec(name="w0", binding=even[0])]).to_text()
    (far,) = plan_bindings(SMALL, [gpus[0]._replace(numa_node=0)], CpuSet([6, 7]))
    assert far.reasons == ("no core of its own NUMA node 0 is left: PUs 6-7 are on other nodes",)
    local = plan_bindings(SMALL, [g._replace(numa_node=0) for g in gpus[:3]], pus(SMALL), BindingRules(cores="local"))
    assert sorted(len(b.cpuset) for b in local) == [2, 3, 3]
    assert all("cores='local' is impossible" in b.reasons[0] for b in local)


def test_nothing_granted_or_a_gpu_twice_is_an_error() -> None:
    gpu = simulated_gpus(SMALL, 1, GIB, "n")[0]
    with pytest.raises(BindingError, match="no CPU core is available"):
        plan_bindings(SMALL, [gpu], CpuSet())
    with pytest.raises(BindingError, match="given twice"):
        plan_bindings(SMALL, [gpu, gpu], pus(SMALL))
    assert plan_bindings(SMALL, [], pus(SMALL)) == ()


def test_memory_nodes_are_divided_over_the_gpus_of_a_package() -> None:
    """Two GPUs on NUMA nodes 3 and 1 of a package of four, as on JUWELS Booster: all four are in somebody's share."""
    nodes = tuple(NumaNode(i, CpuSet([i]), GIB, 0) for i in range(4))
    topology = Topology(nodes, tuple(CpuSet([i]) for i in range(4)))

    def plan(homes: list[int | None], allowed: list[int] | None = None, policy: str = "preferred-many") -> list[str]:
        found = plan_memory_nodes(topology, homes, (), CpuSet(allowed) if allowed is not None else None, policy)
        return [f"{p} {n}".strip() for p, n in found]

    assert plan([3, 1]) == ["preferred-many 2-3", "preferred-many 0-1"]
    assert plan([3, 1], policy="bind") == ["bind 2-3", "bind 0-1"]
    assert plan([3, 1], policy="interleave") == ["interleave 0-3"] * 2
    assert plan([3, 1], policy="none") == ["none"] * 2
    assert plan([0, 0, 1]) == ["preferred-many 0,2", "preferred-many 0,3", "preferred-many 1"]
    assert plan([None, 1]) == ["none", "preferred-many 0-3"]
    # a cgroup took nodes away: the rest of the package, and with one node left there is nothing to say
    assert plan([3, 1], [0, 1]) == ["preferred-many 0", "preferred-many 1"]
    assert plan([3, 1], [2]) == ["none 2"] * 2


def test_bind_keeps_pages_off_other_memory_with_one_dram_node() -> None:
    """GH200: GPU memory is a NUMA node too, on which the kernel would put pages when host memory is short."""
    topology = DOCUMENTED["vista-gh200"]
    assert [n.kind for n in topology.other_memory] == ["gpu"]

    def policy(topology: Topology, wanted: str) -> tuple[str, str]:
        (b,) = plan_bindings(topology, topology.gpus[:1], pus(topology), BindingRules(memory_policy=wanted))
        return b.memory_policy, str(b.memory_nodes)

    assert policy(topology, "bind") == ("bind", "0")
    assert [policy(topology, wanted)[0] for wanted in ("preferred-many", "interleave", "none")] == ["none"] * 3
    assert policy(topology._replace(other_memory=()), "bind")[0] == "none"


def test_a_worker_has_several_ports_where_there_are_more_of_them() -> None:
    """DGX-like: eight ports for four GPUs, two next to each; what is on another NUMA node is not taken."""
    nics = tuple(Nic(f"mlx5_{i}", f"0000:4{i}:00.0", numa_node=i // 2, interface=f"ib{i}") for i in range(8))
    topology = SMALL._replace(nics=nics)
    gpus = simulated_gpus(topology, 4, GIB, "n")
    bindings = plan_bindings(topology, gpus, pus(topology))
    assert [[n.name for n in b.nics] for b in bindings] == [[f"mlx5_{2 * i}", f"mlx5_{2 * i + 1}"] for i in range(4)]
    assert network.ucx_env(bindings[1]) == (("UCX_NET_DEVICES", "mlx5_2:1,mlx5_3:1"), ("UCX_MAX_RNDV_RAILS", "2"))
    assert network.nccl_env(bindings)[0][1].startswith("=mlx5_0:1,mlx5_1:1,")
    far = topology._replace(nics=tuple(n._replace(numa_node=0) for n in nics))
    assert [len(b.nics) for b in plan_bindings(far, gpus, pus(far))] == [2, 1, 1, 1]


def test_cards_share_the_load_where_ports_leave_a_choice() -> None:
    """Three ports at the same distance, two of them on one card: two workers take two cards."""
    places = ["0000:41:00.0", "0000:41:00.1", "0000:42:00.0"]
    nics = tuple(Nic(f"mlx5_{i}", place, numa_node=0) for i, place in enumerate(places))
    topology = SMALL._replace(nics=nics)
    gpus = tuple(g._replace(numa_node=0) for g in simulated_gpus(topology, 2, GIB, "n"))
    assert {b.nics[0].pci for b in plan_bindings(topology, gpus, pus(topology))} == {"0000:41:00.0", "0000:42:00.0"}


def test_rules_of_the_user_for_ports() -> None:
    nics = tuple(Nic(f"mlx5_{i}", f"0000:4{i}:00.0", numa_node=0, interface=f"ib{i}") for i in range(2))
    topology = SMALL._replace(nics=(*nics, Nic("eth0", "0000:50:00.0", kind="ethernet", interface="eth0")))
    gpus = simulated_gpus(topology, 4, GIB, "n")

    def plan(rule: str | tuple[str, ...]) -> list[list[str]]:
        found = plan_bindings(topology, gpus, pus(topology), BindingRules(nics=rule))
        return [[n.name for n in b.nics] for b in found]

    assert plan("balanced") == [["mlx5_0"], ["mlx5_0"], ["mlx5_1"], ["mlx5_1"]]
    assert plan(("mlx5_1",)) == plan(("mlx5_1:1",)) == plan(("ib1",)) == [["mlx5_1"]] * 4
    assert plan(("eth0",)) == [["eth0"]] * 4
    assert plan("ucx") == [[]] * 4
    with pytest.raises(ConfigError, match=r"'mlx5_7'.* allowed: .*, mlx5_0:1, mlx5_1:1, eth0:1"):
        plan(("mlx5_7",))
    dead = topology._replace(nics=tuple(n._replace(state="down") for n in nics))
    binding = plan_bindings(dead, gpus, pus(dead), BindingRules(nics=("mlx5_0",)))[0]
    assert (binding.nics, binding.reasons) == ((), ("no port that nics names is active",))


def test_reserved_cores_come_from_all_workers_without_a_rest() -> None:
    """Two GPUs on the middle two of four NUMA nodes: nobody keeps a core of a third node for the sake of a number."""
    nodes = tuple(NumaNode(i, CpuSet(range(6 * i, 6 * i + 6)), GIB) for i in range(4))
    topology = Topology(nodes, tuple(CpuSet([i]) for i in range(24)))
    gpus = tuple(g._replace(numa_node=i + 1) for i, g in enumerate(simulated_gpus(topology, 2, GIB, "n")))
    assert cores_of(topology, gpus, reserved_cores=0) == ["0-11", "12-23"]
    assert cores_of(topology, gpus, reserved_cores=2) == ["0-4,6-11", "12-22"]
    assert cores_of(topology, gpus, reserved_cores=4) == ["0-3,6-11", "12-21"]
    assert cores_of(topology, gpus, reserved_cores=5) == ["0-3,6-11", "12-20"]


def test_local_cores_have_local_memory() -> None:
    """Nobody's memory is on NUMA nodes that the rule for cores leaves to nobody."""
    gpus = tuple(g._replace(numa_node=i) for g, i in zip(simulated_gpus(SMALL, 2, GIB, "n"), (1, 2), strict=True))

    def memory(**wanted: object) -> list[str]:
        found = plan_bindings(SMALL, gpus, pus(SMALL), BindingRules(memory_policy="bind", **wanted))  # type: ignore[arg-type]
        return [f"{b.memory_policy} {b.memory_nodes}" for b in found]

    assert memory() == ["bind 0-1", "bind 2-3"]
    assert memory(cores="local") == memory(cores=2) == ["bind 1", "bind 2"]
    assert memory(cores=3) == ["bind 0-1", "bind 2-3"]


def test_efa_and_usnic_are_not_called_ethernet() -> None:
    nics = (Nic("rdmap16s27", "0000:10:1b.0", kind="efa"), Nic("usnic_0", "0000:12:00.0", kind="usnic"))
    why = Ports(SMALL._replace(nics=nics)).why_not
    assert why[nics[0]].singular.startswith("EFA, which UCX's verbs do not drive")
    assert why[nics[1]].singular.startswith("usNIC, which UCX does not drive")


def test_a_share_is_in_one_cache_where_one_has_room() -> None:
    """Three of the first cache's four cores were granted: a share of four is not torn between two caches."""
    cores = tuple(CpuSet([i]) for i in range(12))
    caches = tuple(CpuSet(range(i, i + 4)) for i in (0, 4, 8))
    topology = Topology((NumaNode(0, CpuSet(range(12)), GIB),), cores, l3=caches)
    gpus = simulated_gpus(topology, 2, GIB, "n")
    granted = CpuSet(range(1, 12))
    assert cores_of(topology, gpus, granted, cores=4) == ["4-7", "8-11"]
    assert cores_of(topology, gpus, granted, cores=3) == ["1-3", "4-6"]
    assert cores_of(topology, gpus) == ["0-5", "6-11"]
    assert cores_of(topology, gpus, granted) == ["1-2,4-7", "3,8-11"]


def test_fast_and_slow_cores_are_shared_out_kind_by_kind() -> None:
    """A desktop CPU: six fast cores of two threads, eight slow ones."""
    cores = (*(CpuSet([2 * i, 2 * i + 1]) for i in range(6)), *(CpuSet([i]) for i in range(12, 20)))
    topology = Topology((NumaNode(0, CpuSet(range(20)), GIB),), cores)
    gpus = tuple(g._replace(numa_node=0) for g in simulated_gpus(topology, 2, GIB, "n"))
    assert cores_of(topology, gpus) == ["0-12", "13-19"]
    hybrid = topology._replace(core_kinds=(CpuSet(range(12, 20)), CpuSet(range(12))))
    assert cores_of(hybrid, gpus) == ["0-5,12-15", "6-11,16-19"]


def test_a_launchers_masks_are_respected_when_asked() -> None:
    gpus = simulated_gpus(SMALL, 2, GIB, "n")
    masks = (CpuSet([6]), CpuSet([0, 1]))
    bindings = plan_bindings(SMALL, gpus, CpuSet([0, 1, 6]), masks=masks)
    assert [str(b.cpuset) for b in bindings] == ["6", "0-1"]
    with pytest.raises(BindingError, match="mask"):
        plan_bindings(SMALL, gpus, CpuSet([0, 1]), masks=masks)


def test_a_mig_slice_is_alone_and_whole_gpus_see_whole_ones() -> None:
    """CUDA takes one slice per process, and slices have no IPC."""
    whole = [Gpu(f"0000:0{i}:00.0", f"GPU-{i}", numa_node=0) for i in range(2)]
    slices = [Gpu("0000:09:00.0", f"MIG-{i}", numa_node=2, mig="1g.10gb") for i in range(2)]
    bindings = plan_bindings(SMALL, [*whole, *slices], pus(SMALL))
    uuids = [" ".join(g.uuid for g in b.gpus) for b in bindings]
    assert uuids == ["GPU-0 GPU-1", "GPU-1 GPU-0", "MIG-0", "MIG-1"]
    assert bindings[2].cpuset <= pus(SMALL) - CpuSet([0, 1])


@given(st.sampled_from(MACHINES), st.integers(1, 40))
@settings(deadline=None, max_examples=40)
def test_simulated_gpus_are_spread_evenly_and_stable(name: str, count: int) -> None:
    topology = machine(name)
    gpus = simulated_gpus(topology, count, GIB, "node0001")
    assert gpus == simulated_gpus(topology, count, GIB, "node0001")
    assert len({g.pci for g in gpus}) == len({g.uuid for g in gpus}) == count
    assert [g.pci for g in gpus] == sorted(g.pci for g in gpus)
    loads = [sum(g.numa_node == n.os_index for g in gpus) for n in topology.numa_nodes]
    assert max(loads) - min(loads) <= 1
    assert gpus[0].uuid == "GPU-SIM-node0001-0"
    with pytest.raises(ConfigError, match="0 simulated GPUs"):
        simulated_gpus(topology, 0, GIB, "n")


def test_host_memory_is_divided_without_the_simulated_devices() -> None:
    assert plan_memory_limit_bytes(SHARE, HostMemory(8 * GIB, ""), 4) == 2 * GIB
    assert plan_memory_limit_bytes(SHARE, HostMemory(8 * GIB, ""), 4, simulated_bytes=4 * GIB) == GIB
    assert plan_memory_limit_bytes(Limit(0.25), HostMemory(8 * GIB, ""), 4) == 2 * GIB
    assert plan_memory_limit_bytes(Limit(GIB), HostMemory(8 * GIB, ""), 4) == GIB
    assert plan_memory_limit_bytes(Limit(0), HostMemory(8 * GIB, ""), 4) is None
    with pytest.raises(ConfigError, match=r"12\.0 GiB"):
        plan_memory_limit_bytes(Limit(3 * GIB), HostMemory(8 * GIB, ""), 4)
    with pytest.raises(ConfigError, match="2x256MiB"):
        plan_memory_limit_bytes(SHARE, HostMemory(2 * GIB, ""), 4, simulated_bytes=4 * GIB)


def test_device_memory_limit_is_a_fraction_or_bytes() -> None:
    assert Limit(0.5).of_device(16 * GIB) == 8 * GIB
    assert Limit(1.0).of_device(16 * GIB) == 16 * GIB
    assert Limit(5 * GIB).of_device(16 * GIB) == 5 * GIB
    assert Limit(50 * GIB).of_device(16 * GIB) == 16 * GIB
    assert Limit(0).of_device(16 * GIB) == 0
    assert Limit(5 * GIB).of_device(0) == 5 * GIB
    with pytest.raises(ConfigError, match="NVML does not answer"):
        Limit(0.8).of_device(0)


def symmetric(packages: int, nodes: int, cores: int, gpus: int) -> Topology:
    """Equal packages of equal NUMA nodes, each with as many GPUs and one port."""
    numa, places, gpu_list, nics = [], [], [], []
    for n in range(packages * nodes):
        mine = [CpuSet([2 * (n * cores + c), 2 * (n * cores + c) + 1]) for c in range(cores)]
        places += mine
        numa.append(NumaNode(n, CpuSet().union(*mine), GIB, n // nodes))
        gpu_list += [Gpu(f"0000:{n:02x}:{g:02x}.0", f"GPU-{n}-{g}", numa_node=n) for g in range(gpus)]
        nics.append(Nic(f"mlx5_{n}", f"0001:{n:02x}:00.0", numa_node=n, interface=f"ib{n}"))
    return Topology(tuple(numa), tuple(places), tuple(gpu_list), tuple(nics))


@dataclass(frozen=True)
class Case:
    topology: Topology
    gpus: tuple[Gpu, ...]
    allowed: CpuSet
    wanted: Settings

    @property
    def bindings(self) -> tuple[Binding, ...]:
        return plan_bindings(self.topology, self.gpus, self.allowed, self.wanted.binding_rules)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """A recorded, documented or symmetric machine, with some ports dead, and some more than were there."""
    sizes = [st.integers(1, n) for n in (2, 4, 4, 2)]
    recorded = st.sampled_from(MACHINES).map(machine) | st.sampled_from(list(DOCUMENTED.values()))
    topology = draw(recorded | st.builds(symmetric, *sizes))
    nics = list(topology.nics)
    homes = st.sampled_from([*(n.os_index for n in topology.numa_nodes), None])
    for i in range(draw(st.integers(0, 6))):
        address, rate = f"0002:{i // 2:02x}:00.{i % 2}", draw(st.sampled_from([100.0, 200.0]))  # cards of two functions
        nics.append(Nic(f"mlx5_{90 + i}", address, rate_gbps=rate, numa_node=draw(homes)))
    dead = draw(st.sets(st.sampled_from(range(len(nics))))) if nics and draw(st.booleans()) else set()
    nics = [n._replace(state="down") if i in dead else n for i, n in enumerate(nics)]
    return topology._replace(nics=tuple(nics))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Some of a machine's GPUs in any order, some of its PUs, and options."""
    topology = draw(topologies())
    everything = topology.gpus or simulated_gpus(topology, 4, GIB, "node")
    gpus = tuple(draw(st.lists(st.sampled_from(everything), min_size=1, unique=True)))
    lost = draw(st.sets(st.sampled_from(gpus)))
    gpus = tuple(g._replace(numa_node=None) if g in lost else g for g in gpus)
    pieces = topology.cores if draw(st.booleans()) else tuple(CpuSet([i]) for i in sorted(pus(topology)))
    some = draw(st.one_of(st.just(pieces), st.lists(st.sampled_from(pieces), min_size=1, unique=True)))
    wanted = Settings(
        workers_per_gpu=draw(st.sampled_from([1, 1, 2, 3])),
        cores=draw(st.sampled_from(["all", "all", "local"])),
        memory_policy=draw(st.sampled_from(["preferred-many", "preferred-many", "bind", "interleave", "none"])),
        nics=draw(st.sampled_from(["balanced", "balanced", "nearest", "ucx"])),
    )
    return Case(topology, gpus, CpuSet(i for c in some for i in c), wanted)


def laws(examples: int = 100):
    return settings(deadline=None, max_examples=examples)


@given(cases())
@laws(100)
def test_p1_p2_p3_p12_cores_are_granted_disjoint_and_whole(case: Case) -> None:
    """And local where there are enough; half of the memory of a package is on NUMA nodes without a GPU."""
    bindings, each = case.bindings, case.wanted.workers_per_gpu
    assert [b.gpus[0] for b in bindings] == [g for g in case.gpus for _ in range(each)]
    cores = usable_cores(case.topology, case.allowed)
    for b in bindings:
        assert b.cpuset
        assert b.cpuset <= case.allowed
        assert all(core <= b.cpuset for core in cores if core & b.cpuset)
        assert set(b.gpus) == set(case.gpus)
        assert b.shared_cores == (len(cores) < len(bindings))
    if len(cores) >= len(bindings):
        assert sum(len(b.cpuset) for b in bindings) == len(frozenset().union(*(b.cpuset for b in bindings)))
        if case.wanted.cores == "all":
            counts = [sum(core <= b.cpuset for core in cores) for b in bindings]
            assert sum(counts) == len(cores)
            assert max(counts) - min(counts) <= 1
        for node in case.topology.numa_nodes:
            mine = [b for b in bindings if b.gpus[0].numa_node == node.os_index]
            there = usable_cores(case.topology, node.cpuset & case.allowed)
            assert len(there) < max(len(mine), 1) or all(b.cpuset & node.cpuset for b in mine)
    packages = {n.os_index: n.package for n in case.topology.numa_nodes}
    if case.wanted.memory_policy in ("preferred-many", "bind") and len(packages) > 1 and case.wanted.cores == "all":
        used = {packages[g.numa_node] for g in case.gpus if g.numa_node is not None}
        reach = frozenset().union(*(b.memory_nodes for b in bindings))
        assert reach == {n for n, p in packages.items() if p in used}
    again = replace(case, allowed=CpuSet(i for b in bindings for i in b.cpuset))
    assert again.bindings == case.bindings == bindings


@given(cases(), st.integers(1, 5), st.integers(1, 4), st.integers(0, 3))
@laws(60)
def test_cpu_workers_have_separate_cores_away_from_the_gpus(
    case: Case, count: int, threads: int, reserved: int
) -> None:
    """They have their threads or a fair share, and leave the others' GPUs and ports as these are without them."""
    topology, each = case.topology, case.wanted.workers_per_gpu
    wanted = replace(case.wanted, nthreads=threads, reserved_cores=reserved)
    cores = usable_cores(topology, case.allowed)
    on_gpus = len(case.gpus) * each
    assume(len(cores) < on_gpus + count or len(cores) >= on_gpus + count + reserved)
    together = plan_bindings(topology, case.gpus, case.allowed, wanted.binding_rules, cpu_workers=count)
    with_gpus, beside = together[:on_gpus], together[on_gpus:]
    assert len(beside) == count
    for a, b in zip(with_gpus, case.bindings, strict=True):
        assert (a.gpus, a.nics, a.interface) == (b.gpus, b.nics, b.interface)
    for b in beside:
        assert b.gpus == ()
        assert b.cpuset <= case.allowed
        assert b.memory_nodes <= {n.os_index for n in topology.numa_nodes}
        assert b.shared_cores == (len(cores) < len(together))
    if len(cores) < len(together):
        assert {b.cpuset for b in together} == {CpuSet(case.allowed)}
        return
    sizes = [sum(core <= b.cpuset for core in cores) for b in together]
    assert set(sizes[on_gpus:]) == {min(threads, (len(cores) - reserved) // len(together))}
    assert all(sizes)
    used = frozenset().union(*(b.cpuset for b in together))
    assert sum(len(b.cpuset) for b in together) == len(used)
    assert sum(core.isdisjoint(used) for core in cores) >= reserved
    if wanted.cores == "all":
        assert sum(sizes) + reserved == len(cores)
    if wanted.memory_policy in ("preferred-many", "bind"):
        for b in beside:
            touched = {n.os_index for n in topology.numa_nodes if n.cpuset & b.cpuset and n.memory_bytes}
            assert not b.memory_nodes or b.memory_nodes >= touched


def test_workers_without_a_gpu_take_the_numa_node_that_has_none() -> None:
    topology = symmetric(1, 2, 4, 1)
    near, far = topology.gpus[0], topology.numa_nodes[1]
    bindings = plan_bindings(topology, [near], pus(topology), BindingRules(nthreads=2), cpu_workers=2)
    assert [str(b.cpuset) for b in bindings] == ["0-7", "8-11", "12-15"]
    assert {b.memory_nodes for b in bindings[1:]} == {CpuSet([far.os_index])}
    assert {b.nics[0].name for b in bindings[1:]} == {"mlx5_1"}
    topology = symmetric(1, 1, 4, 2)
    with pytest.raises(ConfigError, match="cores=2 for each of 2 workers with a core for each of 1 CPU workers are"):
        plan_bindings(topology, topology.gpus, pus(topology), BindingRules(cores=2), cpu_workers=1)
    with pytest.raises(ConfigError, match="a core for each of 4 workers and reserved_cores=1 are more than the 4"):
        plan_bindings(topology, topology.gpus, pus(topology), BindingRules(reserved_cores=1), cpu_workers=2)


@given(cases())
@laws(60)
def test_local_cores_are_of_the_gpus_own_node_where_each_has_one(case: Case) -> None:
    case = replace(case, wanted=replace(case.wanted, cores="local"))
    nodes = {n.os_index: n.cpuset for n in case.topology.numa_nodes}
    bindings = case.bindings
    fallen_back = any("is impossible" in r for b in bindings for r in b.reasons)
    for b in bindings:
        home = nodes.get(b.gpus[0].numa_node, CpuSet()) & case.allowed  # type: ignore[arg-type]
        if home and not b.shared_cores and not fallen_back:
            assert b.cpuset <= home


@given(cases(), st.data())
@laws(60)
def test_p4_memory_is_dram_that_is_allowed_and_near(case: Case, data: st.DataObject) -> None:
    nodes = {n.os_index: n for n in case.topology.numa_nodes}
    allowed = CpuSet(data.draw(st.sets(st.sampled_from(sorted(nodes)), min_size=1)))
    for b in plan_bindings(case.topology, case.gpus, case.allowed, case.wanted.binding_rules, allowed):
        assert b.memory_nodes <= allowed
        if b.memory_policy == "none":
            assert len(allowed) == 1 or case.wanted.memory_policy == "none" or not b.memory_nodes
        elif b.memory_policy != "interleave":
            home = b.gpus[0].numa_node
            if len(allowed) == 1 and case.topology.other_memory:
                assert (b.memory_policy, b.memory_nodes) == ("bind", allowed)
                continue
            assert home is not None
            assert {nodes[n].package for n in b.memory_nodes} == {nodes[home].package}
            assert home in b.memory_nodes or home not in allowed


@given(cases())
@laws(80)
def test_p5_p9_p10_ports_are_usable_and_balanced(case: Case) -> None:
    ports = Ports(case.topology, case.wanted.nics)
    bindings = case.bindings
    used = [n for b in bindings for n in b.nics]
    assert set(used) <= set(ports.usable)
    assert all(n.active and n.kind != "ethernet" for n in used)
    if case.wanted.nics == "ucx":
        assert used == []
        return
    assert all(bool(b.nics) == bool(ports.usable) for b in bindings)
    assert all(len(set(b.nics)) == len(b.nics) for b in bindings)
    if case.wanted.nics == "nearest":
        for b in filter(lambda b: b.nics, bindings):
            assert ports.distance(b.gpus[0], b.nics[0]) == min(ports.distance(b.gpus[0], n) for n in ports.usable)


@given(cases())
@laws(60)
def test_p9_no_swap_of_two_workers_ports_is_nearer(case: Case) -> None:
    """With all GPUs: in a job with some of them each has the classes of that plan (decision 5)."""
    others = tuple(g for g in case.topology.gpus if g.pci not in {mine.pci for mine in case.gpus})
    case = replace(case, gpus=case.gpus + others, wanted=replace(case.wanted, nics="balanced"))
    ports, bindings = Ports(case.topology), case.bindings
    for a, b in itertools.combinations(bindings, 2):
        for x, y in itertools.product(set(a.nics) - set(b.nics), set(b.nics) - set(a.nics)):
            now = [ports.distance(a.gpus[0], x), ports.distance(b.gpus[0], y)]
            then = [ports.distance(a.gpus[0], y), ports.distance(b.gpus[0], x)]
            assert sum(d.kind for d in now) <= sum(d.kind for d in then)


@given(topologies())
@laws(80)
def test_a_gpu_has_the_ports_of_the_whole_plan_in_any_job(topology: Topology) -> None:
    """Alone, and with several workers on each, in the class of the plan of all GPUs; and no more of them."""
    gpus = gpus_of(topology)
    if not topology.gpus:  # simulated GPUs are the machine's
        topology = topology._replace(gpus=gpus)
    ports, whole = Ports(topology), [p.nics for p in plan_nics(topology, gpus)]

    def classes(gpu: Gpu, nics: Sequence[Nic]) -> set[int]:
        return {ports.distance(gpu, n).kind for n in nics}

    for gpu, mine in zip(gpus, whole, strict=True):
        assert len(classes(gpu, mine)) <= 1
        assert plan_nics(topology, [gpu])[0].nics == mine
        for each in (2, 3):
            several = [p.nics for p in plan_nics(topology, [gpu] * each)]
            assert all(set(nics) <= set(mine) and bool(nics) == bool(mine) for nics in several)
            assert set(mine) == {n for nics in several for n in nics} or len(mine) > each
    assert [p.nics for p in plan_nics(topology, [g for g in gpus for _ in (0, 1)])[::2]] == [m[::2] for m in whole]
    for some in itertools.combinations(gpus, 2):
        for gpu, plan in zip(some, plan_nics(topology, some), strict=True):
            mine = whole[gpus.index(gpu)]
            assert (classes(gpu, plan.nics), len(plan.nics)) == (classes(gpu, mine), len(mine))


@given(topologies())
@laws(80)
def test_a_worse_class_is_for_gpus_whose_best_is_full(topology: Topology) -> None:
    ports, gpus = Ports(topology), gpus_of(topology)
    plans = [p.nics for p in plan_nics(topology, gpus)]
    assume(ports.usable)
    share = -(-len(gpus) // len(ports.usable))
    loads = {n: sum(n in nics for nics in plans) for n in ports.usable}
    for gpu, nics in zip(gpus, plans, strict=True):
        mine, best = (min(ports.distance(gpu, n).kind for n in some) for some in (nics, ports.usable))
        assert mine == best or best > ROOT, "below a GPU's own root complex it shares"
        assert all(loads[n] >= share for n in ports.usable if ports.distance(gpu, n).kind < mine)


@given(topologies())
@laws(80)
def test_workers_of_a_class_differ_by_one_port_at_most(topology: Topology) -> None:
    """By the sum of their ports' rates; and among GPUs with the same ports in reach, the loads differ by one."""
    ports, gpus = Ports(topology), gpus_of(topology)
    plans = [p.nics for p in plan_nics(topology, gpus)]
    assume(ports.usable)
    fastest = max(n.rate_gbps for n in ports.usable) or 1
    groups: dict[tuple[Nic, ...], list[tuple[Nic, ...]]] = {}
    rates: dict[int, list[float]] = {}
    for gpu, nics in zip(gpus, plans, strict=True):
        kind = ports.distance(gpu, nics[0]).kind
        rates.setdefault(kind, []).append(sum(n.rate_gbps or fastest for n in nics))
        near = tuple(n for n in ports.usable if ports.distance(gpu, n).kind == kind)
        groups.setdefault(near, []).append(nics)
        if len(nics) > 1:
            assert kind <= NODE
            assert len({(ports.distance(gpu, n)[:2], ports.grades[n]) for n in nics}) == 1
    assert all(max(mine) - min(mine) <= fastest for mine in rates.values())
    if len(groups) == 1:
        ((near, mine),) = groups.items()
        loads = [sum(n in nics for nics in mine) for n in near if ports.grades[n] == min(map(ports.grades.get, near))]
        assert max(loads) - min(loads) <= 1


def can_be_nearer(kinds: list[list[int]], taken: list[int], *, fixed: bool = False) -> bool:
    """Return whether holders ``taken`` of items that pass one around a circle lower the sum of ``kinds[holder][item]``.

    No such circle is left where the sum is the least (Klein 1967). One with fewer items may keep what it is passed and
    one with more items pass on without getting any, unless the numbers are ``fixed``.
    """
    costs, numbers = np.array(kinds), np.bincount(taken, minlength=len(kinds))
    least = np.where((numbers[:, None] < numbers) & (not fixed), 0, np.inf)
    for item, holder in enumerate(taken):
        least[holder] = np.minimum(least[holder], costs[:, item] - costs[holder, item])
    for holder in range(len(kinds)):  # by way of each: Floyd and Warshall
        least = np.minimum(least, least[:, [holder]] + least[[holder]])
    return bool((least.diagonal() < 0).any())


def distance(topology: Topology, home: int | None, core: CpuSet) -> int:
    """0 on the worker's NUMA node, 1 on its package, 2 elsewhere or where one of the two is unknown."""
    package = {n.os_index: n.package for n in topology.numa_nodes}
    at = next((n.os_index for n in topology.numa_nodes if n.cpuset & core), None)
    if home not in package or at is None:
        return 2
    return 0 if at == home else 1 if package[at] == package[home] else 2


@given(cases(), st.sampled_from(["all", 1, 2, 4]), st.integers(0, 3))
@laws(60)
def test_p8_no_other_share_of_the_cores_is_nearer(case: Case, rule: str | int, kept: int) -> None:
    cores = usable_cores(case.topology, case.allowed)
    homes = [g.numa_node for g in case.gpus]
    need = (rule if isinstance(rule, int) else 1) * len(homes) + kept
    if need > len(cores):
        if isinstance(rule, int) or len(cores) >= len(homes):
            with pytest.raises(ConfigError, match="more than the"):
                split_cores(case.topology, cores, homes, rule, kept)
        return
    shares = split_cores(case.topology, cores, homes, rule, kept).shares
    taken = [c for s in shares for c in s]
    assert len(set(taken)) == len(taken)
    if rule == "all":
        assert len(taken) == len(cores) - kept
    else:
        assert {len(s) for s in shares} == {rule}
    # under "all" the shares are dealt without the reserved cores, which are given up then: the next law
    dealt = kept if isinstance(rule, int) else 0
    found = split_cores(case.topology, cores, homes, rule, dealt).shares
    holders = [next((i for i, share in enumerate(found) if c in share), len(homes)) for c in cores]
    if rule == "all":
        assert len(homes) not in holders
        assert max(map(len, found)) - min(map(len, found)) <= 1
    kinds = [[distance(case.topology, home, c) for c in cores] for home in homes] + [[0] * len(cores)]
    assert not can_be_nearer(kinds[: max(holders) + 1], holders, fixed=rule != "all")


@given(cases(), st.integers(1, 12))
@laws(60)
def test_a_worker_gives_up_cores_of_its_share_and_gets_no_others(case: Case, kept: int) -> None:
    cores, homes = usable_cores(case.topology, case.allowed), [g.numa_node for g in case.gpus]
    assume(len(homes) + kept <= len(cores))
    whole, less = (split_cores(case.topology, cores, homes, "all", n).shares for n in (0, kept))
    assert all(set(b) <= set(a) for a, b in zip(whole, less, strict=True))
    for home, had, has in zip(homes, whole, less, strict=True):
        near, far = ([distance(case.topology, home, c) for c in cores] for cores in (has, set(had) - set(has)))
        assert max(near) <= min(far, default=2), "a core is given up, and one that is farther stays"
    lost = [len(a) - len(b) for a, b in zip(whole, less, strict=True)]
    assert sum(lost) == kept
    assert max(lost) - min(lost) <= 2
    assert max(map(len, less)) - min(map(len, less)) <= 1


@given(cases(), st.integers(0, 20))
@laws(40)
def test_p10_a_port_that_dies_changes_ports_only(case: Case, which: int) -> None:
    bindings = case.bindings
    used = [n for b in bindings for n in b.nics]
    assume(used)
    victim = used[which % len(used)]
    nics = tuple(n._replace(state="down") if n == victim else n for n in case.topology.nics)
    after = replace(case, topology=case.topology._replace(nics=nics)).bindings
    assert (victim.name, victim.port, victim.pci) not in {(n.name, n.port, n.pci) for b in after for n in b.nics}
    assert [(b.cpuset, b.memory_nodes, b.gpus) for b in after] == [(b.cpuset, b.memory_nodes, b.gpus) for b in bindings]


@given(cases(), st.randoms(use_true_random=False))
@laws(30)
def test_p11_order_of_devices_does_not_matter(case: Case, random) -> None:
    t = case.topology
    shuffled = [list(x) for x in (t.gpus, t.nics, t.hops, t.cores, t.numa_nodes)]
    for x in (*shuffled, mixed := list(case.gpus)):
        random.shuffle(x)
    g, n, h, c, m = (tuple(x) for x in shuffled)
    other = replace(case, topology=t._replace(gpus=g, nics=n, hops=h, cores=c, numa_nodes=m), gpus=tuple(mixed))
    first, again = ({(b.gpus[0].pci, b.cpuset): b for b in x.bindings} for x in (case, other))
    assert first == again


@given(cases(), st.randoms(use_true_random=False))
@laws(30)
def test_p11_names_of_ports_do_not_matter(case: Case, random) -> None:
    """mlx5_0 of one node of a cluster can be mlx5_3 of the next: the plan is by PCI address."""
    names = [n.name for n in case.topology.nics]
    random.shuffle(names)
    nics = tuple(n._replace(name=m) for n, m in zip(case.topology.nics, names, strict=True))
    other = replace(case, topology=case.topology._replace(nics=nics))
    first, again = ([[(n.pci, n.port) for n in b.nics] for b in x.bindings] for x in (case, other))
    assume(len({(n.pci, n.port) for n in nics}) == len(nics))
    assert first == again


@given(st.integers(1, 2), st.integers(1, 4), st.integers(1, 6), st.integers(1, 2))
@laws(40)
def test_p16_a_symmetric_machine_has_a_symmetric_plan(packages: int, nodes: int, cores: int, gpus: int) -> None:
    topology = symmetric(packages, nodes, max(cores, gpus), gpus)
    for b in plan_bindings(topology, topology.gpus, pus(topology)):
        home = b.gpus[0].numa_node
        assert b.cpuset <= topology.numa_nodes[home].cpuset
        assert [n.numa_node for n in b.nics] == [home]
        assert b.memory_nodes == {home}
        assert b.reasons == ()


@given(cases())
@laws(40)
def test_p17_unknown_locality_is_bound_to_what_is_allowed(case: Case) -> None:
    gpus = tuple(g._replace(numa_node=None) for g in case.gpus)
    bindings = replace(case, gpus=gpus, wanted=Settings(memory_policy=case.wanted.memory_policy)).bindings
    assert frozenset().union(*(b.cpuset for b in bindings)) == case.allowed
    assert all(any("NUMA node of this GPU is unknown" in r for r in b.reasons) for b in bindings)
    alone = len(case.topology.numa_nodes) == 1 and case.topology.other_memory  # then any place is on this node
    assert all(b.memory_policy in ("none", "interleave", *(["bind"] if alone else [])) for b in bindings)


@given(cases(), st.integers(1, 4), st.sampled_from([SHARE, Limit(0.1), Limit(1 << 20)]))
@laws(60)
def test_p6_p7_p18_workers_of_a_node(case: Case, ranks: int, limit: Limit) -> None:
    """Limits fit, what the user set stays, and each rank's part is a part of one plan."""
    assume(case.wanted.memory_policy != "bind" or limit == SHARE)
    mine = NodeFacts(
        **{"name": "n", "topology": case.topology, "gpus": case.gpus, "allowed": case.allowed, "scratch": ""},
        **{"allowed_nodes": CpuSet(), "memory": HostMemory(64 * GIB, ""), "environ": {"UCX_NET_DEVICES": "user"}},
    )
    wanted = replace(case.wanted, memory_limit=limit, device_memory_limit=Limit(0))
    count = len(case.gpus) * wanted.workers_per_gpu
    positions = tuple(range(count))
    blocks = tuple(positions[i::ranks] for i in range(ranks))
    if limit.is_part and count > 10:
        with pytest.raises(ConfigError, match="memory_limit"):
            plan_workers(wanted, mine, NodeLayout(0, (0,), (positions,)))
        return
    whole = [spec for _, spec in plan_workers(wanted, mine, NodeLayout(0, (0,), (positions,)))]
    parts = plan_workers(wanted, mine, NodeLayout(0, tuple(range(ranks)), blocks))
    assert {(r, s.name): s for r, s in parts} == {(r, whole[i].name): whole[i] for r, b in enumerate(blocks) for i in b}
    assert sum(s.memory_limit_bytes or 0 for s in whole) <= 64 * GIB
    assert all("UCX_NET_DEVICES" not in dict(s.env) for s in whole)
    if wanted.memory_policy == "bind":
        for node in case.topology.numa_nodes:
            bound = [s for s in whole if s.binding.memory_policy == "bind"]
            used = sum(s.memory_limit_bytes or 0 for s in bound if s.binding.memory_nodes == {node.os_index})
            assert used <= node.memory_bytes or not node.memory_bytes

"""Bindings: the plans of recorded and documented machines, and single cases; test_binding_laws.py has the laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from golden import check_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import DOCUMENTED, GIB, GRANTED, LUMI_CORES, MACHINES, gpus_of, machine, pus
from paths import TOPOLOGIES

from hpcgpu.errors import BindingError, ConfigError
from hpcgpu.model import Binding, CpuSet, Gpu, HostMemory, Nic, NumaNode, Settings, Topology, WorkerSpec
from hpcgpu.model.settings import SHARE, Limit
from hpcgpu.plan.binding import network, plan_bindings, simulated_gpus
from hpcgpu.plan.binding.memory import plan_memory_limit_bytes, plan_memory_nodes
from hpcgpu.plan.binding.network import Ports
from hpcgpu.report.machine import workers_table


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


NODES = tuple(NumaNode(i, CpuSet([2 * i, 2 * i + 1]), GIB, i // 2) for i in range(4))
SMALL = Topology(NODES, tuple(CpuSet([i]) for i in range(8)))


# --- single cases ----------------------------------------------------------------------------------------------


def test_infiniband_before_roce_even_when_roce_is_nearer() -> None:
    topology = machine("test-topo")
    gpu = simulated_gpus(topology, 1, GIB, "n")[0]
    near_roce = tuple(replace(n, numa_node=0 if n.kind == "roce" else 3) for n in topology.nics)
    binding = plan_bindings(replace(topology, nics=near_roce), [gpu], pus(topology))[0]
    assert binding.nics[0].kind == "infiniband"
    assert "mlx5_an0 is nearest but it is roce beside infiniband → mlx5_ib0" in binding.reasons


def test_slow_and_virtual_ports_are_the_last_choice() -> None:
    nics = tuple(Nic(f"mlx5_{i}", f"0000:0{i}:00.0", rate_gbps=r, numa_node=0) for i, r in enumerate((25.0, 200.0)))
    ports = Ports(replace(SMALL, nics=nics))
    assert [n.name for n in ports.usable] == ["mlx5_1"]
    assert ports.why_not[nics[0]].singular == "it has 25 Gb/s where others have 200"
    nics = tuple(Nic(f"mlx5_{i}", f"0000:41:00.{i}", numa_node=0, virtual=i > 0) for i in range(3))
    assert [n.name for n in Ports(replace(SMALL, nics=nics)).usable] == ["mlx5_0"]
    assert [n.name for n in Ports(replace(SMALL, nics=nics[1:])).usable] == ["mlx5_1", "mlx5_2"]  # a VM's own


def test_slingshot_plans_an_interface_and_no_ucx_device() -> None:
    hsn = Nic("hsn0", "0000:c1:00.0", kind="slingshot", numa_node=0, interface="hsn0")
    topology = replace(SMALL, nics=(hsn,))
    binding = plan_bindings(topology, simulated_gpus(topology, 1, GIB, "n"), pus(topology))[0]
    assert binding.interface == "hsn0"
    assert network.ucx_env(binding) == ()


def test_cores_that_are_shared_even_or_far_have_a_reason() -> None:
    gpus = simulated_gpus(SMALL, 4, GIB, "n")
    shared = plan_bindings(SMALL, gpus, CpuSet([0, 1]))
    assert [str(b.cpuset) for b in shared] == ["0-1"] * 4
    assert all(b.shared_cores and "2 cores for 4 workers" in b.reasons[0] for b in shared)
    even = plan_bindings(SMALL, [replace(g, numa_node=None) for g in gpus], pus(SMALL))
    assert [str(b.cpuset) for b in even] == ["0-1", "2-3", "4-5", "6-7"]
    assert {b.memory_policy for b in even} == {"none"}
    assert all("NUMA node of this GPU is unknown" in b.reasons[0] for b in even)
    assert "  unknown  " in workers_table(SMALL, [WorkerSpec(name="w0", binding=even[0])]).to_text()
    (far,) = plan_bindings(SMALL, [replace(gpus[0], numa_node=0)], CpuSet([6, 7]))
    assert far.reasons == ("no core of its own NUMA node 0 is left: PUs 6-7 are on other nodes",)
    local = plan_bindings(SMALL, [replace(g, numa_node=0) for g in gpus[:3]], pus(SMALL), Settings(cores="local"))
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


def test_a_worker_has_several_ports_where_there_are_more_of_them() -> None:
    """DGX-like: eight ports for four GPUs, two next to each; what is on another NUMA node is not taken."""
    nics = tuple(Nic(f"mlx5_{i}", f"0000:4{i}:00.0", numa_node=i // 2, interface=f"ib{i}") for i in range(8))
    topology = replace(SMALL, nics=nics)
    gpus = simulated_gpus(topology, 4, GIB, "n")
    bindings = plan_bindings(topology, gpus, pus(topology))
    assert [[n.name for n in b.nics] for b in bindings] == [[f"mlx5_{2 * i}", f"mlx5_{2 * i + 1}"] for i in range(4)]
    assert network.ucx_env(bindings[1]) == (("UCX_NET_DEVICES", "mlx5_2:1,mlx5_3:1"), ("UCX_MAX_RNDV_RAILS", "2"))
    assert network.nccl_env(bindings)[0][1].startswith("=mlx5_0:1,mlx5_1:1,")
    far = replace(topology, nics=tuple(replace(n, numa_node=0) for n in nics))
    assert [len(b.nics) for b in plan_bindings(far, gpus, pus(far))] == [2, 1, 1, 1]


def test_cards_share_the_load_where_ports_leave_a_choice() -> None:
    """Three ports at the same distance, two of them on one card: two workers take two cards."""
    places = ["0000:41:00.0", "0000:41:00.1", "0000:42:00.0"]
    nics = tuple(Nic(f"mlx5_{i}", place, numa_node=0) for i, place in enumerate(places))
    topology = replace(SMALL, nics=nics)
    gpus = tuple(replace(g, numa_node=0) for g in simulated_gpus(topology, 2, GIB, "n"))
    assert {b.nics[0].pci for b in plan_bindings(topology, gpus, pus(topology))} == {"0000:41:00.0", "0000:42:00.0"}


def test_rules_of_the_user_for_ports() -> None:
    nics = tuple(Nic(f"mlx5_{i}", f"0000:4{i}:00.0", numa_node=0, interface=f"ib{i}") for i in range(2))
    topology = replace(SMALL, nics=(*nics, Nic("eth0", "0000:50:00.0", kind="ethernet", interface="eth0")))
    gpus = simulated_gpus(topology, 4, GIB, "n")

    def plan(rule: str | tuple[str, ...]) -> list[list[str]]:
        found = plan_bindings(topology, gpus, pus(topology), Settings(nics=rule))
        return [[n.name for n in b.nics] for b in found]

    assert plan("balanced") == [["mlx5_0"], ["mlx5_0"], ["mlx5_1"], ["mlx5_1"]]
    assert plan(("mlx5_1",)) == plan(("mlx5_1:1",)) == plan(("ib1",)) == [["mlx5_1"]] * 4
    assert plan(("eth0",)) == [["eth0"]] * 4
    assert plan("ucx") == [[]] * 4
    with pytest.raises(ConfigError, match=r"'mlx5_7'.* it has: mlx5_0:1, mlx5_1:1, eth0:1"):
        plan(("mlx5_7",))
    dead = replace(topology, nics=tuple(replace(n, state="down") for n in nics))
    binding = plan_bindings(dead, gpus, pus(dead), Settings(nics=("mlx5_0",)))[0]
    assert (binding.nics, binding.reasons) == ((), ("no port that nics names is active",))


def test_reserved_cores_come_from_all_workers_without_a_rest() -> None:
    """Two GPUs on the middle two of four NUMA nodes: nobody keeps a core of a third node for the sake of a number."""
    nodes = tuple(NumaNode(i, CpuSet(range(6 * i, 6 * i + 6)), GIB) for i in range(4))
    topology = Topology(nodes, tuple(CpuSet([i]) for i in range(24)))
    gpus = tuple(replace(g, numa_node=i + 1) for i, g in enumerate(simulated_gpus(topology, 2, GIB, "n")))

    def plan(reserved: int) -> list[str]:
        found = plan_bindings(topology, gpus, pus(topology), Settings(reserved_cores=reserved))
        return [str(b.cpuset) for b in found]

    assert plan(0) == ["0-11", "12-23"]
    assert plan(2) == ["0-4,6-11", "12-22"]
    assert plan(4) == ["0-3,6-11", "12-21"]
    assert plan(5) == ["0-3,6-11", "12-20"]


def test_local_cores_have_local_memory() -> None:
    """Nobody's memory is on NUMA nodes that the rule for cores leaves to nobody."""
    gpus = tuple(replace(g, numa_node=i) for g, i in zip(simulated_gpus(SMALL, 2, GIB, "n"), (1, 2), strict=True))

    def memory(**wanted: object) -> list[str]:
        found = plan_bindings(SMALL, gpus, pus(SMALL), Settings(memory_policy="bind", **wanted))  # type: ignore[arg-type]
        return [f"{b.memory_policy} {b.memory_nodes}" for b in found]

    assert memory() == ["bind 0-1", "bind 2-3"]
    assert memory(cores="local") == memory(cores=2) == ["bind 1", "bind 2"]
    assert memory(cores=3) == ["bind 0-1", "bind 2-3"]


def test_efa_and_usnic_are_not_called_ethernet() -> None:
    nics = (Nic("rdmap16s27", "0000:10:1b.0", kind="efa"), Nic("usnic_0", "0000:12:00.0", kind="usnic"))
    why = Ports(replace(SMALL, nics=nics)).why_not
    assert why[nics[0]].singular.startswith("EFA, which UCX's verbs do not drive")
    assert why[nics[1]].singular.startswith("usNIC, which UCX does not drive")


def test_a_share_is_in_one_cache_where_one_has_room() -> None:
    """Three of the first cache's four cores were granted: a share of four is not torn between two caches."""
    cores = tuple(CpuSet([i]) for i in range(12))
    caches = tuple(CpuSet(range(i, i + 4)) for i in (0, 4, 8))
    topology = Topology((NumaNode(0, CpuSet(range(12)), GIB),), cores, l3=caches)
    gpus = simulated_gpus(topology, 2, GIB, "n")

    def plan(allowed: range, **wanted: object) -> list[str]:
        found = plan_bindings(topology, gpus, CpuSet(allowed), Settings(**wanted))  # type: ignore[arg-type]
        return [str(b.cpuset) for b in found]

    assert plan(range(1, 12), cores=4) == ["4-7", "8-11"]
    assert plan(range(1, 12), cores=3) == ["1-3", "4-6"]
    assert plan(range(12)) == ["0-5", "6-11"]
    assert plan(range(1, 12)) == ["1-2,4-7", "3,8-11"]


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

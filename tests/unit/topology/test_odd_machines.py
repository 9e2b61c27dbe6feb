"""Machines and files as they are elsewhere: synthetic ones of a few objects, each for one fault that was seen."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import GIB, mask
from waiting import scaled

from hpcgpu.deploy.machine import compare_files, plan_machine, read_machine, read_text, svg
from hpcgpu.errors import ConfigError, ParseError
from hpcgpu.model import CpuSet, Settings, Topology
from hpcgpu.plan.binding.bindings import plan_bindings
from hpcgpu.plan.binding.network import DISTANCES, Ports, ucx_env
from hpcgpu.topology import pci
from hpcgpu.topology.hwloc_xml import read_file

GPU_IDS, IB_IDS = "0302 [10de:2901] [10de:2901] a1", "0207 [15b3:1021] [15b3:0058] 00"
BLUEFIELD_IDS = "0207 [15b3:a2dc] [15b3:0008] 01"
ROCE_IDS, EFA_IDS = "0200 [15b3:1021] [15b3:0041] 00", "0200 [1d0f:efa2] [1d0f:efa2] 00"
RAILS = [[f"rail{i}"] for i in range(8)]
NUMA_2 = '<object type="NUMANode" os_index="0" cpuset="0xf0" nodeset="0x2"/>'


def function(bus: int, ids: str, name: str = "", link: float = 63.0, uuid: str = "", number: int = 0) -> str:
    """A PCI function as hwloc writes it; with a name it is an RDMA device with an active port."""
    info = f'<info name="NVIDIAUUID" value="{uuid}"/>' if uuid else ""
    rdma = f'<object type="OSDev" name="{name}" osdev_type="3"><info name="Port1State" value="4"/></object>'
    inside = (rdma if name else "") + info
    at = f'pci_busid="0000:{bus:02x}:00.{number}" pci_type="{ids}" pci_link_speed="{link}"'
    return f'<object type="PCIDev" {at}>{inside}</object>'


def bridge(bus: int, *inside: str) -> str:
    at = f'pci_busid="0000:{bus:02x}:00.0" pci_type="0604 [1000:c010] [1000:100b] a0"'
    below = f'bridge_type="1-1" bridge_pci="0000:[{bus:02x}-{bus:02x}]"'
    return f'<object type="Bridge" {below} {at}>{"".join(inside)}</object>'


def host_bridge(bus: int, *inside: str) -> str:
    return f'<object type="Bridge" bridge_type="0-1" bridge_pci="0000:[{bus:02x}-{bus:02x}]">{"".join(inside)}</object>'


def machine(*inside: str, cores: int = 8) -> str:
    """One package and NUMA node, as hwloc 2 writes it."""
    return packages("".join(inside), cores=cores)


def packages(*inside: str, cores: int = 8) -> str:
    """Packages of one NUMA node each, with these devices."""
    out = []
    for n, devices in enumerate(inside):
        mine = range(n * cores, (n + 1) * cores)
        at = f'os_index="{n}" cpuset="{mask(mine)}" nodeset="{mask([n])}"'
        places = "".join(f'<object type="Core" cpuset="{mask([i])}"/>' for i in mine)
        numa = f'<object type="NUMANode" {at} local_memory="{64 * GIB}"/>'
        out.append(f'<object type="Package" {at}>{numa}{places}{devices}</object>')
    pus, nodes = mask(range(len(inside) * cores)), mask(range(len(inside)))
    everything = f'cpuset="{pus}" nodeset="{nodes}" complete_nodeset="{nodes}"'
    return f'<topology version="2.0"><object type="Machine" {everything}>{"".join(out)}</object></topology>'


def ports_of(topology: Topology, gpus: Sequence[int] | None = None, **options: object) -> list[list[str]]:
    mine = topology.gpus if gpus is None else [topology.gpus[i] for i in gpus]
    cpu_workers = options.pop("cpu_workers", 0)
    everything, wanted = CpuSet(CpuSet().union(*topology.cores)), Settings(**options)  # type: ignore[arg-type]
    bindings = plan_bindings(topology, mine, everything, wanted.binding_rules, cpu_workers=int(str(cpu_workers)))
    return [[nic.name for nic in b.nics] for b in bindings]


# --- W1: memory of GPUs -------------------------------------------------------------------------------------------


def power9(below: str) -> str:
    """POWER9 as hwloc 1 writes it: GPU memory is a NUMA node of its own, with ``below`` in it."""
    cores = "".join(f'<object type="Core" cpuset="{mask([i])}"/>' for i in range(4))
    return (
        '<topology><object type="Machine" cpuset="0xf" complete_cpuset="0xf" nodeset="0x8001">'
        '<info name="Architecture" value="ppc64le"/>'
        '<object type="NUMANode" os_index="0" cpuset="0xf" complete_cpuset="0xf" nodeset="0x1" '
        f'local_memory="{64 * GIB}">'
        f"{cores}{function(3, GPU_IDS)}{function(4, GPU_IDS)}</object>"
        f'<object type="NUMANode" os_index="15" cpuset="0x0" complete_cpuset="0x0" nodeset="0x8000" '
        f'local_memory="{16 * GIB}">{below}</object></object></topology>'
    )


def group(inside: str) -> str:
    return f'<object type="Group" cpuset="0x0" complete_cpuset="0x0">{inside}</object>'


@given(st.recursive(st.just(""), lambda inside: inside.map(group), max_leaves=4))
def test_memory_of_a_gpu_is_never_planned(below: str) -> None:
    topology = read_file(power9(below))
    assert [n.kind for n in topology.other_memory] == ["gpu"]
    for policy in ("preferred-many", "bind", "interleave"):
        wanted = Settings(memory_policy=policy)
        for binding in plan_bindings(topology, topology.gpus, CpuSet(range(4)), wanted.binding_rules):
            assert 15 not in binding.memory_nodes


def test_dram_whose_cores_were_cut_away_stays_dram() -> None:
    topology = read_file(power9('<object type="Group" cpuset="0x0" complete_cpuset="0xf0"/>'))
    assert [n.os_index for n in topology.numa_nodes] == [0, 15]
    topology = read_file(power9('<object type="Core" cpuset="0x0"/>'))
    assert [n.os_index for n in topology.numa_nodes] == [0, 15]


# --- W2: ports for management -------------------------------------------------------------------------------------


def b200(rails: str = "") -> str:
    """Eight GPUs, two ConnectX-7 functions of the NVSwitches, eight rails of a kind on the switches of the GPUs."""
    managers = [function(0x62 + i, IB_IDS, f"mlx5_{i}", 3.938462) for i in range(2)]
    out = [host_bridge(0x60, bridge(0x61, *managers))]
    for i in range(8):
        rail = [function(0x90 + i, rails, f"rail{i}")] if rails else []
        out.append(host_bridge(0x70 + i, bridge(0x80 + i, function(0xA0 + i, GPU_IDS), *rail)))
    return machine(*out)


@pytest.mark.parametrize(("rails", "expected"), [("", None), (EFA_IDS, [[]] * 8), (ROCE_IDS, RAILS), (IB_IDS, RAILS)])
def test_ports_of_the_fabric_manager_serve_no_worker(rails: str, expected: list[list[str]] | None) -> None:
    topology = read_file(b200(rails))
    if expected is None:  # nothing to compare with: there are two ports only
        assert all(ports_of(topology))
        return
    assert ports_of(topology) == expected
    ports = Ports(topology)
    why = {nic.name: reason.singular for nic, reason in ports.why_not.items()}
    management = "it has a PCI link of 3.9 GB/s where others have 63.0: a management port"
    assert why["mlx5_0"] == ("it is infiniband beside roce" if rails == ROCE_IDS else management)
    # rails win over InfiniBand elsewhere, also if the file has no links, as NCCL's and hwloc 1's
    unlinked = read_file(b200(ROCE_IDS).replace("3.938462", "0.0").replace("63.0", "0.0"))
    assert ports_of(unlinked) == RAILS


@given(st.lists(st.sampled_from([2.0, 3.9, 7.9, 15.8, 31.5, 63.0]), min_size=1, max_size=6), st.booleans())
def test_a_port_with_a_fraction_of_the_others_serves_no_worker(links: Sequence[float], by_rate: bool) -> None:
    cards = [host_bridge(0x20 + i, function(0x30 + i, IB_IDS, f"mlx5_{i}", link)) for i, link in enumerate(links)]
    gpus = [host_bridge(0x10 + i, function(0x40 + i, GPU_IDS)) for i in range(4)]
    topology = read_file(machine(*cards, *gpus))
    if by_rate:
        nics = tuple(n._replace(rate_gbps=n.link_gbytes_s, link_gbytes_s=0.0) for n in topology.nics)
        topology = topology._replace(nics=nics)
    of = {f"mlx5_{i}": link for i, link in enumerate(links)}
    least = max(links) / (2 if by_rate else 4)
    used = {name for names in ports_of(topology) for name in names}
    assert used
    assert all(of[name] >= least for name in used)


def one_fabric(link: float, other: str, wide: float, infiniband: int = 2) -> Topology:
    """A package with four GPUs, InfiniBand of this link, and a wide card of another kind, each on its own root port."""
    cards = [host_bridge(0x20 + i, function(0x30 + i, IB_IDS, f"ib{i}", link)) for i in range(infiniband)]
    gpus = [host_bridge(0x10 + i, function(0x40 + i, GPU_IDS)) for i in range(4)]
    return read_file(machine(*cards, host_bridge(0x28, function(0x38, other, "other", wide)), *gpus))


@pytest.mark.parametrize(("link", "wide"), [(15.753846, 63.015385), (31.507692, 126.030769), (7.876923, 63.015385)])
def test_a_wide_card_of_another_fabric_narrows_no_infiniband(link: float, wide: float) -> None:
    assert ports_of(one_fabric(link, ROCE_IDS, wide)) == [["ib0"], ["ib0"], ["ib1"], ["ib1"]]
    assert ports_of(one_fabric(link, EFA_IDS, wide, infiniband=1)) == [["ib0"]] * 4  # the only one


def test_a_link_is_as_wide_in_a_file_as_in_sys() -> None:
    """hwloc writes six decimals, so a quarter of one link is not exactly another."""
    cards = [
        host_bridge(0x20 + i, function(0x30 + i, IB_IDS, f"ib{i}", link)) for i, link in enumerate((15.753846, 63))
    ]
    topology = read_file(machine(*cards, *(host_bridge(0x10 + i, function(0x40 + i, GPU_IDS)) for i in range(2))))
    links = [pci.link_gbytes_s(f"{rate} GT/s PCIe", "16") for rate in (8.0, 32.0)]
    live = topology._replace(nics=tuple(n._replace(link_gbytes_s=x) for n, x in zip(topology.nics, links, strict=True)))
    for wide in (63.015385, links[1]):
        nics = (topology.nics[0], topology.nics[1]._replace(link_gbytes_s=wide))
        assert ports_of(topology._replace(nics=nics)) == ports_of(live) == [["ib0"], ["ib1"]]


@pytest.mark.parametrize(
    ("name", "ids"),
    [("mana_0", "1414:00ba"), ("erdma_0", "1ded:107f"), ("iw_cxgb4_0", "1425:6480"), ("irdma0", "8086:1592")],
)
def test_rdma_of_other_makers_is_used_by_name_only(name: str, ids: str) -> None:
    topology = read_file(machine(function(0x40, GPU_IDS), function(0x50, f"0200 [{ids}] [{ids}] 00", name)))
    assert ports_of(topology) == [[]]
    assert Ports(topology).why_not[topology.nics[0]].singular.startswith("RDMA that UCX is not known to drive")
    (binding,) = plan_bindings(topology, topology.gpus, CpuSet(range(8)), Settings(nics=(name,)).binding_rules)
    assert ucx_env(binding) == (("UCX_NET_DEVICES", f"{name}:1"),)


# --- a job with some of the GPUs, and ports that are not rails ----------------------------------------------------


def dgx() -> Topology:
    """Two packages, each with four switches of a GPU and a rail, and a storage card of two functions beside them."""

    def package(n: int) -> str:
        base = 0x80 * n
        rails = (
            host_bridge(base + i, bridge(base + 0x10 + i, function(base + 0x20 + i, GPU_IDS), rail))
            for i in range(4)
            for rail in [function(base + 0x30 + i, IB_IDS, f"rail{4 * n + i}")]
        )
        storage = (function(base + 0x40, IB_IDS, f"storage{2 * n + i}", number=i) for i in range(2))
        return "".join((*rails, host_bridge(base + 8, *storage)))

    return read_file(packages(package(0), package(1)))


def test_a_gpu_of_a_shared_node_has_its_own_rail() -> None:
    topology = dgx()
    assert ports_of(topology) == RAILS
    assert [ports_of(topology, [i]) for i in range(8)] == [[rail] for rail in RAILS]
    assert ports_of(topology, [1, 6]) == [RAILS[1], RAILS[6]]
    # storage ports stay spare, with several workers for each GPU too
    for each in (2, 3):
        assert ports_of(topology, workers_per_gpu=each) == [rail for rail in RAILS for _ in range(each)]


def test_worker_without_a_gpu_has_one_port_of_its_node() -> None:
    with_cpu_workers = ports_of(dgx(), [0], cpu_workers=2)
    assert [len(names) for names in with_cpu_workers] == [1, 1, 1]
    near = ["rail0", "rail1", "rail2", "rail3", "storage0", "storage1"]
    far = ["rail4", "rail5", "rail6", "rail7", "storage2", "storage3"]
    assert all(names[0] in far for names in with_cpu_workers[1:])
    assert with_cpu_workers[0][0] in near


def test_pairs_of_gpus_share_the_card_of_their_switch() -> None:
    """A card for each two GPUs, and two elsewhere: nobody goes across NUMA nodes for the sake of a number."""
    pairs = [
        host_bridge(0x10 + n, bridge(0x20 + n, *gpus, function(0x30 + n, IB_IDS, f"pair{n}")))
        for n in range(4)
        for gpus in [[function(0x40 + 2 * n + i, GPU_IDS) for i in range(2)]]
    ]
    extra = [host_bridge(0x18 + i, function(0x38 + i, IB_IDS, f"storage{i}")) for i in range(2)]
    topology = read_file(packages("".join(pairs[:2]), "".join(pairs[2:]), "".join(extra)))
    assert ports_of(topology) == [[f"pair{i // 2}"] for i in range(8)]


def test_gpus_of_a_job_share_no_port_if_another_is_as_near() -> None:
    gpus = "".join(host_bridge(0x10 + i, function(0x40 + i, GPU_IDS)) for i in range(4))
    cards = "".join(host_bridge(0x20 + i, function(0x30 + i, IB_IDS, f"mlx5_{i}")) for i in range(2))
    topology = read_file(machine(gpus, cards))
    assert ports_of(topology) == [["mlx5_0"], ["mlx5_0"], ["mlx5_1"], ["mlx5_1"]]
    assert ports_of(topology, [0, 1]) == [["mlx5_0"], ["mlx5_1"]]
    assert ports_of(topology, [2]) == [["mlx5_1"]]


@pytest.mark.parametrize("rates", [(0.0, 0.0), (400.0, 200.0)])
@pytest.mark.parametrize("ids", [ROCE_IDS, IB_IDS])
def test_bluefield_stays_spare_where_connectx_suffices(ids: str, rates: tuple[float, float]) -> None:
    """A GB200 tray: two GPUs, two ConnectX cards, one BlueField of two functions, each on its own root port."""
    kind = ids[:4]
    cards = [host_bridge(0x20 + i, function(0x30 + i, ids, f"mlx5_{i}")) for i in range(2)]
    functions = [function(0x18, f"{kind}{BLUEFIELD_IDS[4:]}", f"bf{i}", number=i) for i in range(2)]
    gpus = [host_bridge(0x40 + i, function(0x50 + i, GPU_IDS)) for i in range(2)]
    topology = read_file(machine(host_bridge(0x08, *functions), *cards, *gpus))
    nics = tuple(n._replace(rate_gbps=rates[n.name.startswith("bf")]) for n in topology.nics)
    assert ports_of(topology._replace(nics=nics)) == [["mlx5_0"], ["mlx5_1"]]
    # where a ConnectX card has died, BlueField serves
    nics = tuple(n._replace(state="down") if n.name == "mlx5_1" else n for n in nics)
    assert [names[0] for names in ports_of(topology._replace(nics=nics))] in (["mlx5_0", "bf0"], ["bf0", "mlx5_0"])


def test_one_rail_has_cards_of_one_model() -> None:
    """BlueField before ConnectX in PCI order below the switches of two of eight GPUs."""
    out = []
    for i in range(8):
        beside = [function(0x30 + i, BLUEFIELD_IDS, f"bf{i}")] if i in (0, 4) else []
        rail = function(0x90 + i, IB_IDS, f"rail{i}")
        out.append(host_bridge(0x70 + i, bridge(0x80 + i, *beside, rail, function(0xA0 + i, GPU_IDS))))
    topology = read_file(machine(*out))
    assert ports_of(topology) == RAILS
    assert [ports_of(topology, [i]) for i in (0, 4)] == [[RAILS[0]], [RAILS[4]]]


# --- W3: cores of stripped files ----------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 6), st.booleans())
def test_workers_share_no_core_in_a_file_without_cores(nodes: int, cores: int, named_pus: bool) -> None:
    """Linux numbers the second hyperthreads after all cores, so 0-47,96-143 are 48 cores."""
    whole = nodes * cores
    sets = [
        CpuSet([*range(n * cores, (n + 1) * cores), *range(whole + n * cores, whole + (n + 1) * cores)])
        for n in range(nodes)
    ]
    parts = "".join(
        f'<object type="Group" cpuset="{mask(s)}" nodeset="{mask([n])}">'
        f'<object type="NUMANode" os_index="{n}" cpuset="{mask(s)}" nodeset="{mask([n])}" local_memory="{GIB}"/>'
        + "".join(f'<object type="PU" os_index="{i}" cpuset="{mask([i])}"/>' for i in s if named_pus)
        + f"{function(16 + 2 * n, GPU_IDS)}{function(17 + 2 * n, GPU_IDS)}</object>"
        for n, s in enumerate(sets)
    )
    everything = CpuSet(range(2 * whole))
    whole_machine = f'type="Machine" cpuset="{mask(everything)}" nodeset="{mask(range(nodes))}"'
    text = f'<topology version="2.0"><object {whole_machine}>{parts}</object></topology>'
    nccl = "".join(
        f'<cpu numaid="{n}" affinity="{mask(s).replace("0x", "")}">'
        f'<pci busid="0000:{16 + 2 * n:02x}:00.0" class="0x030200"/>'
        f'<pci busid="0000:{17 + 2 * n:02x}:00.0" class="0x030200"/></cpu>'
        for n, s in enumerate(sets)
    )
    twins = {pu: pu % whole for pu in everything}
    for topology in (read_file(text), read_file(f"<system>{nccl}</system>")):
        bindings = plan_bindings(topology, topology.gpus, everything)
        if nodes * cores >= len(bindings) and not (nodes == 1 or cores == 1):
            owners = [{twins[pu] for pu in b.cpuset} for b in bindings]
            assert sum(map(len, owners)) == len(set().union(*owners)), [str(b.cpuset) for b in bindings]


# --- W4: distance by the common bridge ----------------------------------------------------------------------------


@given(st.integers(0, 4), st.integers(0, 4))
def test_a_nearer_common_bridge_always_wins(own_bridges: int, gpu_bridges: int) -> None:
    """A card with bridges of its own below the switch of the GPU, beside a card behind another root port."""
    near = function(0x50, IB_IDS, "near")
    for i in range(own_bridges):
        near = bridge(0x51 + i, near)
    gpu = function(0x40, GPU_IDS)
    for i in range(gpu_bridges):
        gpu = bridge(0x41 + i, gpu)
    inside = (bridge(0x30, bridge(0x31, gpu), bridge(0x32, near)), bridge(0x60, function(0x61, IB_IDS, "far")))
    topology = read_file(machine(host_bridge(0x20, *inside)))
    assert [names[0] for rule in ("balanced", "nearest") for names in ports_of(topology, nics=rule)] == ["near"] * 2
    ports = Ports(topology)
    kinds = {nic.name: DISTANCES[ports.distance(topology.gpus[0], nic).kind] for nic in topology.nics}
    assert kinds == {"near": "switch", "far": "root"}


def test_the_distance_class_of_a_port_is_named(tmp_path: Path) -> None:
    file = tmp_path / "node.xml"
    near = bridge(0x30, function(0x31, GPU_IDS), function(0x32, IB_IDS, "mlx5_0"))
    file.write_text(machine(host_bridge(0x20, near, bridge(0x40, function(0x41, GPU_IDS)))))
    machine_plan = plan_machine({}, "option", file=str(file))
    table, picture = machine_plan.table.to_text(), svg(machine_plan)
    assert "mlx5_0:1, same switch" in table
    assert "mlx5_0:1, same root complex" in table
    words = " ".join(ET.fromstring(picture).itertext()).split()
    assert [words.count(word) for word in ("switch", "root")] == [1, 1]
    assert 'class="port idle"' not in picture


# --- small ones ---------------------------------------------------------------------------------------------------


def test_equal_uuids_are_taken_for_unknown() -> None:
    cards = [host_bridge(0x20 + i, function(0x30 + i, GPU_IDS, uuid="GPU-x" if i < 2 else "GPU-y")) for i in range(3)]
    topology = read_file(machine(*cards))
    assert [g.uuid for g in topology.gpus] == ["", "", "GPU-y"]
    assert "several GPUs have the UUID GPU-x: it is ignored" in topology.warnings
    for name, shown in (("To be filled by O.E.M.", ""), ("System Product Name", ""), ("DGX", "DGX")):  # placeholders
        info = f'complete_nodeset="{mask([0])}"><info name="DMIProductName" value="{name}"/>'
        assert read_file(machine().replace(f'complete_nodeset="{mask([0])}">', info, 1)).name == shown


def test_a_gpu_of_a_whole_package_is_local_to_all_its_nodes(tmp_path: Path) -> None:
    """Two packages of two NUMA nodes; GPU and cores of the first are below it, not below one of its nodes."""
    devices = host_bridge(0x20, function(0x30, GPU_IDS))
    boxes = []
    for p in range(2):
        at = f'cpuset="{mask(range(8 * p, 8 * p + 8))}" nodeset="{mask([2 * p, 2 * p + 1])}"'
        nodes = "".join(
            f'<object type="NUMANode" os_index="{n}" cpuset="{mask(range(4 * n, 4 * n + 4))}" nodeset="{mask([n])}"/>'
            for n in (2 * p, 2 * p + 1)
        )
        cores = "".join(f'<object type="Core" cpuset="{mask([i])}"/>' for i in range(8 * p, 8 * p + 8))
        boxes.append(f'<object type="Package" os_index="{p}" {at}>{nodes}{cores}{"" if p else devices}</object>')
    whole = f'<object type="Machine" cpuset="{mask(range(16))}" nodeset="0xf">{"".join(boxes)}</object>'
    kinds = "".join(f'<cpukind cpuset="{mask(range(i, i + 8))}"/>' for i in (0, 8))
    (tmp_path / "node.xml").write_text(f'<topology version="2.0">{whole}{kinds}</topology>')
    plan = plan_machine({"cores": 6}, "option", file=str(tmp_path / "node.xml"))
    assert plan.table.rows[0][2] == "0-1"
    assert not any("fewer cores" in reason for reason in plan.specs[0].binding.reasons)
    assert [len(kind) for kind in plan.facts.topology.core_kinds] == [8, 8]


def test_pus_of_an_unknown_numa_node_of_nccl_are_not_idle() -> None:
    cpu = '<cpu numaid="{}" affinity="{}"><pci busid="0000:0{}:00.0" class="0x030200"/></cpu>'
    topology = read_file(f"<system>{cpu.format(0, 'f', 1)}{cpu.format(-1, 'f0', 2)}</system>")
    assert [(n.os_index, str(n.cpuset)) for n in topology.numa_nodes] == [(0, "0-3"), (1, "4-7")]
    assert [g.numa_node for g in topology.gpus] == [0, 1]
    assert "numaid=-1 with PUs 4-7: they count as NUMA node 1" in topology.warnings
    # a device that is there twice counts once: NCCL accepts such files
    pci = '<pci busid="0000:01:00.0" class="0x030200"/>'
    topology = read_file(f'<system><cpu numaid="0" affinity="f">{pci}{pci}</cpu></system>')
    assert len(topology.gpus) == 1
    assert "0000:01:00.0 is described in two places: the first place counts" in topology.warnings


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('pci_busid="0000:31:00.0"', "", "no pci_busid; expected a PCI address"),
        ('pci_busid="0000:31:00.0"', 'pci_busid="0000:30:00.0"', "expected a PCI address that no other GPU has"),
        (f'pci_type="{GPU_IDS}"', 'pci_type="0302"', "expected class, vendor and device such as 0302"),
        (f'local_memory="{64 * GIB}"', 'local_memory="-1"', "expected a whole number from 0"),
        ('os_index="0" cpuset', 'os_index="-1" cpuset', "expected a whole number from 0"),
        ('"Core" cpuset="0x00000002"/>', '"Core" cpuset="0x00000001"/>', "expected PUs that no other core has"),
        ("</object></topology>", f"{NUMA_2}</object></topology>", "expected a number that no other NUMA node has"),
    ],
)
def test_a_value_that_would_lose_something_is_refused(old: str, new: str, message: str) -> None:
    text = machine(*(f"\n{host_bridge(0x20 + i, function(0x30 + i, GPU_IDS))}" for i in range(2)))
    assert old in text
    with pytest.raises(ParseError, match=f"^line [0-9]+: .*{message}"):
        read_file(text.replace(old, new, 1))


@pytest.mark.parametrize("first", [True, False])
def test_an_address_that_two_devices_have_is_a_note(first: bool) -> None:
    """As in files that people have edited: a SAS controller and a network card."""
    devices = [function(0x50, "0107 [1000:0072] [1000:3020] 03"), function(0x50, IB_IDS, "mlx5_0")]
    gpu = host_bridge(0x30, function(0x31, GPU_IDS))
    topology = read_file(
        machine(gpu, *(host_bridge(0x20 + i, d) for i, d in enumerate(devices[:: 1 if first else -1])))
    )
    assert ports_of(topology) == [["mlx5_0"]]
    assert "0000:50:00.0 is described in two places: the first GPU or network card counts" in topology.warnings


def test_work_grows_with_the_number_of_ports_not_its_square(tmp_path: Path) -> None:
    """Function calls from the file to the plan, its text, JSON and picture; 3,000 ports with them take a second."""

    def calls(count: int) -> int:
        nets = "".join(
            f'<pci busid="0001:{i // 32:02x}:{i % 32:02x}.0" class="0x020700" vendor="0x15b3" device="0x1021"><nic>'
            f'<net name="mlx5_{i}" speed="400000" port="1"/></nic></pci>'
            for i in range(count)
        )
        gpu = '<pci busid="0000:01:00.0" class="0x030200" vendor="0x10de"/>'
        file, made = tmp_path / "many.xml", 0
        file.write_text(f'<system><cpu numaid="0" affinity="ff">{gpu}{nets}</cpu></system>')

        def count_call(_frame: object, event: str, _arg: object) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(count_call)
        try:
            plan = plan_machine({}, "option", file=str(file))
            plan.table.to_text()
            plan.described()
            svg(plan)
        finally:
            sys.setprofile(None)
        assert len(plan.specs[0].binding.nics) == count
        return made

    assert calls(800) < 3 * calls(400)


def test_a_file_is_planned_and_not_compared_with_itself(tmp_path: Path) -> None:
    file = tmp_path / "node.xml"
    file.write_text(machine(host_bridge(0x20, function(0x30, GPU_IDS))))
    found = plan_machine({}, "option", file=str(file))
    assert "not bound" in found.table.to_text()
    assert found.described()["workers"][0]["memory"] == {"policy": "none", "nodes": ""}
    with pytest.raises(ConfigError, match=r"--diff compares two files, and got .*node\.xml twice"):
        compare_files([str(file), str(file)])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-8-sig"])
def test_a_file_of_powershell_is_read(tmp_path: Path, encoding: str) -> None:
    text = machine(host_bridge(0x20, function(0x30, GPU_IDS)))
    (tmp_path / "node.xml").write_bytes(text.encode(encoding))
    assert read_machine(str(tmp_path / "node.xml")) == read_file(text)


def test_a_fifo_without_a_writer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcgpu.deploy.machine._WRITER_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe is a FIFO to which nothing was written for 0 s; give a file"):
        read_text(str(tmp_path / "pipe"))
    monkeypatch.undo()  # with a writer it is read: hpcgpu topo --from <(lstopo --of xml)
    writer = subprocess.Popen([sys.executable, "-c", f"open({str(tmp_path / 'pipe')!r}, 'w').write('<topology/>')"])
    assert read_text(str(tmp_path / "pipe")) == "<topology/>"
    assert writer.wait(scaled(60)) == 0

"""Every recorded machine is read, in hwloc's formats and NCCL's; ``host/test_discover.py`` reads it by /sys."""

import re
from functools import cache, partial
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machines import HWLOC, lstopo, machine, text_of
from paths import TOPOLOGIES

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet, Gpu, Hop, Nic, NumaNode, Topology
from hpcgpu.topology import nccl_xml, pci, sysfs
from hpcgpu.topology.hwloc_xml import MAX_BYTES, read_file

NCCL = ["aws-p4de-24xl-topo", *sorted(f"nccl/{p.stem}" for p in (TOPOLOGIES / "nccl").glob("*.xml"))]
PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x01\x00"
LAUGHS = "".join(f'<!ENTITY l{i} "{f"&l{i - 1};" * 10}">' for i in range(1, 10))
ODD = [
    *("", "-1", "0x", "0x-1", "9" * 5000, "0xf...f", "1e9", "NaN", " 1", "1_0", "٣", "0000:zz:00.0", "0x1ffffffff", ",")
]


def test_gpu_facts_come_from_nvml_and_cuda_devices() -> None:
    gpu = machine("turin-4gpu-nvml").gpus[0]
    assert gpu.pci == "0000:06:00.0"
    assert gpu.uuid.startswith("GPU-")
    assert gpu.model == "NVIDIA H200"
    assert gpu.memory_bytes == 146593728 * 1024
    assert machine("power8gpudistances").gpus[0].memory_bytes == 16671616 * 1024  # hwloc 3 writes the unit


def test_gpus_of_a_cut_file_are_where_their_nodeset_says() -> None:
    """The file was cut to one NUMA node's cores; its GPUs are on others, which are DRAM and not a GPU's memory."""
    topology = machine("drm-4gpu")
    assert [g.numa_node for g in topology.gpus] == [1, 2, 6, 7]
    assert [(n.os_index, n.package) for n in topology.numa_nodes] == [(i, i // 4) for i in range(8)]
    assert [str(n.cpuset) for n in topology.numa_nodes] == ["0-15", *[""] * 7]
    assert topology.other_memory == ()


def test_ports_with_state_kind_and_interface() -> None:
    nics = {n.name: n for n in machine("turin-4gpu-nvml").nics}
    assert {n: (p.kind, p.active, p.numa_node, p.interface) for n, p in nics.items()} == {
        "mlx5_0": ("infiniband", False, 1, "ib3x"),
        "mlx5_3": ("infiniband", False, 2, "ib2x"),
        "mlx5_1": ("roce", False, 3, "eno4np0"),
        "mlx5_2": ("roce", False, 3, "eno5np1"),
        "mlx5_4": ("infiniband", True, 6, "ib1x"),
        "mlx5_5": ("infiniband", True, 7, "ib0"),
        "eno6": ("ethernet", True, 0, "eno6"),
    }
    assert [(n.name, n.kind) for n in machine("opa-hfi").nics] == [("hfi1_0", "opa"), ("enp66s0", "ethernet")]
    assert [(n.name, n.kind) for n in machine("test-topo").nics] == [("mlx5_ib0", "infiniband"), ("mlx5_an0", "roce")]
    assert {n.kind for n in machine("16intel64-manyVFs").nics} == {"ethernet", "usnic"}  # RDMA devices, but no RoCE


def test_hops_are_known_below_one_host_bridge_only() -> None:
    hops = {(a, b): h for a, b, h, _ in machine("turin-4gpu-nvml").hops}
    assert hops["0000:96:00.0", "0000:93:00.0"] == 5
    assert ("0000:96:00.0", "0000:e3:00.0") not in hops


def test_versions_1_and_2_of_one_machine_agree() -> None:
    def parts(t: Topology) -> list[object]:
        nodes, gpus = [(n.os_index, n.cpuset, n.package) for n in t.numa_nodes], [(g.pci, g.numa_node) for g in t.gpus]
        return [t.cores, nodes, gpus, t.nics, t.hops]

    assert parts(machine("epyc-corona-hwloc1")) == parts(machine("epyc-corona"))


def test_what_is_not_hwloc_is_refused_with_its_name() -> None:
    with pytest.raises(ParseError, match="entities"):
        read_file('<!DOCTYPE topology [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><topology>&b;</topology>')
    with pytest.raises(ParseError, match="line 1: <object Machine> has cpuset='0xzz'; expected a mask such as 0x"):
        read_file('<topology><object type="Machine" cpuset="0xzz"/></topology>')
    with pytest.raises(ParseError, match="no core"):
        read_file('<topology version="2.0"/>')


def test_other_memory_is_no_node_and_no_node_is_one_node() -> None:
    text = """<topology version="2.0"><object type="Machine" cpuset="0x3" nodeset="0x7">
      <object type="NUMANode" os_index="0" cpuset="0x3" nodeset="0x1" local_memory="64"/>
      <object type="NUMANode" os_index="1" cpuset="0x0" nodeset="0x2" subtype="GPUMemory" local_memory="96"/>
      <object type="NUMANode" os_index="2" cpuset="0x3" nodeset="0x4" subtype="HBM" local_memory="16"/>
      <object type="Core" cpuset="0x1"/><object type="Core" cpuset="0x2"/></object></topology>"""
    assert [n.os_index for n in read_file(text).numa_nodes] == [0]
    version_1 = '<topology><object type="Machine" cpuset="0x3" local_memory="64"><object type="Core" cpuset="0x3"/>'
    topology = read_file(f"{version_1}</object></topology>")
    assert [(n.os_index, str(n.cpuset), n.memory_bytes) for n in topology.numa_nodes] == [(0, "0-1", 64)]
    assert "no PCI device" in topology.warnings[0]


def test_file_without_cores_uses_the_pus_of_its_numa_nodes() -> None:
    text = """<topology version="2.0"><object type="Machine" cpuset="0xf" nodeset="0x3">
      <object type="NUMANode" os_index="0" cpuset="0x3" nodeset="0x1" local_memory="64"/>
      <object type="NUMANode" os_index="1" cpuset="0xc" nodeset="0x2" local_memory="64"/></object></topology>"""
    topology = read_file(text)
    assert [str(c) for c in topology.cores] == ["0", "1", "2", "3"]
    assert "describe which PUs share a core (each counts as a core)" in topology.warnings[0]
    with pytest.raises(ParseError, match="describes no node"):
        read_file(text.replace('cpuset="0xf"', "").replace('cpuset="0x3"', "").replace('cpuset="0xc"', ""))


def test_devices_of_omitted_numa_nodes_have_no_node() -> None:
    """A job without the memory of node 1, exported without --disallowed: its GPU hangs beside that of node 0."""
    gpu = '<object type="PCIDev" pci_busid="0000:0{}:00.0" pci_type="0302 [10de:2330] [10de:1626] a1"/>'
    text = f"""<topology version="2.0">
      <object type="Machine" cpuset="0x3" nodeset="0x1" complete_nodeset="0x3" allowed_nodeset="0x1">
      <object type="Group" cpuset="0x1" nodeset="0x1" complete_nodeset="0x1">
        <object type="NUMANode" os_index="0" cpuset="0x1" nodeset="0x1" local_memory="64"/>{gpu.format(1)}
        <object type="Core" cpuset="0x1"/></object>{gpu.format(2)}
      <object type="Core" cpuset="0x2"/></object></topology>"""
    topology = read_file(text)
    assert [g.numa_node for g in topology.gpus] == [0, None]
    assert "lacks NUMA nodes 1," in topology.warnings[0]
    assert "lstopo --disallowed" in topology.warnings[0]


def test_names_are_one_line_without_control_characters() -> None:
    text = (TOPOLOGIES / "turin-4gpu-nvml.xml").read_text()
    text = text.replace('value="NVIDIA H200"', 'value="NVIDIA&#10; H200&#9;"').replace(
        "ThinkSystem SD", "Think\x7fSystem SD"
    )
    topology = read_file(text)
    assert {g.model for g in topology.gpus} == {"NVIDIA H200"}
    assert topology.name == "Think System SD665-N V3"


def test_pci_classes_of_infiniband_and_of_adapters_without_roce() -> None:
    assert pci.nic_kind("0c06", "15b3", "6274") == "infiniband"  # InfiniHost III
    assert pci.nic_kind("0c06", "15b3", "634a", link_layer="Ethernet") == "roce"
    assert pci.nic_kind("0200", "1d0f", "efa1") == "efa"
    assert pci.nic_kind("0200", "1137", "00cf") == "usnic"


def test_the_nearest_of_two_memories_is_the_one_that_is_dram() -> None:
    """Without a subtype: by latency where it is told, else by number, since Linux numbers nodes with PUs first."""

    def nodes(latencies: str) -> tuple[list[int], list[tuple[int, str]]]:
        text = f"""<topology version="2.0"><object type="Machine" cpuset="0x3" nodeset="0x3" gp_index="1">
          <object type="NUMANode" os_index="0" gp_index="5" cpuset="0x3" nodeset="0x1" local_memory="120"/>
          <object type="NUMANode" os_index="1" gp_index="6" cpuset="0x3" nodeset="0x2" local_memory="144"/>
          <object type="Core" cpuset="0x1"/><object type="Core" cpuset="0x2"/></object>{latencies}</topology>"""
        topology = read_file(text)
        return [n.os_index for n in topology.numa_nodes], [(n.os_index, n.kind) for n in topology.other_memory]

    def told(name: str, first: int, second: int) -> str:
        values = "".join(
            f'<memattr_value target_obj_type="NUMANode" target_obj_gp_index="{i}" value="{v}" initiator_cpuset="0x3"/>'
            for i, v in ((5, first), (6, second))
        )
        return f'<memattr name="{name}">{values}</memattr>'

    assert nodes("") == ([0], [(1, "other")])
    assert nodes(told("Latency", 110, 140) + told("Bandwidth", 80, 400)) == ([0], [(1, "hbm")])
    assert nodes(told("Latency", 140, 110)) == ([1], [(0, "other")])


def test_pci_addresses_are_written_as_the_kernel_does() -> None:
    assert pci.address("00000000:3B:00.0") == pci.address("0000:3b:00.0") == "0000:3b:00.0"
    assert pci.address("00010000:00:00.0") == "10000:00:00.0"
    with pytest.raises(ParseError, match="0000:06:00"):
        pci.address("GPU-1")


def test_slingshot_is_seen_by_its_interface() -> None:
    target = "devices/pci0000:c0/0000:c0:01.1/0000:c1:00.0"
    files = {
        "devices/system/cpu/cpu0/topology/physical_package_id": "0\n",
        "bus/pci/devices/0000:c1:00.0": target,
        "bus/pci/devices/0000:c1:00.0/class": "0x020000\n",
        "bus/pci/devices/0000:c1:00.0/vendor": "0x17db\n",
        "bus/pci/devices/0000:c1:00.0/device": "0x0501\n",
        "bus/pci/devices/0000:c1:00.0/numa_node": "0\n",
        "class/net/hsn0": f"{target}/net/hsn0",
        "class/net/hsn0/operstate": "up\n",
        "class/net/hsn0/speed": "200000\n",
    }
    hsn0 = Nic("hsn0", "0000:c1:00.0", 1, "slingshot", "active", 200.0, 0, "hsn0")
    assert sysfs.read(files).nics == (hsn0,)
    down = sysfs.refine_nics((hsn0._replace(rate_gbps=0.0),), files | {"class/net/hsn0/operstate": "down\n"})
    assert down == ((hsn0._replace(state="down"),), ())
    xml = """<topology version="2.0"><object type="Machine" cpuset="0x1" nodeset="0x1">
      <object type="NUMANode" os_index="0" cpuset="0x1" nodeset="0x1"/><object type="Core" cpuset="0x1"/>
      <object type="PCIDev" pci_busid="0000:c1:00.0" pci_type="0200 [17db:0501] [17db:0001] 02">
      <object type="OSDev" name="hsn0" osdev_type="2"/></object></object></topology>"""
    assert read_file(xml).nics == (hsn0._replace(state="unknown", rate_gbps=0.0),)


def test_the_kernel_corrects_what_hwloc_guesses() -> None:
    """ConnectX-3 is class 0280 in both modes, and blanked files tell no LID."""
    recorded = machine("test-topo").nics
    files = {f"class/infiniband/{n.name}": f"devices/pci0000:00/{n.pci}/infiniband/{n.name}" for n in recorded}
    files |= {f"bus/pci/devices/{n.pci}/numa_node": "0\n" for n in recorded}
    files |= {
        "class/infiniband/mlx5_ib0/ports/1/state": "1: DOWN\n",
        "class/infiniband/mlx5_ib0/ports/1/link_layer": "InfiniBand\n",
        "class/infiniband/mlx5_ib0/ports/1/rate": "200 Gb/sec (4X HDR)\n",
        "class/infiniband/mlx5_an0/ports/1/state": "4: ACTIVE\n",
        "class/infiniband/mlx5_an0/ports/1/link_layer": "InfiniBand\n",
    }
    nics = {n.name: n for n in sysfs.refine_nics(recorded, files)[0]}
    assert (nics["mlx5_ib0"].active, nics["mlx5_ib0"].rate_gbps, nics["mlx5_ib0"].numa_node) == (False, 200.0, 0)
    assert nics["mlx5_an0"].kind == "infiniband"


def test_sysfs_without_cpus_is_an_error() -> None:
    topology = sysfs.read({f"devices/system/cpu/cpu{i}/topology/physical_package_id": "-1" for i in range(2)})
    assert [(n.os_index, n.cpuset, n.package) for n in topology.numa_nodes] == [(0, CpuSet([0, 1]), 0)]  # no NUMA
    with pytest.raises(ParseError, match="mounted"):
        sysfs.read({})
    package = "devices/system/cpu/cpu0/topology/physical_package_id"
    topology = sysfs.read({package: "zero\n"})
    assert (topology.cores, topology.numa_nodes[0].package) == ((CpuSet([0]),), 0)
    assert f"/sys/{package} is 'zero'; expected a whole number" in topology.warnings
    siblings = package.replace("physical_package_id", "core_cpus_list")
    with pytest.raises(ParseError, match=f"/sys/{siblings} is '0-x'; expected a list such as 0-7,16"):
        sysfs.read({package: "0\n", siblings: "0-x\n"})


# --- NCCL's format ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "nodes", "homes", "nics", "pairs"),
    [
        ("aws-p4de-24xl-topo", {0: "0-23,48-71", 1: "24-47,72-95"}, [0, 0, 0, 0, 1, 1, 1, 1], 0, 0),
        ("nccl/azure-ndv4", {0: "0-23", 1: "24-47", 2: "48-71", 3: "72-95"}, [1, 1, 0, 0, 3, 3, 2, 2], 0, 0),
        ("nccl/azure-ndv5", {0: "48-95", 1: "0-47"}, [0, 0, 0, 0, 1, 1, 1, 1], 0, 0),
        ("nccl/oci-h100", {0: "0-55,112-167", 1: "56-111,168-223"}, [0, 0, 0, 0, 1, 1, 1, 1], 16, 8),
        ("nccl/dump", {0: "0-15,64-79", 1: "16-31,80-95"}, [0, 1], 3, 1),
    ],
)
def test_nodes_gpus_and_nics_of_nccl_files(
    name: str, nodes: dict[int, str], homes: list[int], nics: int, pairs: int
) -> None:
    topology = read_file(text_of(name))
    assert {n.os_index: str(n.cpuset) for n in topology.numa_nodes} == nodes
    assert [n.package for n in topology.numa_nodes] == list(nodes)  # nobody says which nodes share one
    assert [g.numa_node for g in topology.gpus] == homes  # by PCI address, which is not the file's order
    assert {g.vendor for g in topology.gpus} == {"nvidia"}  # Azure's files name no vendor
    runs = 2 if "," in next(iter(nodes.values())) else 1
    assert len(topology.cores) * runs == sum(len(n.cpuset) for n in topology.numa_nodes)
    assert (len(topology.nics), len(topology.hops)) == (nics, pairs)
    assert "which PUs share a core" in topology.warnings[0]
    assert topology.source == "NCCL topology XML v1"


def test_functions_of_one_card_are_devices_with_port_1() -> None:
    """NCCL calls mlx5_1, the card's second function, port 2 of the first; UCX knows it as mlx5_1:1."""
    topology = read_file(text_of("nccl/oci-h100"))
    first = [(n.name, n.port, n.kind, n.rate_gbps) for n in topology.nics if n.pci == "0000:0c:00.0"]
    assert first == [("mlx5_0", 1, "roce", 180.0), ("mlx5_1", 1, "roce", 180.0)]
    # up from the GPU to the card's upper switch and down again
    assert {h for g, _, h, _ in topology.hops if g == "0000:0f:00.0"} == {3}


def test_nccl_dump_has_sockets_virtual_functions_and_gaps() -> None:
    warnings = read_file(text_of("aws-p4de-24xl-topo")).warnings  # cards without a name
    assert warnings[1].endswith("0000:10:1b.0, 0000:20:1b.0, 0000:90:1b.0, 0000:a0:1b.0")
    nics = {n.name: n for n in read_file(text_of("nccl/dump")).nics}
    assert nics["mlx5_0"] == Nic("mlx5_0", "0000:04:00.0", 1, "infiniband", "unknown", 200.0, 0, None)
    assert nics["ens2"] == Nic("ens2", "0000:c2:00.0", 1, "ethernet", "unknown", 25.0, 1, "ens2")
    assert nics["mlx5_2"] == Nic("mlx5_2", "0000:e1:00.0", 1, "infiniband", "unknown", 0.0, None, None, True)


def test_merged_ports_of_nccl_are_several_ports() -> None:
    """NCCL 2.25 writes mlx5_0+mlx5_1 for two functions of a card, and a card below a CPU if it merged distant ones."""
    text = """<system version="2"><cpu numaid="0" affinity="3">
      <pci busid="0000:01:00.0" class="0x030200" vendor="0x10de"/>
      <pci busid="0000:02:00.1" class="0x020700" vendor="0x15b3" device="0x1021">
        <nic><net name="mlx5_0+mlx5_1" speed="800000" port="1"/></nic></pci></cpu>
      <cpu numaid="1" affinity="c"><pci busid="0000:03:00.0" class="0x030200" vendor="0x10de"/>
        <nic><net name="mlx5_4+mlx5_5" speed="800000" port="1"/><net name="lo" speed="10000" port="0"/></nic></cpu>
      </system>"""
    topology = read_file(text)
    ports = [(n.name, n.port, n.pci, n.rate_gbps, n.numa_node) for n in topology.nics]
    placed = [(f"mlx5_{i}", 1, "0000:02:00.1", 400.0, 0) for i in (0, 1)]
    assert ports == [*((f"mlx5_{i}", 1, "", 400.0, 1) for i in (4, 5)), *placed]
    assert {n.kind for n in topology.nics} == {"infiniband"}
    assert "of mlx5_4, mlx5_5 no PCI address is here, so only their NUMA node is known" in topology.warnings
    # a card of two ports has one name, and may be in the file as such, too
    one = text.replace("mlx5_0+mlx5_1", "mlx4_0+mlx4_0").replace("mlx5_4+mlx5_5", "mlx4_0")
    assert sorted((n.name, n.port, n.numa_node) for n in read_file(one).nics) == [("mlx4_0", 1, 0), ("mlx4_0", 2, 0)]


def test_cores_of_a_wrong_mask_are_named() -> None:
    cpus = "".join(f'<cpu numaid="{i}" affinity="{mask}"/>' for i, mask in enumerate(("f0f", "fff0000", "f00000f0")))
    (coarse,) = (w for w in read_file(f"<system>{cpus}</system>").warnings if "share a core" in w)
    assert "but PUs 16-27 are no two runs: each counts as a core" in coarse


def test_gpus_of_rccl_and_without_any_class() -> None:
    text = """<system version="2"><cpu numaid="0" affinity="3">
      <pci busid="0000:c1:00.0" class="0x038000" vendor="0x1002"><gpu dev="0" gcn="942"/></pci>
      <pci busid="0000:c2:00.0" class="0x038000"><gpu dev="1" gcn="942"/></pci>
      <pci busid="000f:01:00.0"><gpu dev="2" sm="121"/></pci>
      <pci busid="0000:02:00.0" class="0x030000" vendor="0x1a03"/></cpu></system>"""
    places = [(g.pci, g.vendor) for g in read_file(text).gpus]
    assert places == [("0000:c1:00.0", "amd"), ("0000:c2:00.0", "amd"), ("000f:01:00.0", "nvidia")]


def test_masks_that_do_not_tell_nodes_apart_make_one_node() -> None:
    """All ones for both: a virtual machine of a host whose masks were written as they came."""
    unnumbered = read_file('<system><cpu affinity="f"><pci busid="0:1:0.0" class="0x030200"/></cpu></system>')
    assert [(n.os_index, str(n.cpuset)) for n in unnumbered.numa_nodes] == [(0, "0-3")]
    assert [g.numa_node for g in unnumbered.gpus] == [0]
    gpus = [f'<pci busid="0000:0{i}:00.0" class="0x030200"/>' for i in (1, 2)]
    cpus = "".join(f'<cpu numaid="{i}" affinity="ffffffff">{g}</cpu>' for i, g in enumerate(gpus))
    topology = read_file(f"<system>{cpus}</system>")
    assert [(n.os_index, str(n.cpuset)) for n in topology.numa_nodes] == [(0, "0-31")]
    assert [g.numa_node for g in topology.gpus] == [0, 0]
    assert "share PUs" in topology.warnings[1]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('<system><cpu numaid="0"><pci busid="0000:01:00.0" class="0x030200"/></cpu></system>', "names no PU"),
        ('<system><cpu affinity="0-31"/></system>', "line 1: <cpu> has affinity='0-31'; expected a mask"),
        (f'<system><cpu affinity="{"ffffffff," * 2000}ffffffff"/></system>', "expected a mask"),
        ('<system><cpu affinity="1" numaid="x"/></system>', "has numaid='x'; expected a whole number"),
        ('<system><cpu affinity="1"><pci class="0x030200"/></cpu></system>', "<pci> has no busid; expected a PCI addr"),
        (
            '<system><cpu affinity="1" host_hash="0x1"/><cpu affinity="2" host_hash="0x2"/></system>',
            "2 hosts, not one; write",
        ),
        ('<system><cpu affinity="1"><pci busid="0:1:0"><nic><net name="a" speed="x"/></nic></pci></cpu></system>', "x"),
    ],
)
def test_what_is_no_node_is_refused_by_the_nccl_reader(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=re.escape(says)):
        read_file(text)
    with pytest.raises(ParseError, match="begins with <topology>"):
        nccl_xml.locate(flat([], [], ["0-7"]), "<topology/>")


# --- a virtual machine with NCCL_TOPO_FILE -----------------------------------------------------------------------


def flat(gpus: list[str], nics: list[str], masks: list[str]) -> Topology:
    """A machine whose /sys knows no place of any device and shows all of them on one bus."""
    return Topology(
        tuple(NumaNode(i, CpuSet.parse(m), 2**38, i) for i, m in enumerate(masks)),
        tuple(CpuSet([i]) for m in masks for i in CpuSet.parse(m)),
        tuple(Gpu(a, uuid=f"GPU-{a}") for a in gpus),
        tuple(Nic(f"mlx5_ib{i}", a) for i, a in enumerate(nics)),
        tuple(Hop(g, n, 1, 0) for g in gpus for n in nics),
        source="libhwloc",
    )


def test_places_of_a_flat_machine_come_from_the_file() -> None:
    gpus = [f"{i}:00:00.0" for i in ("0001", "0002", "0003", "0004", "000b", "000c", "000d", "000e")]
    nics = [f"{i}:00:00.0" for i in ("0101", "0102", "0103", "0104", "0105", "0106", "0107", "0108")]
    live = flat(gpus, nics, ["0-23", "24-47", "48-71", "72-95"])
    topology = nccl_xml.locate(live, text_of("nccl/azure-ndv4"))
    assert [g.numa_node for g in topology.gpus] == [1, 1, 0, 0, 3, 3, 2, 2]
    assert [n.numa_node for n in topology.nics] == [1, 1, 0, 0, 3, 3, 2, 2]
    assert len(topology.hops) == 16  # each GPU with the two cards on its switch, no longer with all eight
    assert {h.bridges for h in topology.hops} == {1}
    assert topology.source == "libhwloc + NCCL_TOPO_FILE"
    assert [g.uuid for g in topology.gpus] == [g.uuid for g in live.gpus]
    assert (topology.numa_nodes, topology.cores) == (live.numa_nodes, live.cores)


def test_what_is_known_stays_and_a_known_pair_keeps_its_bridges() -> None:
    live = flat(["0000:03:00.0", "0000:c1:00.0"], ["0000:04:00.0"], ["0-15,64-79", "16-31,80-95"])
    known = live._replace(
        gpus=(live.gpus[0]._replace(numa_node=1), live.gpus[1]),
        nics=(live.nics[0]._replace(numa_node=1),),
        hops=(Hop("0000:03:00.0", "0000:04:00.0", 5, 0),),
    )
    topology = nccl_xml.locate(known, text_of("nccl/dump"))
    assert [g.numa_node for g in topology.gpus] == [1, 1]  # the file says 0 of the first
    assert topology.hops == known.hops
    placed = live._replace(gpus=tuple(g._replace(numa_node=0) for g in live.gpus), nics=())
    assert nccl_xml.locate(placed, text_of("nccl/dump")) == placed


def test_a_node_is_found_by_its_pus_before_its_number() -> None:
    """Azure's file for ND H100 v5 gives PUs 48-95 to node 0; a file without PUs has numbers, perhaps of no node."""
    live = flat(["0001:00:00.0", "0009:00:00.0"], [], ["0-47", "48-95"])
    assert [g.numa_node for g in nccl_xml.locate(live, text_of("nccl/azure-ndv5")).gpus] == [1, 0]
    live = flat(["0000:01:00.0", "0000:02:00.0", "0000:03:00.0"], [], ["0-7", "8-15"])
    cpus = [f'<cpu numaid="{n}"><pci busid="0000:0{i}:00.0"/></cpu>' for i, n in ((1, 1), (2, 5), (3, -1))]
    text = f"<system>{''.join(cpus)}</system>"
    assert [g.numa_node for g in nccl_xml.locate(live, text).gpus] == [1, None, None]
    # the second function of a card is where the first is
    live = flat([], ["0000:c1:00.1", "0000:e1:00.1"], ["0-15,64-79", "16-31,80-95"])
    assert [n.numa_node for n in nccl_xml.locate(live, text_of("nccl/dump")).nics] == [1, None]


def test_a_card_or_machine_that_the_file_does_not_name_stays() -> None:
    live = flat(["0000:03:00.0"], ["0000:04:00.0", "0000:99:00.0"], ["0-15,64-79", "16-31,80-95"])
    far = live._replace(hops=tuple(h._replace(bridges=7) for h in live.hops))
    hops = nccl_xml.locate(far, text_of("nccl/dump")).hops
    assert [h[1:3] for h in hops] == [("0000:04:00.0", 1), ("0000:99:00.0", 7)]
    live = flat(["0000:01:00.0"], [], ["0-7", "8-15"])
    topology = nccl_xml.locate(live, text_of("nccl/azure-ndv4"))
    assert topology._replace(warnings=()) == live
    assert "0000:01:00.0" in topology.warnings[0]


# --- the entrance ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "empty; allowed: hwloc's XML"),
        (" \n", "empty"),
        (PNG.decode(errors="replace"), "begins with '\ufffdPNG"),
        (PNG.decode(errors="surrogateescape"), "begins with"),
        (PNG.decode("latin-1"), "begins with"),
        ('{"topology": 1}', "begins with '{\"topology\": 1}'"),
        ("<!DOCTYPE html><html></html>", "begins with <html>"),
        ('<!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0//EN" "xhtml1.dtd"><html/>', "begins with <html>"),
        ("Machine (7946MB total)\n  Package L#0", "begins with 'Machine"),
        ("<?xml version='1.0'?><!-- no end", "not a topology file"),
        ("<topologies/>", "begins with <topologies>"),
        ("x" * (MAX_BYTES + 1), "more than 8 MiB"),
        ("é" * (MAX_BYTES // 2 + 1), "more than 8 MiB"),
        ("<topology>\0</topology>", "not a topology file, or cut off: not well-formed"),
        ("<topology>\udcff</topology>", "it has characters that are not text"),
        ("<topology>" * 100_000 + "</topology>" * 100_000, "nested"),
        ("<system>" + '<pci busid="0:0:0.0">' * 100_000 + "</pci>" * 100_000 + "</system>", "nested"),
    ],
    ids=range(17),
)
def test_what_is_no_topology_file_is_refused(text: str, says: str) -> None:
    with pytest.raises(ParseError, match=re.escape(says)):
        read_file(text)


@pytest.mark.parametrize(
    "doctype",
    [
        f'<!DOCTYPE {{0}} [<!ENTITY l0 "ha">{LAUGHS}]>',
        '<!DOCTYPE {0} [<!ENTITY l9 SYSTEM "file:///etc/hostname">]>',
        '<!DOCTYPE {0} [<!ENTITY % p SYSTEM "http://localhost/x.dtd"> %p;]>',
        '<!DOCTYPE {0} SYSTEM "hwloc2.dtd" [<!ENTITY l9 "ha">]>',
        '<!DOCTYPE {0} [<!ATTLIST {0} version CDATA "3.0">]>',
        "<!-- > --><?x > ?>\n<!DOCTYPE {0}\n[]>",
        '<?xml version="1.0" encoding="UTF-16"?><!DOCTYPE {0} [<!ENTITY l9 "ha">]>',
    ],
)
@pytest.mark.parametrize("root", ["topology", "system"])
def test_a_document_type_with_declarations_is_refused(root: str, doctype: str) -> None:
    text = f"{doctype.format(root)}<{root}>&l9;</{root}>"
    for read in (read_file, partial(nccl_xml.locate, flat([], [], ["0-7"]))):
        with pytest.raises(ParseError, match="declares entities or other markup"):
            read(text)


def test_an_external_document_type_is_accepted_and_not_loaded() -> None:
    body = text_of("opa-hfi").partition("?>")[2].replace('"hwloc2.dtd"', '"file:///nowhere/hwloc2.dtd"')
    for start in ("", "\ufeff", '<?xml version="1.0" encoding="UTF-16"?>'):
        assert read_file(start + body) == read_file(text_of("opa-hfi"))
    with pytest.raises(ParseError, match="undefined entity"):
        read_file(body.replace("</topology>", "&nowhere;</topology>"))


# --- laws --------------------------------------------------------------------------------------------------------


@given(st.sampled_from([*HWLOC, *NCCL]), st.floats(0, 1, exclude_max=True))
@settings(deadline=None, max_examples=60)
def test_a_cut_file_is_an_error_never_half_a_node(name: str, part: float) -> None:
    text = text_of(name)
    end = int(part * len(text))
    if text[end:].strip():
        with pytest.raises(ParseError):
            read_file(text[:end])
    else:
        assert read_file(text[:end]) == read_file(text)


@cache
def values_of(name: str) -> list[tuple[int, int]]:
    """Where the attributes' values are, quotes included."""
    return [m.span(1) for m in re.finditer(r'\s\w+=("[^"]*")', text_of(name))]


@given(st.data(), st.sampled_from([*HWLOC, *NCCL]))
@settings(deadline=None, max_examples=80)
def test_any_value_gives_a_node_or_a_parse_error(data: st.DataObject, name: str) -> None:
    text = text_of(name)
    places = sorted(data.draw(st.lists(st.sampled_from(values_of(name)), min_size=1, max_size=4, unique=True)))
    anything = st.one_of(st.sampled_from(ODD), st.text(st.characters(codec="utf-8", exclude_categories=["Cc"])))
    for start, end in reversed(places):
        text = text[:start] + quoteattr(data.draw(anything)) + text[end:]
    try:
        assert isinstance(read_file(text), Topology)
    except ParseError as e:
        assert len(str(e)) < 400


@pytest.mark.parametrize("name", [n for n in HWLOC if '<topology version="2' in text_of(n)])
def test_version_2_rewritten_as_version_1_is_the_same_node(name: str) -> None:
    written = lstopo("--input", str(TOPOLOGIES / f"{name}.xml"), "--of", "xml", "--export-xml-flags", "v1", "-")
    old, new = read_file(written), read_file(text_of(name))
    assert old.source == "hwloc XML v1.0"
    assert old._replace(source=new.source) == new


def test_masks_are_parsed_a_few_times_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed, mask = [], pci.mask
    monkeypatch.setattr(pci, "mask", lambda text: parsed.append(text) or mask(text))
    assert len(read_file(text_of("turin-4gpu-nvml")).cores) == 128
    assert len(parsed) < 8 * 128

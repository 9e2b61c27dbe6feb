"""Every recorded machine is read, in all versions of hwloc's XML; ``host/test_discover.py`` reads it by /sys."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import machine
from paths import TOPOLOGIES

from hpcgpu.errors import ParseError
from hpcgpu.model import CpuSet, Nic, Topology
from hpcgpu.topology import hwloc_xml, pci, sysfs


@pytest.mark.parametrize(
    ("name", "numa", "cores", "vendor", "homes"),
    [
        ("coral-lassen", [0, 8], 40, "nvidia", [0, 0, 8, 8]),
        ("coral-ea-hwloc1", [0, 1], 20, "nvidia", [0, 0, 1, 1]),  # its BMC is a VGA device too
        ("epyc-corona", list(range(8)), 48, "amd", [1, 2, 5, 7]),
        ("epyc-corona-hwloc1", list(range(8)), 48, "amd", [1, 2, 5, 7]),
        ("turin-4gpu-nvml", list(range(8)), 128, "nvidia", [1, 2, 6, 7]),
        ("nvidiaDGX2", [0, 1], 4, "nvidia", [0] * 8 + [1] * 8),
        ("power8gpudistances", [0, 1], 8, "nvidia", [0, 0, 1, 1]),
        ("intel-4gpu", [0, 1], 8, "intel", [0, 0, 1, 1]),
        ("opa-hfi", [0], 4, "", []),
        ("test-topo", [0, 1, 2, 3], 176, "", []),
        ("16intel64-manyVFs", [0, 1], 16, "", []),
    ],
)
def test_nodes_cores_and_gpus(name: str, numa: list[int], cores: int, vendor: str, homes: list[int]) -> None:
    topology = machine(name)
    assert [n.os_index for n in topology.numa_nodes] == numa
    assert len(topology.cores) == cores
    assert [g.numa_node for g in topology.gpus] == homes
    assert {g.vendor for g in topology.gpus} == ({vendor} if vendor else set())
    assert all(n.memory_bytes > 2**30 and n.cpuset for n in topology.numa_nodes)


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
        hwloc_xml.read_file('<!DOCTYPE topology [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><topology>&b;</topology>')
    with pytest.raises(ParseError, match="line 1: <object Machine> has cpuset='0xzz'; expected a mask such as 0x"):
        hwloc_xml.read_file('<topology><object type="Machine" cpuset="0xzz"/></topology>')
    with pytest.raises(ParseError, match="no core"):
        hwloc_xml.read_file('<topology version="2.0"/>')


def test_other_memory_is_no_node_and_no_node_is_one_node() -> None:
    text = """<topology version="2.0"><object type="Machine" cpuset="0x3" nodeset="0x7">
      <object type="NUMANode" os_index="0" cpuset="0x3" nodeset="0x1" local_memory="64"/>
      <object type="NUMANode" os_index="1" cpuset="0x0" nodeset="0x2" subtype="GPUMemory" local_memory="96"/>
      <object type="NUMANode" os_index="2" cpuset="0x3" nodeset="0x4" subtype="HBM" local_memory="16"/>
      <object type="Core" cpuset="0x1"/><object type="Core" cpuset="0x2"/></object></topology>"""
    assert [n.os_index for n in hwloc_xml.read_file(text).numa_nodes] == [0]
    version_1 = '<topology><object type="Machine" cpuset="0x3" local_memory="64"><object type="Core" cpuset="0x3"/>'
    topology = hwloc_xml.read_file(f"{version_1}</object></topology>")
    assert [(n.os_index, str(n.cpuset), n.memory_bytes) for n in topology.numa_nodes] == [(0, "0-1", 64)]
    assert "no PCI device" in topology.warnings[0]


def test_file_without_cores_uses_the_pus_of_its_numa_nodes() -> None:
    text = """<topology version="2.0"><object type="Machine" cpuset="0xf" nodeset="0x3">
      <object type="NUMANode" os_index="0" cpuset="0x3" nodeset="0x1" local_memory="64"/>
      <object type="NUMANode" os_index="1" cpuset="0xc" nodeset="0x2" local_memory="64"/></object></topology>"""
    topology = hwloc_xml.read_file(text)
    assert [str(c) for c in topology.cores] == ["0", "1", "2", "3"]
    assert "describe which PUs share a core (each counts as a core)" in topology.warnings[0]
    with pytest.raises(ParseError, match="describes no node"):
        hwloc_xml.read_file(text.replace('cpuset="0xf"', "").replace('cpuset="0x3"', "").replace('cpuset="0xc"', ""))


def test_devices_of_omitted_numa_nodes_have_no_node() -> None:
    """A job without the memory of node 1, exported without --disallowed: its GPU hangs beside that of node 0."""
    gpu = '<object type="PCIDev" pci_busid="0000:0{}:00.0" pci_type="0302 [10de:2330] [10de:1626] a1"/>'
    text = f"""<topology version="2.0">
      <object type="Machine" cpuset="0x3" nodeset="0x1" complete_nodeset="0x3" allowed_nodeset="0x1">
      <object type="Group" cpuset="0x1" nodeset="0x1" complete_nodeset="0x1">
        <object type="NUMANode" os_index="0" cpuset="0x1" nodeset="0x1" local_memory="64"/>{gpu.format(1)}
        <object type="Core" cpuset="0x1"/></object>{gpu.format(2)}
      <object type="Core" cpuset="0x2"/></object></topology>"""
    topology = hwloc_xml.read_file(text)
    assert [g.numa_node for g in topology.gpus] == [0, None]
    assert "lacks NUMA nodes 1," in topology.warnings[0]
    assert "lstopo --disallowed" in topology.warnings[0]


def test_names_are_one_line_without_control_characters() -> None:
    text = (TOPOLOGIES / "turin-4gpu-nvml.xml").read_text()
    text = text.replace('value="NVIDIA H200"', 'value="NVIDIA&#10; H200&#9;"').replace(
        "ThinkSystem SD", "Think\x7fSystem SD"
    )
    topology = hwloc_xml.read_file(text)
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
        topology = hwloc_xml.read_file(text)
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
    down = sysfs.refine_nics((replace(hsn0, rate_gbps=0.0),), files | {"class/net/hsn0/operstate": "down\n"})
    assert down == ((replace(hsn0, state="down"),), ())
    xml = """<topology version="2.0"><object type="Machine" cpuset="0x1" nodeset="0x1">
      <object type="NUMANode" os_index="0" cpuset="0x1" nodeset="0x1"/><object type="Core" cpuset="0x1"/>
      <object type="PCIDev" pci_busid="0000:c1:00.0" pci_type="0200 [17db:0501] [17db:0001] 02">
      <object type="OSDev" name="hsn0" osdev_type="2"/></object></object></topology>"""
    assert hwloc_xml.read_file(xml).nics == (replace(hsn0, state="unknown", rate_gbps=0.0),)


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

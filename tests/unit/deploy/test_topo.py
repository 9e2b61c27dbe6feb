"""Other people's machines: laws of what is planned from files, over all recorded machines and some made of them."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakesys
import pytest
from golden import check_golden
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from machines import (
    DOCUMENTED,
    GIB,
    HWLOC,
    MACHINES,
    as_xml,
    granted,
    lstopo,
    machine,
    mask,
    pus,
    text_of,
    with_device,
    with_flat_memory,
)
from paths import TOPOLOGIES

from hpcgpu.deploy.machine import plan_machine
from hpcgpu.deploy.processes.node import facts_of, read_node, requested_gpus
from hpcgpu.errors import ConfigError, LaunchError, ParseError
from hpcgpu.host import host_memory
from hpcgpu.model import Binding, CpuSet, HostMemory, NodeLayout, Settings, Topology, WorkerSpec
from hpcgpu.model.settings import Limit
from hpcgpu.plan.binding.bindings import plan_bindings
from hpcgpu.plan.binding.workers import plan_workers
from hpcgpu.report.machine import MachinePlan
from hpcgpu.topology.hwloc_xml import read_file

# recorded machines, and those of documents as hwloc would write them
TEXTS = {name: text_of(name) for name in HWLOC} | {f"documented {n}": as_xml(t) for n, t in DOCUMENTED.items()}
NVIDIA = st.deferred(lambda: st.sampled_from([n for n in TEXTS if any(g.can_run for g in topology_of(n).gpus)]))
# class, vendor:device, board, revision: what is beside NVIDIA's GPUs in real machines and runs no CUDA
DECOYS = {
    "AMD MI50": "1200 [1002:66a1] [1002:0834] 00",
    "AMD as display controller": "0380 [1002:740f] [1002:0c34] 00",
    "ATI ES1000, a BMC's": "0300 [1002:515e] [15d9:8980] 02",
    "ASPEED, a BMC's": "0300 [1a03:2000] [15d9:1b7e] 41",
    "Matrox, a BMC's": "0300 [102b:0536] [1028:08ff] 04",
    "Intel Max 1550": "0380 [8086:0bd5] [8086:0000] 2f",
    "Intel's of a desktop CPU": "0300 [8086:3e98] [1028:0869] 00",
}
OPTIONS = st.fixed_dictionaries(
    {
        "memory_policy": st.sampled_from(["preferred-many", "bind", "interleave"]),
        "cores": st.sampled_from(["all", "all", "local"]),
        "workers_per_gpu": st.sampled_from([1, 2]),
    }
)
FLAT = [name for name in TEXTS if '<topology version="' in TEXTS[name] and name != "drm-4gpu"]


@functools.cache
def topology_of(name: str) -> Topology:
    return read_file(TEXTS[name])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


def planned(
    folder: Path, text: str, *, cpuset: str | None = None, gpus: str | None = None, **wanted: Any
) -> MachinePlan:
    path = folder / "machine.xml"
    path.write_text(text)
    return plan_machine(wanted, "option --{flag}", file=str(path), cpuset=cpuset, gpus=gpus)


def bindings(result: MachinePlan) -> list[Binding]:
    return [s.binding for s in result.specs]


@given(NVIDIA, st.lists(st.tuples(st.integers(0, 9), st.sampled_from(sorted(DECOYS))), min_size=1))
@settings(deadline=None, max_examples=15)
def test_a_plan_does_not_depend_on_gpus_that_cannot_run(folder: Path, name: str, decoys: list[tuple[int, str]]) -> None:
    text = TEXTS[name]
    for i, (place, kind) in enumerate(decoys):
        # some come before NVIDIA's in PCI order, some after
        text = with_device(text, place, f"{'0000' if i % 2 else '00ff'}:{i:02x}:1f.7", DECOYS[kind], kind)
    first, beside = planned(folder, TEXTS[name]), planned(folder, text)
    assert beside.specs == first.specs
    assert beside.specs
    assert {g.vendor for b in bindings(beside) for g in b.gpus} == {"nvidia"}
    assert planned(folder, text, gpus="0").specs == planned(folder, TEXTS[name], gpus="0").specs
    assert beside.described()["workers"] == first.described()["workers"]
    for line in beside.table.to_text().splitlines():
        if line.startswith("seen, not NVIDIA: no worker: "):
            assert line.count("; ") + 1 == sum(not g.can_run for g in beside.facts.topology.gpus)
            break
    else:
        assert all(g.can_run for g in beside.facts.topology.gpus)


def test_gpus_of_others_are_left_out_live(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fakesys.build("epyc-corona", tmp_path)
    for variable, value in fakesys.environment(tmp_path).items():
        monkeypatch.setenv(variable, value)
    live = plan_machine({}, "option --{flag}")
    assert live.specs == ()
    assert "seen, not NVIDIA: no worker: 0000:13:00.0 AMD; 0000:23:00.0 AMD;" in live.table.to_text()
    assert not any("even share" in warning for warning in live.facts.topology.warnings)
    with pytest.raises(LaunchError, match=r"no GPU can be opened on \S+ \(seen, .*: 0000:13:00.0 AMD;.* NVML: "):
        read_node(Settings(), {})
    with pytest.raises(LaunchError, match=r"but 0 can be opened on n1 \(seen, .*: 0000:13:00.0 AMD;.* NVML: "):
        requested_gpus(Settings(gpus_per_node=4), live.facts.topology, {}, "n1")


def test_gpus_of_others_are_refused_by_name(folder: Path) -> None:
    assert "plan for some: hpcgpu topo --gpus sim:4 --from" in planned(folder, text_of("epyc-corona")).table.to_text()
    with pytest.raises(ConfigError, match=r"'0000:13:00.0', which is AMD Vega 20, and workers run on NVIDIA's; there"):
        planned(folder, text_of("epyc-corona"), gpus="0000:13:00.0")


@given(st.data(), st.sampled_from(sorted(TEXTS)), OPTIONS)
@settings(deadline=None, max_examples=80)
def test_a_file_is_planned_as_its_machine_with_the_same_grant(
    folder: Path, data: st.DataObject, name: str, wanted: dict[str, Any]
) -> None:
    """The grant is in the file: allowed_cpuset and allowed_nodeset, as lstopo --disallowed writes them in a job."""
    topology = topology_of(name)
    # a file that was cut has only what was granted
    there = CpuSet(pus(topology) & (topology.allowed or pus(topology)))
    allowed = CpuSet(data.draw(st.sets(st.sampled_from(sorted(there)), min_size=1)))
    numbers = sorted(n.os_index for n in topology.numa_nodes)
    nodes = CpuSet(data.draw(st.sets(st.sampled_from(numbers), min_size=1)))
    gpus = None if any(g.can_run for g in topology.gpus) else "sim:4x1GiB"
    found = planned(folder, granted(TEXTS[name], allowed, nodes), gpus=gpus, **wanted)
    own = [s.binding.gpus[0] for s in found.specs[:: wanted["workers_per_gpu"]]]
    live = plan_bindings(topology, own, allowed, Settings(**wanted).binding_rules, nodes)
    assert [b._replace(reasons=()) for b in bindings(found)] == [b._replace(reasons=()) for b in live]
    said = found.table.to_text()
    assert ("which are granted, of" in said) == (allowed < pus(topology) or nodes < CpuSet(numbers))


@pytest.mark.parametrize("pus_granted", ["0-7", "16-23,144-151", "64-127", "0,40,72,104"])
def test_file_cut_to_the_grant_is_planned_as_the_machine(folder: Path, pus_granted: str) -> None:
    """Without --disallowed objects without a granted PU lose all of theirs; GPUs are where their nodeset says."""
    topology, allowed = machine("turin-4gpu-nvml"), CpuSet.parse(pus_granted)
    cut = lstopo("-i", "-", "--if", "xml", "--restrict", mask(allowed), "--of", "xml", stdin=text_of("turin-4gpu-nvml"))
    found = planned(folder, cut)
    live = plan_bindings(topology, topology.gpus, allowed)
    for a, b in zip(bindings(found), live, strict=True):
        assert (a.cpuset, a.gpus[0].numa_node) == (b.cpuset, b.gpus[0].numa_node)
        assert [n.name for n in a.nics] == [n.name for n in b.nics]
        assert (a.memory_policy, a.memory_nodes) == (b.memory_policy, b.memory_nodes)
        assert not any("nobody knows" in reason for reason in a.reasons)


def test_pus_outside_the_grant_and_an_empty_grant_are_errors(folder: Path) -> None:
    text = granted(text_of("turin-4gpu-nvml"), range(8))
    with pytest.raises(ConfigError, match=r"names PUs 8-9; there are PUs 0-7"):
        planned(folder, text, cpuset="6-9")
    with pytest.raises(ParseError, match=r"machine.xml: none of its PUs 0-255 was granted \(allowed_cpuset: 400\)"):
        planned(folder, granted(text, [400]))


def workers_of(plan: MachinePlan) -> list[WorkerSpec]:
    """The workers without the numbers of the GPUs' memory, which is there twice, or which hwloc 1 does not tell."""
    return [replace(spec, gpu_memory_nodes=CpuSet()) for spec in plan.specs]


@given(st.sampled_from(FLAT), st.sampled_from([0.25, 1.2]), st.booleans(), OPTIONS)
@settings(deadline=None, max_examples=20)
def test_cores_are_counted_once_whatever_the_numa_nodes_say(
    folder: Path, name: str, share: float, latency: bool, wanted: dict[str, Any]
) -> None:
    gpus = None if any(g.can_run for g in topology_of(name).gpus) else "sim:4x1GiB"
    assume(wanted["memory_policy"] != "bind" or len(topology_of(name).numa_nodes) > 1)  # one is bound beside the other
    flat = planned(folder, with_flat_memory(TEXTS[name], share, latency), gpus=gpus, **wanted)
    assert workers_of(flat) == workers_of(planned(folder, TEXTS[name], gpus=gpus, **wanted))
    topology = flat.facts.topology
    assert topology.numa_nodes == topology_of(name).numa_nodes
    assert len(topology.other_memory) == 2 * len(topology_of(name).other_memory) + len(topology_of(name).numa_nodes)
    claimed = [pu for node in topology.numa_nodes for pu in node.cpuset]
    assert len(claimed) == len(set(claimed))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_machine_as_hwloc_writes_it_is_the_machine(name: str) -> None:
    """Also where hwloc 2.4 gives the memory of Grace Hopper's GPUs the PUs beside it, and no subtype."""
    topology, placed = DOCUMENTED[name], [(g.pci, g.numa_node) for g in DOCUMENTED[name].gpus]
    for subtypes in (True, False):
        found = read_file(as_xml(topology, subtypes=subtypes))
        assert (found.numa_nodes, found.cores) == (topology.numa_nodes, topology.cores)
        assert [(g.pci, g.numa_node) for g in found.gpus] == placed
        others = [(n.os_index, n.kind if subtypes else "other") for n in topology.other_memory]
        assert sorted((n.os_index, n.kind if subtypes else "other") for n in found.other_memory) == sorted(others)


@pytest.mark.parametrize("name", [n for n in FLAT if n in HWLOC and '<topology version="2' in TEXTS[n]])
def test_version_1_of_a_flat_machine_gives_the_same_plan(folder: Path, name: str) -> None:
    flat = with_flat_memory(text_of(name), 0.25, latency=False)
    old = lstopo("-i", "-", "--if", "xml", "--of", "xml", "--export-xml-flags", "v1", stdin=flat)
    found = planned(folder, old, gpus="sim:4x1GiB")
    assert found.facts.topology.source == "hwloc XML v1.0"
    assert workers_of(found) == workers_of(planned(folder, flat, gpus="sim:4x1GiB"))


def test_simulated_gpus_on_a_machine_whose_memory_nobody_tells(folder: Path) -> None:
    result = planned(folder, text_of("aws-p4de-24xl-topo"), gpus="sim:4")
    assert {s.memory_limit_bytes for s in result.specs} == {None}
    assert result.table.to_text().count("no memory limit: the file has no memory sizes") == 1
    given_limit = planned(folder, text_of("aws-p4de-24xl-topo"), gpus="sim:4", memory_limit=GIB)
    assert {s.memory_limit_bytes for s in given_limit.specs} == {GIB}


@pytest.mark.parametrize("name", MACHINES)
def test_only_known_uuids_are_in_the_variables(folder: Path, name: str) -> None:
    result = planned(folder, text_of(name))
    for spec in result.specs:
        known = all(g.uuid for g in spec.binding.gpus)
        assert dict(spec.env).get("CUDA_VISIBLE_DEVICES") == (
            ",".join(g.uuid for g in spec.binding.gpus) if known else None
        )
    told = "CUDA_VISIBLE_DEVICES will be set, too, to the GPUs' UUIDs, which are not known here"
    assert (told in result.table.to_text()) == any(not g.uuid for s in result.specs for g in s.binding.gpus)


# --- the text ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_expected_text(folder: Path, name: str) -> None:
    gpus = None if any(g.can_run for g in machine(name).gpus) else "sim:4x1GiB"
    text = replace(planned(folder, text_of(name), gpus=gpus), file="machine.xml").table.to_text(80)
    check_golden(TOPOLOGIES / "golden" / f"text-{name}.txt", text)


def test_what_was_not_looked_at_is_said(folder: Path) -> None:
    """NCCL's files tell rates and no states; hwloc's tell states and no rates."""
    said = planned(folder, text_of("nccl/oci-h100")).table.to_text()
    assert "  mlx5_0:1 mlx5_1:1, same switch, 180 Gb/s, state unknown" in said
    assert "IP interface" not in said.partition("\n\n")[2]  # the format has none, so nothing is said of a port's
    turin = planned(folder, text_of("turin-4gpu-nvml")).table.to_text()
    assert "mlx5_4:1 (ib1x), across packages, rate unknown\n" in turin


def test_a_plan_that_is_poor_says_so(folder: Path) -> None:
    one_port = planned(folder, text_of("turin-4gpu-nvml"), nics=["mlx5_4"]).table.to_text()
    assert "warning: all 4 workers on GPUs use one port, mlx5_4; mlx5_0, mlx5_3, mlx5_5 are not used" in one_port
    cut = planned(folder, granted(text_of("turin-4gpu-nvml"), range(8))).table.to_text()
    assert "warning: 4 of 4 workers on GPUs (worker-0, worker-1, worker-2, worker-3) have no core on" in cut
    few = planned(folder, granted(text_of("turin-4gpu-nvml"), [0, 1])).table.to_text()
    assert "warning: all 4 workers share their cores: there are fewer than workers" in few
    assert "warning" not in planned(folder, text_of("coral-lassen")).table.to_text()


def test_reserved_cores_are_named(folder: Path) -> None:
    result = planned(folder, text_of("turin-4gpu-nvml"), reserved_cores=4)
    free = pus(machine("turin-4gpu-nvml")).difference(*(b.cpuset for b in bindings(result)))
    assert f"no worker's: 4 cores, PUs {CpuSet(free)}, with reserved_cores=4\n" in result.table.to_text()
    assert {len(b.cpuset) for b in bindings(result)} == {62}
    assert (result.described()["allowed_cpuset"], result.described()["idle_cpuset"]) == ("0-255", str(CpuSet(free)))
    local = planned(folder, text_of("turin-4gpu-nvml"), cores="local").table.to_text()
    assert "no worker's: 64 cores, PUs 0-15,48-95,128-143,176-223\n" in local


def test_a_plan_leaves_out_the_memory_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = DOCUMENTED["daint-gh200"]
    numbers = [n.os_index for n in topology.other_memory]
    monkeypatch.setattr(host_memory, "memory_limit", lambda nodes: HostMemory((100 - len(nodes)) << 30, "this"))
    facts = facts_of("n1", topology, topology.gpus[:1], {})
    assert len(numbers) == 4 and facts.memory.nbytes == 96 << 30
    ((_, spec),) = plan_workers(Settings(device_memory_limit=Limit(1 << 30)), facts, NodeLayout(0, (0,), ((0,),)))
    assert spec.gpu_memory_nodes == CpuSet(numbers)

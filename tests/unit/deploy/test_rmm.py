"""RMM and cuDF: which options go together, what a worker's plan is on its own GPU, what it says without RMM."""

import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from programs import python

from hpcgpu.config.layers import read_settings
from hpcgpu.deploy.processes import rmm, worker
from hpcgpu.deploy.settings import read
from hpcgpu.errors import ConfigError
from hpcgpu.model import Binding, CpuSet, Gpu, HostMemory, NodeLayout, NumaNode, Topology, WorkerSpec
from hpcgpu.model.worker import Rapids
from hpcgpu.plan.binding.workers import NodeFacts, plan_rapids, plan_workers
from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices.allocation_failure import evict
from hpcgpu.spill.devices.libraries import CudfObjects, is_cudf, spills_itself

GIB = 1 << 30
GPU = Gpu(uuid="GPU-1", pci="0000:01:00.0", memory_bytes=80 * GIB, numa_node=0)
# Stands for RMM's module: without a driver the real one has no current resource to ask for.
FAKE_RMM = """
class mr:
    current = "cuda"
    get_current_device_resource = staticmethod(lambda: mr.current)
    FailureCallbackResourceAdaptor = staticmethod(lambda upstream, callback: (upstream, callback(1)))
    @staticmethod
    def set_current_device_resource(resource): mr.current = resource
"""
OPEN = """
import sys
from hpcgpu.deploy.processes import worker
sys.path.insert(0, sys.argv[1])  # distributed imports RMM where it finds it; here user code does
from hpcgpu.model import Binding, CpuSet, Gpu, WorkerSpec
gpu = Gpu(uuid="GPU-1", pci="0000:01:00.0", memory_bytes=1 << 30, numa_node=0)
worker.open_device(WorkerSpec(name="n1-0", binding=Binding(CpuSet([0]), (gpu,))))
print("rmm" in sys.modules)
import rmm
print(rmm.mr.current)
import cupy
print(cupy.cuda.allocator.func.__name__, cupy.cuda.allocator.args)
"""
FAKE_CUPY = """
class cuda:
    allocator = "pool"
    get_allocator = staticmethod(lambda: cuda.allocator)
    @staticmethod
    def set_allocator(allocator): cuda.allocator = allocator
"""


def planned(given: dict[str, object], device_memory_bytes: int = 80 * GIB) -> Rapids | None:
    return plan_rapids(read_settings(given), "n1-0", device_memory_bytes)


def resources(**given: object) -> list[tuple[str, dict[str, object]]]:
    plan = planned(given)
    assert plan is not None
    return [(name, dict(arguments)) for name, arguments in plan.resources]


def test_next_owner_of_rmms_resource_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = ModuleType("rmm")
    module.__spec__ = ModuleSpec("rmm", None)
    exec(FAKE_RMM, module.__dict__)
    monkeypatch.setitem(sys.modules, "rmm", module)
    mr = module.mr
    rmm.set_up_rmm(Rapids(needs=(("rmm", "rmm_async=True"),), resources=()))
    assert not caplog.records
    for _ in range(2):
        mr.set_current_device_resource(SimpleNamespace())
    assert mr.current == SimpleNamespace()
    (record,) = caplog.records
    assert "replaced by SimpleNamespace: the options of RMM no longer hold" in record.getMessage()


def test_each_plan() -> None:
    """Classes of rmm.mr 26.10 with their arguments, the lowest first."""
    assert planned({}) is None
    assert planned({"rmm_pool_size": 0, "rmm_async": False, "rmm_allocator_external_lib_list": []}) is None
    cuda, managed = ("CudaMemoryResource", {}), ("ManagedMemoryResource", {})
    pool = ("PoolMemoryResource", {"initial_pool_size": 40 * GIB})
    assert resources(rmm_pool_size=0.5) == [cuda, pool]
    assert resources(rmm_pool_size="40GiB", rmm_managed_memory=True) == [managed, pool]
    assert resources(rmm_managed_memory=True) == [managed]
    more = ("PoolMemoryResource", {"initial_pool_size": 100 * GIB})  # than the GPU has
    assert resources(rmm_pool_size="100GiB", rmm_managed_memory=True) == [managed, more]
    both = resources(rmm_pool_size="1GiB", rmm_maximum_pool_size=0.9)
    assert both[1][1] == {"initial_pool_size": GIB, "maximum_pool_size": 72 * GIB}
    assert resources(rmm_async=True) == [("CudaAsyncMemoryResource", {})]
    assert resources(rmm_async=True, rmm_pool_size="1GiB", rmm_release_threshold=0.25, rmm_maximum_pool_size=0.5) == [
        ("CudaAsyncMemoryResource", {"initial_pool_size": GIB, "release_threshold": 20 * GIB}),
        ("LimitingResourceAdaptor", {"allocation_limit": 40 * GIB}),
    ]
    log = ("LoggingResourceAdaptor", {"log_file_name": "/logs/rmm_log_n1-0.txt"})
    tracks, logged = ("TrackingResourceAdaptor", {}), {"rmm_log_directory": "/logs/", "rmm_track_allocations": True}
    assert resources(**logged, rmm_pool_size=0.5) == [cuda, pool, log, tracks]
    assert resources(rmm_track_allocations=True) == [cuda, tracks]
    assert resources(rmm_allocator_external_lib_list="cupy") == []  # RMM's own choice


@given(st.floats(1e-3, 1.0), st.integers(GIB, 200 * GIB))
def test_a_fraction_is_of_the_workers_own_gpu(fraction: float, size: int) -> None:
    plan = planned({"rmm_pool_size": fraction}, size)
    assert plan is not None
    pool = dict(plan.resources[1][1])["initial_pool_size"]
    assert isinstance(pool, int)
    assert pool % 256 == 0
    assert fraction * size - 256 <= pool <= fraction * size


@pytest.mark.parametrize(
    ("given", "device_memory_bytes", "says"),
    [
        ({"rmm_pool_size": 0.5}, 0, "rmm_pool_size='30GB'"),
        ({"rmm_pool_size": "81GiB"}, 80 * GIB, "has 80"),
        ({"rmm_pool_size": 0.5, "rmm_maximum_pool_size": "10GiB"}, 80 * GIB, "is less than rmm_pool_size"),
    ],
)
def test_rmm_sizes_beyond_the_gpu_are_refused(given: dict[str, object], device_memory_bytes: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        planned(given, device_memory_bytes)


def test_libraries_as_dask_cuda_takes_them() -> None:
    for libraries in ("cupy, torch", ["cupy", "torch"], ["cupy,torch", "cupy"]):
        plan = planned({"rmm_allocator_external_lib_list": libraries})
        assert plan is not None
        assert plan.libraries == ("cupy", "torch")
        assert [module for module, _ in plan.needs] == ["rmm", "cupy", "torch"]


def specs_of(**given: object) -> list[WorkerSpec]:
    everything = CpuSet(range(4))
    topology = Topology((NumaNode(0, everything, 64 * GIB, 0),), tuple(CpuSet([i]) for i in range(4)), (GPU,))
    facts = {"topology": topology, "gpus": (GPU,), "allowed": everything, "allowed_nodes": CpuSet([0])}
    node = NodeFacts(name="n1", memory=HostMemory(64 * GIB, ""), environ={}, scratch="/scratch", **facts)
    return [spec for _, spec in plan_workers(read_settings(given), node, NodeLayout(0, (0,), ((0, 1),)))]


def test_workers_carry_their_own_plan() -> None:
    specs = specs_of(workers_per_gpu=2, rmm_pool_size=0.5, rmm_log_directory="logs")
    arguments = [[dict(a) for _, a in spec.rapids.resources] for spec in specs if spec.rapids]
    assert [a[1]["initial_pool_size"] for a in arguments] == [20 * GIB, 20 * GIB]
    assert [a[2]["log_file_name"] for a in arguments] == ["logs/rmm_log_n1-0.txt", "logs/rmm_log_n1-1.txt"]
    assert specs_of(workers_per_gpu=2)[0].rapids is None
    assert specs_of(workers_per_gpu=2, gpus="sim:1", rmm_pool_size="100GiB")[0].rapids is None


def test_sizes_for_rmm_have_no_effect_on_simulated_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    """So a script for real GPUs can be tried; specs_of has shown that its workers get no RMM."""
    read({"gpus": "sim:1", "rmm_pool_size": "26GB"}, "keyword {name}")
    assert "simulated GPUs have neither RMM nor cuDF; without effect: rmm_pool_size" in capfd.readouterr().err


def test_cudf_is_told_to_spill_before_it_is_imported() -> None:
    env = dict(specs_of(workers_per_gpu=2, enable_cudf_spill=True, cudf_spill_stats=1)[0].env)
    assert (env["CUDF_SPILL"], env["CUDF_SPILL_STATS"]) == ("on", "1")
    assert not {"CUDF_SPILL", "CUDF_SPILL_STATS"} & dict(specs_of(workers_per_gpu=2)[0].env).keys()
    mine = specs_of(workers_per_gpu=2, enable_cudf_spill=True, env={"CUDF_SPILL_STATS": "2"})[0]
    assert dict(mine.env)["CUDF_SPILL_STATS"] == "2"


@pytest.mark.parametrize(
    ("given", "module"),
    [({"rmm_pool_size": 0.5}, "rmm"), ({"rmm_async": True}, "rmm"), ({"enable_cudf_spill": True}, "cudf")],
)
def test_missing_library_names_the_extra(
    given: dict[str, object], module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])  # also where both are installed for the tests with a GPU
    monkeypatch.delitem(sys.modules, module, raising=False)
    wanted = read_settings(given, given_from="the cluster's keywords")
    spec = WorkerSpec(name="n1-0", binding=Binding(CpuSet([0]), (GPU,)), rapids=plan_rapids(wanted, "n1-0", 80 * GIB))
    with pytest.raises(ConfigError, match=module) as caught:
        worker.open_device(spec)
    (option,) = given
    for part in (option, "the cluster's keywords", "pip install '.[rapids]'"):
        assert part in str(caught.value)
    worker.open_device(replace(spec, rapids=None))  # who asks for nothing needs nothing


class Series:
    """Slices of 10 bytes of device memory, as columns without masks; cuDF's own serialization is in ``tests/cupy``."""

    __module__ = "cudf.core.series"
    memory_usage = host_serialize = None  # a value has both

    def __init__(self, *owners: SimpleNamespace) -> None:
        spans = [SimpleNamespace(owner=owner, nbytes=10) for owner in owners]
        self._columns = [SimpleNamespace(data=lambda s=s: s, null_mask=lambda: None, children=tuple) for s in spans]


def test_cudf_is_known_by_type() -> None:
    assert is_cudf(Series())
    assert not is_cudf(SimpleNamespace())
    assert not is_cudf(np.zeros(2))
    assert not spills_itself()  # nothing here has imported it


def test_cudf_objects_count_by_their_allocations() -> None:
    a, b = SimpleNamespace(size=1000), SimpleNamespace(size=24)
    count = CudfObjects(None).buffer_of
    assert count(Series(a, b))[1] == 1024
    assert count(Series(a, a)) == count(Series(a))
    assert count(Series(a))[1] == 1000
    assert count(Series(a))[0] != count(Series(b))[0]


def opened(folder: Path, rmm: str) -> subprocess.CompletedProcess[str]:
    """Open a worker's device in a process that finds this RMM."""
    (folder / "rmm.py").write_text(rmm)
    (folder / "cupy.py").write_text(FAKE_CUPY)
    return python(OPEN, folder, check=True)


def test_rmm_and_cupy_evict_as_soon_as_user_code_imports_them(tmp_path: Path) -> None:
    lines = opened(tmp_path, FAKE_RMM).stdout.split("\n")
    assert lines[:3] == ["False", "('cuda', False)", "_allocate_or_evict ('pool',)"]


def test_failing_rmm_without_an_option_stops_no_worker(tmp_path: Path) -> None:
    failing = (
        FAKE_RMM.replace("lambda: mr.current", "lambda: mr.no_driver()")
        + """
    @staticmethod
    def no_driver(): raise RuntimeError("cudaErrorInsufficientDriver")
"""
    )
    done = opened(tmp_path, failing)
    assert done.stdout.split("\n")[:2] == ["False", "cuda"]
    assert "RMM is installed but fails on this GPU" in done.stderr
    assert "cudaErrorInsufficientDriver" in done.stderr


def test_what_makes_room_for_rmm_says_whether_anything_moved(tmp_path: Path) -> None:
    """RMM asks as long as the answer is yes."""
    gpu = SimGpu(100_000)
    assert not evict(0, 1)
    store = GpuSpillBuffer(1.0, None, str(tmp_path))
    try:
        for i in range(4):
            store[i] = gpu.asarray(np.full(9_000, i, "u1"))
        answers = []
        while evict(0, 10_000):
            answers.append(store.tiers["device"])
        assert answers == [18_000, 0]
        assert store.rescues == 2
    finally:
        store.close()
    assert not evict(0, 1)

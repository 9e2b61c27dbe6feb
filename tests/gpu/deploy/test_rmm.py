"""RMM, cuDF and the store, where they are."""

from typing import Any

import numpy as np
import pytest

from hpcgpu.config.layers import read_settings
from hpcgpu.deploy.processes import worker
from hpcgpu.model import Binding, CpuSet, Gpu, WorkerSpec
from hpcgpu.model.worker import Rapids
from hpcgpu.plan.binding.workers import plan_rapids
from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.libraries import CudfObjects, is_cudf

GIB = 1 << 30
GPU = Gpu(uuid="GPU-1", pci="0000:01:00.0", memory_bytes=80 * GIB, numa_node=0)


def planned(given: dict[str, object], device_memory_bytes: int = 80 * GIB) -> Rapids | None:
    return plan_rapids(read_settings(given), "n1-0", device_memory_bytes)


@pytest.fixture
def rmm() -> Any:
    module = pytest.importorskip("rmm", reason="no RMM here")
    try:
        module.mr.get_current_device_resource()
    except RuntimeError as why:
        pytest.skip(f"no GPU here: {why}")
    return module


@pytest.mark.parametrize(
    "given",
    [
        {"rmm_pool_size": "64MiB", "rmm_maximum_pool_size": "1GiB", "rmm_track_allocations": True},
        {"rmm_async": True, "rmm_release_threshold": "64MiB", "rmm_maximum_pool_size": "1GiB"},
        {"rmm_managed_memory": True},
    ],
)
def test_rmm_allocates_as_planned(rmm: Any, given: dict[str, object], tmp_path: object) -> None:

    from hpcgpu.deploy.processes.rmm import set_up_rmm

    plan = planned({**given, "rmm_log_directory": f"{tmp_path}/logs"}, 8 * GIB)
    assert plan is not None
    before = rmm.mr.get_current_device_resource()
    try:
        set_up_rmm(plan)
        stack = [rmm.mr.get_current_device_resource()]
        while hasattr(stack[0], "upstream_mr"):
            stack.insert(0, stack[0].upstream_mr)
        names = [type(resource).__name__ for resource in stack]
        assert names.count("FailureCallbackResourceAdaptor") == 1
        assert [n for n in names if n != "FailureCallbackResourceAdaptor"] == [n for n, _ in plan.resources]
        assert rmm.DeviceBuffer(size=1 << 20).size == 1 << 20
    finally:
        rmm.mr.set_current_device_resource(before)


def test_rmm_evicts_without_any_option_as_soon_as_it_is_imported(rmm: Any) -> None:
    before = rmm.mr.get_current_device_resource()
    try:
        worker.open_device(WorkerSpec(name="n1-0", binding=Binding(CpuSet([0]), (GPU,))))
        resource = rmm.mr.get_current_device_resource()
        assert type(resource).__name__ == "FailureCallbackResourceAdaptor"
        assert rmm.DeviceBuffer(size=1 << 20).size == 1 << 20
    finally:
        rmm.mr.set_current_device_resource(before)


def test_a_data_frame_goes_down_and_comes_back() -> None:
    cudf = pytest.importorskip("cudf", reason="no cuDF here")
    frame = cudf.DataFrame({"a": range(1000), "b": ["x", None] * 500})
    objects = CudfObjects(CudaDevice.current(0))
    assert is_cudf(frame)
    assert objects.buffer_of(frame) == objects.buffer_of(frame.copy(deep=False))
    assert objects.buffer_of(frame)[1] >= 8000
    root, views = objects.pack([frame, frame[10:20]], lambda nbytes: np.empty(nbytes, np.uint8))
    back = objects.unpack(root, views)
    assert [b.to_pandas().equals(f.to_pandas()) for b, f in zip(back, (frame, frame[10:20]), strict=True)] == [True] * 2

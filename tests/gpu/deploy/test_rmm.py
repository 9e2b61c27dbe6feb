"""RMM, cuDF and the store, where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcgpu.config.layers import read_settings
from hpcgpu.deploy.processes import devices
from hpcgpu.model import Binding, CpuSet, Gpu, WorkerSpec
from hpcgpu.model.worker import Rapids
from hpcgpu.plan.binding.rapids import plan_rapids
from hpcgpu.sim import SimGpu
from hpcgpu.spill import GpuSpillBuffer
from hpcgpu.spill.devices.cuda import CudaDevice
from hpcgpu.spill.devices.cudf import CudfObjects, is_cudf

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

    from hpcgpu.deploy.processes.devices import set_up_rmm

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
        devices.open_device(WorkerSpec(name="n1-0", binding=Binding(CpuSet([0]), (GPU,))))
        resource = rmm.mr.get_current_device_resource()
        assert type(resource).__name__ == "FailureCallbackResourceAdaptor"
        assert rmm.DeviceBuffer(size=1 << 20).size == 1 << 20
    finally:
        rmm.mr.set_current_device_resource(before)


def test_an_allocation_of_rmm_that_fails_makes_the_store_evict(tmp_path: Path) -> None:
    """RMM's own adaptor over an allocator that has as much memory as the simulated GPU has left; no driver is asked."""
    rmm = pytest.importorskip("rmm", reason="no RMM here")

    from hpcgpu.deploy.processes.devices import evicting

    gpu = SimGpu(100_000)
    room = np.empty(100_000, "u1")
    tries: list[int] = []

    def allocate(nbytes: int, stream: object) -> int:
        tries.append(nbytes)
        if gpu.used_bytes + nbytes > gpu.memory_bytes:
            raise MemoryError("full")
        return int(room.ctypes.data)

    resource = evicting(rmm.mr.CallbackMemoryResource(allocate, lambda pointer, nbytes, stream: None))
    with pytest.raises(MemoryError):
        resource.allocate(200_000)  # no store yet
    store = GpuSpillBuffer(1.0, None, str(tmp_path))
    try:
        for i in range(10):
            store[i] = gpu.asarray(np.full(9_000, i, "u1"))
        tries.clear()
        assert resource.allocate(51_200) == room.ctypes.data
        assert tries == [51_200, 51_200]  # once more, and all the room was made at once
        assert 0 < store.tiers["device"] <= 48_800
        with pytest.raises(MemoryError, match="full"):
            resource.allocate(200_000)  # more than there is: an end, with RMM's own error
        assert store.tiers["device"] == 0
        assert [int(store[i].get()[0]) for i in range(10)] == list(range(10))
    finally:
        store.close()


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

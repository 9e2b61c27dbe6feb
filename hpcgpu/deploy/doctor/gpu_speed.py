"""Measure CUDA's start and copies, in a process: ``python -m hpcgpu.deploy.doctor.gpu_speed NEAR FAR``.

NEAR and FAR are NUMA nodes; without them the kernel chooses. It prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time

from hpcgpu.errors import HpcGpuError
from hpcgpu.host import bind
from hpcgpu.host.cgroup import granted_cpus
from hpcgpu.model import Binding, CpuSet
from hpcgpu.spill.devices.copies import DriverCopies

_BYTES = 64 << 20
_TIMES = 4


def measure(memory_nodes: list[int]) -> dict[str, float]:
    """Measure the seconds until CUDA has a context, its version, and bytes/s of copies from these NUMA nodes.

    Raises HpcGpuError if the driver fails, ImportError or RuntimeError without cuda.bindings or a driver, MemoryError
    if the GPU has no room.
    """
    began_s = time.perf_counter()
    copies = DriverCopies(0)
    results = {"init_s": time.perf_counter() - began_s, "cuda": copies.call("cuDriverGetVersion")}
    for name, node in zip(("near_bytes_per_s", "far_bytes_per_s"), memory_nodes, strict=False):
        bind.bind(Binding(granted_cpus(), (), memory_policy="bind", memory_nodes=CpuSet([node])))
        results[name] = _to_device(copies)
    return results


def _to_device(copies: DriverCopies) -> float:
    """Measure bytes/s of the fastest of a few copies to the device."""
    with copies.context():
        host = int(copies.call("cuMemHostAlloc", _BYTES, copies.driver.CU_MEMHOSTALLOC_PORTABLE))
        device = copies.call("cuMemAlloc", _BYTES)
        took_s = []
        for _ in range(_TIMES):
            began_s = time.perf_counter()
            copies.call("cuMemcpyHtoDAsync", device, host, _BYTES, copies.up_stream)
            copies.call("cuStreamSynchronize", copies.up_stream)
            took_s.append(time.perf_counter() - began_s)
        copies.call("cuMemFree", device)
        copies.call("cuMemFreeHost", host)
    return _BYTES / min(took_s)


if __name__ == "__main__":
    try:
        print(json.dumps(measure([int(node) for node in sys.argv[1:]])))
    except (HpcGpuError, ImportError, MemoryError, RuntimeError) as error:
        sys.exit(str(error))

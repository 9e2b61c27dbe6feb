"""A Dask cluster on the GPUs of a batch job. Names are loaded on first touch (PEP 562)."""

import sys

# RHEL 8's Python 3.6 must read as far as this, which "from __future__ import annotations" would prevent.
if sys.version_info < (3, 11):  # noqa: UP036
    _older = "this is %d.%d.%d, %s" % (*sys.version_info[:3], sys.executable)  # noqa: UP031
    raise (SystemExit if sys.argv[:1] == ["-m"] else ImportError)("hpcgpu needs Python 3.11 or newer; " + _older)
__version__ = "0.1.0a2"
_HOMES = {
    **dict.fromkeys(("HpcGpuError", "ConfigError", "SubmitError", "JobError", "LaunchError"), "hpcgpu.errors"),
    **dict.fromkeys(("TrustError", "BindingError", "ParseError", "SpillError", "CheckpointError"), "hpcgpu.errors"),
    "Checkpoint": "hpcgpu.checkpoint.checkpoint",
    "GPURunner": "hpcgpu.deploy.start",
    "GPUWorker": "hpcgpu.deploy.processes.gpu_worker",
    **dict.fromkeys(("LocalGPUCluster", "PBSGPUCluster", "SLURMGPUCluster"), "hpcgpu.deploy.cluster.classes"),
    **dict.fromkeys(("asproxy", "unproxy"), "hpcgpu.spill.proxies"),
    **dict.fromkeys(("bindings", "memory", "trim_memory"), "hpcgpu.deploy.dashboard.worker_requests"),
}
# Names that users of other packages try.
_HERE = {
    **{"SLURMCluster": "SLURMGPUCluster", "PBSCluster": "PBSGPUCluster", "SLURMRunner": "GPURunner"},
    **dict.fromkeys(("LocalCluster", "LocalCUDACluster"), "LocalGPUCluster"),
    **dict.fromkeys(("CUDAWorker", "Worker", "Nanny"), "GPUWorker"),
}
__all__ = ["__version__", *_HOMES]  # noqa: PLE0604 - the names are strings of a literal dict


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module as load  # hpcgpu bind does without

        return getattr(load(_HOMES[name]), name)
    if name in _HERE:  # "from hpcgpu import" would drop the text of an AttributeError
        raise ImportError(f"hpcgpu has no {name}; its name here is {_HERE[name]}: from hpcgpu import {_HERE[name]}")
    raise AttributeError(f"module 'hpcgpu' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)

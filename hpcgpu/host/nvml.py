"""The NVIDIA GPUs and MIG slices of this machine: NVML's facts, joined to its topology; those granted to this process.

NVML makes no CUDA context, and sees the GPUs that the device cgroup lets this process open.

Together: NVML numbers GPUs by itself, so whoever joins or selects them needs its facts.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

from hpcgpu.errors import ConfigError
from hpcgpu.light_typing import TYPE_CHECKING, NamedTuple
from hpcgpu.model.allocation import CpuSet
from hpcgpu.model.topology import Gpu, Topology
from hpcgpu.topology import pci
from hpcgpu.units import format_bytes

if TYPE_CHECKING:
    from typing import Any

# "NVIDIA A100-SXM4-40GB MIG 1g.5gb"; 450, the first driver with MIG, gives slices the GPU's name alone.
_PROFILE = " MIG "
_EIGHTHS = 8  # the parts that MIG divides a GPU's memory into
# What the codes of nvmlInit mean for people: CUDA may work without NVML, but the workers are placed by it.
_ADVICE = {
    9: "the driver is not loaded on this node",
    12: "libnvidia-ml.so.1 is not on this machine; let the container have it: apptainer --nv, or "
    "NVIDIA_DRIVER_CAPABILITIES=all",
    18: "the driver was updated and the old one is still loaded: the node must be started anew",
}
# The driver itself takes less of a GPU's memory.
_IN_USE_PART = 0.1
# Where MPS lets several processes share a GPU that is for one process.
_MPS_FOLDER = "/tmp/nvidia-mps"  # NVIDIA's default
_opened = 0  # by the process of this id


class NvmlFacts(NamedTuple):
    """NVML's facts: GPUs by PCI address, divided ones as their slices, and the NUMA nodes that are GPU memory."""

    gpus: tuple[Gpu, ...] = ()
    warnings: tuple[str, ...] = ()
    memory_nodes: CpuSet = CpuSet()
    trouble: str = ""


def read() -> NvmlFacts:
    """Return NVML's facts; without a driver only the reason."""
    if "pynvml" not in sys.modules and not _has_library():
        return NvmlFacts(trouble=f"NVML: NVML Shared Library Not Found ({_ADVICE[12]})")
    import pynvml

    gpus: list[Gpu] = []
    warnings: list[str] = []
    nodes: set[int] = set()
    try:
        _open(pynvml)
        _read_each(pynvml, gpus, warnings, nodes)
    except pynvml.NVMLError as e:
        advice = _ADVICE.get(e.value)
        return NvmlFacts(trouble=f"NVML: {e}{f' ({advice})' if advice else ''}")
    return NvmlFacts(tuple(sorted(gpus, key=lambda g: g.pci)), tuple(warnings), CpuSet(nodes))


def _read_each(nvml: Any, gpus: list[Gpu], warnings: list[str], nodes: set[int]) -> None:
    """Add the facts of each GPU."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpu = Gpu(
                pci.address(pci.printable(nvml.nvmlDeviceGetPciInfo(handle).busId)),
                pci.printable(nvml.nvmlDeviceGetUUID(handle)),
                pci.printable(nvml.nvmlDeviceGetName(handle)),
                memory_bytes=_memory_bytes(nvml, handle),
                compute_mode=_compute_mode(nvml, handle),
            )
            divided = False
            try:
                divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
            except nvml.NVMLError:  # "not supported" before Ampere
                pass
            devices = _slices(nvml, handle, gpu) if divided else [gpu]
            used = 0 if divided or not gpu.memory_bytes else int(nvml.nvmlDeviceGetMemoryInfo(handle).used)
        except nvml.NVMLError as e:
            warnings.append(f"NVML says of its GPU {index}: {e}")
            continue
        gpus += devices
        if used > gpu.memory_bytes * _IN_USE_PART:
            warnings.append(
                f"{format_bytes(used)} of the GPU at {gpu.pci} ({format_bytes(gpu.memory_bytes)}) are in use by other "
                "processes, which nvidia-smi lists: limits of workers are fractions of the whole"
            )
        # Old drivers and old nvidia-ml-py lack the call; GPUs with plain PCI memory say "not supported".
        try:
            nodes |= {node} if (node := int(nvml.nvmlDeviceGetNumaNodeId(handle))) >= 0 else set()
        except (nvml.NVMLError, AttributeError):
            pass
        if not devices:
            warnings.append(
                f"the GPU at {gpu.pci} is divided into MIG slices, but this process can open no slice: "
                "nvidia-smi -L lists the slices"
            )


def driver() -> str:
    """Return the version of the driver; "" without one."""
    import pynvml

    try:
        _open(pynvml)
        return pci.printable(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        pass
    return ""


def nvlink_domain() -> str:
    """Return the UUID of the NVLink domain of several nodes (NVL72) that has GPUs of this one; "" for none."""
    import pynvml

    try:
        _open(pynvml)
        for index in range(pynvml.nvmlDeviceGetCount()):
            fabric = pynvml.c_nvmlGpuFabricInfoV_t()
            pynvml.nvmlDeviceGetGpuFabricInfoV(pynvml.nvmlDeviceGetHandleByIndex(index), ctypes.byref(fabric))
            # the NVLink switches of one node are a fabric without a UUID, as NCCL reads it (src/mnnvl.cc)
            if fabric.state == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED and any(fabric.clusterUuid):
                return bytes(fabric.clusterUuid).hex()
    except (pynvml.NVMLError, AttributeError):  # old drivers and nvidia-ml-py lack it, or its fields
        pass
    return ""


def energy(address: str) -> tuple[int | None, int | None]:
    """Return the mJ that the GPU at a PCI address used since its driver was loaded; without a counter its mW now."""
    if "pynvml" not in sys.modules and not _has_library():
        return None, None
    import pynvml

    try:
        _open(pynvml)
        handle = pynvml.nvmlDeviceGetHandleByPciBusId(address.encode())
        try:
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)), None
        except pynvml.NVMLError_NotSupported:  # before Volta
            return None, int(pynvml.nvmlDeviceGetPowerUsage(handle))
    except pynvml.NVMLError:
        pass
    return None, None


def _has_library() -> bool:
    """Return whether pynvml could load NVML; its own import takes 25 CPU ms (nvidia-ml-py 13)."""
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _open(nvml: Any) -> None:  # a module without types
    """Initialize NVML once in a process: without persistence mode that may take seconds, which all of a node share."""
    global _opened
    if _opened != os.getpid():  # a forked process has none of its parent's
        nvml.nvmlInit()
        _opened = os.getpid()


def _compute_mode(nvml: Any, handle: Any) -> str:
    """Return the mode that keeps processes from a GPU; empty: none, or MPS lets them share it."""
    try:
        mode = nvml.nvmlDeviceGetComputeMode(handle)
        if mode == nvml.NVML_COMPUTEMODE_PROHIBITED:
            return "PROHIBITED"
        if mode == nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS:
            shared = os.path.exists(os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _MPS_FOLDER)
            return "" if shared else "EXCLUSIVE_PROCESS"
    except nvml.NVMLError:
        pass
    return ""


def _memory_bytes(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:  # GPUs that share the host's memory have no size of their own
        return 0


def _slices(nvml: Any, handle: Any, gpu: Gpu) -> list[Gpu]:
    out = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # "Not found": the numbers have gaps. "No permission": a slice that the cgroup keeps from this process.
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            uuid, size = pci.printable(nvml.nvmlDeviceGetUUID(part)), _memory_bytes(nvml, part)
            out.append(gpu._replace(uuid=uuid, memory_bytes=size, mig=_profile(nvml, part, gpu)))
        except nvml.NVMLError:
            pass
    return out


def _profile(nvml: Any, part: Any, gpu: Gpu) -> str:
    """Return the name of a slice's profile, such as ``1g.10gb`` or ``1c.2g.10gb``."""
    _, mig, profile = pci.printable(nvml.nvmlDeviceGetName(part)).rpartition(_PROFILE)
    if mig and " " not in profile:
        return profile
    facts = nvml.nvmlDeviceGetAttributes(part)
    compute, slices = facts.computeInstanceSliceCount, facts.gpuInstanceSliceCount
    # As NVIDIA's go-nvlib 0.7 counts (GetMigMemorySizeInGB): a 1g.5gb has 4864 MiB, an eighth of a GPU's 40 GB.
    import math

    size_gib = facts.memorySizeMB / 1024
    if gpu.memory_bytes:
        whole_gib = gpu.memory_bytes / 2**30
        size_gib = math.ceil(size_gib / whole_gib * _EIGHTHS) / _EIGHTHS * math.ceil(whole_gib)
    return f"{'' if compute == slices else f'{compute}c.'}{slices}g.{math.floor(size_gib + 0.5)}gb"


def join_topology(topology: Topology, gpus: Sequence[Gpu], memory_nodes: CpuSet = CpuSet()) -> Topology:  # frozen
    """Return the topology with NVML's facts about the GPU at the same PCI address.

    Slices replace the GPU that they are parts of, and have its locality. A GPU that only NVML shows is added without
    locality. ``memory_nodes`` are a GPU's own memory: not for a worker's heap.
    """
    facts: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        facts.setdefault(gpu.pci, []).append(gpu)
    out: list[Gpu] = []
    for gpu in topology.gpus:
        out += [
            f._replace(vendor=gpu.vendor, numa_node=gpu.numa_node, numa_nodes=gpu.numa_nodes)
            for f in facts.pop(gpu.pci, ())
        ] or [gpu]
    out += [gpu for alone in facts.values() for gpu in alone]
    merged = topology._replace(gpus=tuple(sorted(out, key=lambda g: g.pci)))
    return set_aside(merged, memory_nodes, "gpu")


def set_aside(topology: Topology, nodes: CpuSet, kind: str) -> Topology:
    """Return the topology with these NUMA nodes as other memory of this kind.

    If one NUMA node is left, all devices are local to it: they seemed to be local to two.
    """
    numa = tuple(n for n in topology.numa_nodes if n.os_index not in nodes)
    other = [n._replace(kind=kind) for n in (*topology.numa_nodes, *topology.other_memory) if n.os_index in nodes]
    other += [n for n in topology.other_memory if n.os_index not in nodes]
    topology = topology._replace(other_memory=tuple(sorted(other, key=lambda n: n.os_index)))
    if len(numa) == len(topology.numa_nodes):
        return topology
    only = numa[0].os_index if len(numa) == 1 else None
    return topology._replace(
        numa_nodes=numa,
        gpus=tuple(g if g.numa_node is not None else g._replace(numa_node=only) for g in topology.gpus),
        nics=tuple(n if n.numa_node is not None else n._replace(numa_node=only) for n in topology.nics),
    )


def visible_gpus(gpus: Sequence[Gpu], text: str | None) -> tuple[Gpu, ...]:
    """Return NVML's GPUs and slices that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; ConfigError if ambiguous.

    ``text`` has indices, which count GPUs by PCI address (the index of a divided GPU means all of its slices), and
    UUIDs GPU-… and MIG-… or prefixes of them. None: not set, all GPUs. "": no GPU. CUDA stops at the first token that
    names no device.
    """
    devices = sorted((g for g in gpus if g.uuid), key=lambda g: g.pci)
    if text is None:
        return tuple(devices)
    out: list[Gpu] = []
    for token in (t.strip() for t in text.split(",")):
        named = _named(devices, token, text)
        if not named:
            break
        if twice := next((g for g in named if g in out), None):
            raise ConfigError(f"CUDA_VISIBLE_DEVICES={text!r} names {twice.uuid} twice; name each GPU or slice once")
        out += named
    return tuple(out)


def _named(devices: Sequence[Gpu], token: str, text: str) -> list[Gpu]:
    if token.isascii() and token.isdigit():
        whole = list(dict.fromkeys(g.pci for g in devices))
        return [g for g in devices if g.pci == whole[int(token)]] if int(token) < len(whole) else []
    beginning = token.lower()
    if beginning.startswith("mig-gpu-"):
        raise ConfigError(
            f"CUDA_VISIBLE_DEVICES={text!r} names a MIG slice by GPU and instances ({token}), as drivers before 470 "
            "did: give its own name MIG-<uuid>, which nvidia-smi -L prints"
        )
    fitting = [g for g in devices if beginning.startswith(("gpu-", "mig-")) and g.uuid.lower().startswith(beginning)]
    if len(fitting) > 1:
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={text!r}: {token} is the beginning of {len(fitting)} UUIDs")
    return fitting

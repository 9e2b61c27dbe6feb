"""Facts of the NVIDIA GPUs of this machine from NVML, and which of them this process was given.

NVML makes no CUDA context, and sees the GPUs that the device cgroup lets this process open.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from hpcgpu.errors import ConfigError
from hpcgpu.model import Gpu, Topology
from hpcgpu.topology import pci


def nvml_facts() -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs that NVML shows, by PCI address, and warnings; nothing where there is no driver.

    GPUs that are divided into MIG slices are left out, with a warning.
    """
    import pynvml

    found: list[Gpu] = []
    warnings: list[str] = []
    with contextlib.suppress(pynvml.NVMLError), _session(pynvml):
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                gpu, divided = _gpu(pynvml, index)
            except pynvml.NVMLError as e:
                warnings.append(f"NVML says of its GPU {index}: {e}")
                continue
            if divided:
                warnings.append(f"the GPU at {gpu.pci} is divided into MIG slices, which hpcgpu cannot use yet")
            else:
                found.append(gpu)
    return tuple(sorted(found, key=lambda g: g.pci)), tuple(warnings)


@contextlib.contextmanager
def _session(nvml: Any) -> Iterator[None]:  # noqa: ANN401 - a module without types
    nvml.nvmlInit()
    try:
        yield
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> tuple[Gpu, bool]:  # noqa: ANN401
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    address = pci.address(_text(nvml.nvmlDeviceGetPciInfo(handle).busId))
    uuid, model = _text(nvml.nvmlDeviceGetUUID(handle)), _text(nvml.nvmlDeviceGetName(handle))
    size, divided = 0, False
    with contextlib.suppress(nvml.NVMLError):  # GPUs that share the host's memory have no size of their own
        size = int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    with contextlib.suppress(nvml.NVMLError):  # "not supported" before Ampere
        divided = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    return Gpu(address, uuid, model, memory_bytes=size), divided


def _text(value: str | bytes) -> str:
    """nvidia-ml-py returned bytes before version 12."""
    return value.decode() if isinstance(value, bytes) else value


def joined(topology: Topology, nvml: Sequence[Gpu]) -> Topology:
    """Return the topology with NVML's UUID, model and memory on the GPU at the same PCI address.

    A GPU that only NVML shows is added, without locality.
    """
    facts = {g.pci: g for g in nvml}
    gpus = [
        replace(g, uuid=f.uuid, model=f.model, memory_bytes=f.memory_bytes) if (f := facts.pop(g.pci, None)) else g
        for g in topology.gpus
    ]
    return replace(topology, gpus=tuple(sorted([*gpus, *facts.values()], key=lambda g: g.pci)))


def visible(gpus: Sequence[Gpu], text: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves, as CUDA reads it, in its order.

    Parameters
    ----------
    gpus : sequence of Gpu
        Those that NVML shows (with a UUID); indices count them by PCI address.
    text : str or None
        The variable's value; None when it is not set: all GPUs. Empty: none. CUDA stops at the
        first token that names no GPU.

    Raises
    ------
    ConfigError
        A MIG slice, a GPU named twice, or a beginning of a UUID that fits several.

    """
    there = sorted((g for g in gpus if g.uuid), key=lambda g: g.pci)
    if text is None:
        return tuple(there)
    out: list[Gpu] = []
    for token in (t.strip() for t in text.split(",")):
        if token.upper().startswith("MIG-"):
            raise ConfigError(
                f"CUDA_VISIBLE_DEVICES={text!r} names a MIG slice, which hpcgpu cannot use yet: ask for whole GPUs"
            )
        gpu = _named(there, token, text)
        if gpu is None:
            break
        if gpu in out:
            raise ConfigError(f"CUDA_VISIBLE_DEVICES={text!r} names the GPU {gpu.uuid} twice; name each GPU once")
        out.append(gpu)
    return tuple(out)


def _named(there: Sequence[Gpu], token: str, text: str) -> Gpu | None:
    if token.isascii() and token.isdigit():
        return there[int(token)] if int(token) < len(there) else None
    fitting = [g for g in there if token.upper().startswith("GPU-") and g.uuid.lower().startswith(token.lower())]
    if len(fitting) > 1:
        raise ConfigError(f"CUDA_VISIBLE_DEVICES={text!r}: {token} is the beginning of {len(fitting)} GPUs' UUIDs")
    return fitting[0] if fitting else None

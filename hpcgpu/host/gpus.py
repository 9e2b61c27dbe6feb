"""The NVIDIA GPUs and MIG slices of this machine, joined to its topology, and those granted to this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpcgpu.errors import ConfigError
from hpcgpu.host import nvml
from hpcgpu.model import CpuSet, Gpu, Topology


def joined(topology: Topology, gpus: Sequence[Gpu], memory_nodes: CpuSet = CpuSet()) -> Topology:  # frozen
    """Return the topology with NVML's facts about the GPU at the same PCI address."""
    # Slices replace the GPU that they are parts of, and have its locality. A GPU that only NVML shows is added without
    # locality. memory_nodes are a GPU's own memory: not for a worker's heap.
    facts: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        facts.setdefault(gpu.pci, []).append(gpu)
    out: list[Gpu] = []
    for gpu in topology.gpus:
        out += [replace(f, vendor=gpu.vendor, numa_node=gpu.numa_node) for f in facts.pop(gpu.pci, ())] or [gpu]
    out += [gpu for alone in facts.values() for gpu in alone]
    merged = replace(topology, gpus=tuple(sorted(out, key=lambda g: g.pci)))
    return set_aside(merged, memory_nodes, "gpu")


def set_aside(topology: Topology, nodes: CpuSet, kind: str) -> Topology:
    """Return the topology with these NUMA nodes as other memory of this kind."""
    # If one NUMA node is left, all devices are local to it: they seemed to be local to two.
    numa = tuple(n for n in topology.numa_nodes if n.os_index not in nodes)
    other = [replace(n, kind=kind) for n in (*topology.numa_nodes, *topology.other_memory) if n.os_index in nodes]
    other += [n for n in topology.other_memory if n.os_index not in nodes]
    topology = replace(topology, other_memory=tuple(sorted(other, key=lambda n: n.os_index)))
    if len(numa) == len(topology.numa_nodes):
        return topology
    only = numa[0].os_index if len(numa) == 1 else None
    return replace(
        topology,
        numa_nodes=numa,
        gpus=tuple(g if g.numa_node is not None else replace(g, numa_node=only) for g in topology.gpus),
        nics=tuple(n if n.numa_node is not None else replace(n, numa_node=only) for n in topology.nics),
    )


def openable(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs and MIG slices of this node that this process may use: those of NVML that CUDA would show."""
    return visible(nvml.read().gpus, environ.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: Sequence[Gpu], text: str | None) -> tuple[Gpu, ...]:
    """Return NVML's GPUs and slices that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; ConfigError if ambiguous."""
    # The text has indices, which count GPUs by PCI address (the index of a divided GPU means all of its slices), and
    # UUIDs GPU-… and MIG-… or prefixes of them. None: not set, all GPUs. "": no GPU. CUDA stops at the first token that
    # names no device.
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

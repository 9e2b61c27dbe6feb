"""How others would place one worker per GPU on a node: rules stated in a few lines, from documents and source.

A rule for cores returns a CpuSet for each GPU, a rule for NICs the ports for each GPU, both in PCI order. They are
what the rule says, not the programs: what those do besides (checks, options, launchers' masks) is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

from hpcgpu.model import CpuSet, Gpu, Nic, NumaNode, Topology

CoreRule = Callable[[Topology], tuple[CpuSet, ...]]
NicRule = Callable[[Topology], tuple[tuple[Nic, ...], ...]]
T = TypeVar("T")
_FABRICS = ("infiniband", "slingshot", "opa", "roce")


def in_pci_order(topology: Topology) -> list[Gpu]:
    """Return the GPUs as every rule counts them."""
    return sorted(topology.gpus, key=lambda g: g.pci)


def nodes_of(topology: Topology) -> list[NumaNode]:
    """Return the NUMA nodes that have PUs, by OS index."""
    return sorted((n for n in topology.numa_nodes if n.cpuset), key=lambda n: n.os_index)


def local_cores(topology: Topology, gpu: Gpu) -> CpuSet:
    """Return the PUs of the GPU's NUMA node, all PUs where it is unknown (as the kernel's local_cpulist)."""
    home = [n.cpuset for n in topology.numa_nodes if n.os_index == gpu.numa_node]
    return home[0] if home else _together(topology.cores)


def ports_of(topology: Topology) -> list[Nic]:
    """Return the ports that an RDMA library lists, whatever their state: no plain Ethernet, no virtual function."""
    return [n for n in topology.nics if n.kind in _FABRICS and not n.virtual]


def usable_ports(topology: Topology) -> list[Nic]:
    """Return the active ports of one fabric: InfiniBand before RoCE, which is then for storage or management."""
    active = [n for n in ports_of(topology) if n.active]
    kind = next((k for k in _FABRICS if any(n.kind == k for n in active)), "")
    return [n for n in active if n.kind == kind]


def bindpcie(topology: Topology) -> tuple[CpuSet, ...]:
    """Place rank i on NUMA node i // (GPUs per NUMA node): ``bindpcie`` of NVIDIA's mlperf-common."""
    gpus, nodes = in_pci_order(topology), nodes_of(topology)
    each = max(1, len(gpus) // len(nodes))
    return tuple(nodes[min(i // each, len(nodes) - 1)].cpuset for i in range(len(gpus)))


def block_of_cores(topology: Topology) -> tuple[CpuSet, ...]:
    """Cut the cores into equal runs, the i-th for rank i: a launcher that maps by core without knowing of GPUs."""
    cores = sorted(topology.cores, key=min)
    return tuple(_together(run) for run in _runs(cores, len(topology.gpus)))


def socket_by_rank(topology: Topology) -> tuple[CpuSet, ...]:
    """Place rank i of G on package i * P // G of P: the arithmetic that knows sockets, but no NUMA nodes in them."""
    nodes = nodes_of(topology)
    packages = list(dict.fromkeys(n.package for n in nodes))
    count = len(topology.gpus)
    chosen = [packages[i * len(packages) // count] for i in range(count)]
    return tuple(_together([n.cpuset for n in nodes if n.package == p]) for p in chosen)


def dask_cuda_worker(topology: Topology) -> tuple[CpuSet, ...]:
    """Give worker i the local cores of GPU 2i mod n.

    ``dask cuda worker`` of dask-cuda 26.10 asks NVML for the affinity of element i of a list of devices that has been
    rotated by i already (``cuda_worker.py``: ``nvml_device_index(i, cuda_visible_devices(i))``).
    """
    gpus = in_pci_order(topology)
    return tuple(local_cores(topology, gpus[2 * i % len(gpus)]) for i in range(len(gpus)))


def local_to_gpu(topology: Topology) -> tuple[CpuSet, ...]:
    """Give each worker all cores next to its GPU, shared: ``rapidsmpf.rrun.bind``, dask-cuda's LocalCUDACluster."""
    return tuple(local_cores(topology, g) for g in in_pci_order(topology))


def mpibind_like(topology: Topology) -> tuple[CpuSet, ...]:
    """Spread as many tasks as GPUs over NUMA nodes, then over cores: LLNL's mpibind, memory first.

    With fewer tasks than NUMA nodes (``greedy``) each task has a run of neighbouring nodes and whichever GPUs are
    there; two GPUs in one run share one task's cores. Otherwise a NUMA node has as many tasks as GPUs, and its cores
    are divided among them.
    """
    gpus, nodes = in_pci_order(topology), nodes_of(topology)
    if len(gpus) < len(nodes):
        runs = _runs(nodes, len(gpus))
        homes = [next((run for run in runs if any(n.os_index == g.numa_node for n in run)), nodes) for g in gpus]
        return tuple(_together([n.cpuset for n in home]) for home in homes)
    out = []
    for gpu in gpus:
        beside = [g for g in gpus if g.numa_node == gpu.numa_node]
        cores = sorted((c for c in topology.cores if c & local_cores(topology, gpu)), key=min)
        out.append(_together(_runs(cores, len(beside))[beside.index(gpu)]))
    return tuple(out)


def nearest_port(topology: Topology) -> tuple[tuple[Nic, ...], ...]:
    """Take the topologically nearest port, first of the list among equals, blind to state and to other workers.

    ``TopologicalDistance`` of ucx-py, on which dask-cuda's ``net_devices="auto"`` stood until 2022 (ucx-py#829).
    """
    return tuple(tuple(_nearest(topology, g, ports_of(topology))[:1]) for g in in_pci_order(topology))


def best_class(topology: Topology) -> tuple[tuple[Nic, ...], ...]:
    """Take all active ports that are equally near, for every worker there: ``rapidsmpf.rrun.bind``."""
    active = [n for n in ports_of(topology) if n.active]
    return tuple(tuple(_nearest(topology, g, active)) for g in in_pci_order(topology))


def first_port(topology: Topology) -> tuple[tuple[Nic, ...], ...]:
    """Take the first port of the list for everybody: one value of UCX_NET_DEVICES in a job script."""
    return tuple(tuple(ports_of(topology)[:1]) for _ in topology.gpus)


def all_ports(topology: Topology) -> tuple[tuple[Nic, ...], ...]:
    """Take all ports for everybody, as with UCX_NET_DEVICES=all: UCX skips those that are not active."""
    return tuple(tuple(n for n in ports_of(topology) if n.active) for _ in topology.gpus)


CORE_RULES: dict[str, CoreRule] = {
    "bindpcie": bindpcie,
    "block of cores": block_of_cores,
    "socket i*P/G": socket_by_rank,
    "dask cuda worker": dask_cuda_worker,
    "all local cores (rrun.bind)": local_to_gpu,
    "mpibind-like": mpibind_like,
}
NIC_RULES: dict[str, NicRule] = {
    "nearest": nearest_port,
    "first of the list": first_port,
    "best class (rrun.bind)": best_class,
    "all": all_ports,
}


def _together(sets: Sequence[CpuSet]) -> CpuSet:
    return CpuSet(i for s in sets for i in s)


def _runs(things: Sequence[T], count: int) -> list[Sequence[T]]:
    """Cut into ``count`` runs, the same length within one; with fewer things than runs neighbours share one."""
    starts = [i * len(things) // count for i in range(count + 1)]
    return [things[a : max(b, a + 1)] for a, b in pairwise(starts)]


def _nearest(topology: Topology, gpu: Gpu, ports: Sequence[Nic]) -> list[Nic]:
    """Return the ports with the least distance, in the order of the list."""
    far = [_distance(topology, gpu, n) for n in ports]
    return [n for n, d in zip(ports, far, strict=True) if d == min(far)]


def _distance(topology: Topology, gpu: Gpu, nic: Nic) -> tuple[int, int]:
    """Return (0, bridges) below one host bridge, else 1 same NUMA node, 2 same package, 3 far or unknown."""
    for gpu_pci, nic_pci, bridges, _ in topology.hops:
        if (gpu_pci, nic_pci) == (gpu.pci, nic.pci):
            return 0, bridges
    packages = {n.os_index: n.package for n in topology.numa_nodes}
    if gpu.numa_node not in packages or nic.numa_node not in packages:
        return 3, 0
    if gpu.numa_node == nic.numa_node:
        return 1, 0
    return (2 if packages[gpu.numa_node] == packages[nic.numa_node] else 3), 0

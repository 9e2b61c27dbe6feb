"""How long planning a node takes, and how well workers are placed on recorded machines, beside the rules of others.

One JSON line per figure. Times are medians of ``--runs`` runs. Placement is counted on the machines of
``tests/data/topology`` that have GPUs (each machine once), one worker per GPU, all cores granted:

``workers_with_half_of_their_cores_local``
    Workers of which at least half of the cores are on the NUMA node of their GPU.
``cores_local``
    Share of a worker's cores that are on the NUMA node of its GPU.
``cores_of_several_workers``, ``cores_of_no_worker``
    Share of the node's cores that more than one worker has, and that none has. These shares are means over a
    machine, then over the machines.
``memory_on_numa_nodes_without_gpu``
    Share of the machine's DRAM that a strict policy on each GPU's own NUMA node leaves out of reach.
``port_load_spread``
    Workers on the fullest active port less those on the emptiest; a worker with k ports counts 1/k on each.
``workers_on_a_dead_port``
    Workers with ports of which none is active.
``workers_on_nearest_active_ports``
    Workers with ports all of which are as near to their GPU as any active one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

import _figures
from _rules import CORE_RULES, NIC_RULES, CoreRule, NicRule, best_class, in_pci_order, local_cores, usable_ports

from hpcgpu.model import Binding, CpuSet, Gpu, Hop, Nic, NumaNode, Settings, Topology
from hpcgpu.plan.binding.bindings import plan_bindings, simulated_gpus
from hpcgpu.topology.hwloc_xml import read_file

DATA = Path(__file__).parents[1] / "tests" / "data" / "topology"
GIB = 2**30
report = partial(_figures.report, "topology")
# The first two are epyc-corona and turin-4gpu-nvml, recorded with less; an NCCL file tells of no cores.
NOT_COUNTED = ("epyc-corona-hwloc1", "drm-4gpu", "aws-p4de-24xl-topo")
HALF_LOCAL = "workers_with_half_of_their_cores_local"
LOCAL = Settings(cores="local")

LIVE = """
import os, time
from hpcgpu.host import discover
from hpcgpu.model import CpuSet
from hpcgpu.plan.binding.bindings import simulated_gpus, plan_bindings
start = time.perf_counter()
topology = discover.topology()
found = time.perf_counter()
gpus = topology.gpus or simulated_gpus(topology, 4, 2**30, "here")
plan_bindings(topology, gpus, CpuSet(os.sched_getaffinity(0)))
print((found - start) * 1000, (time.perf_counter() - found) * 1000)
"""


def pus(topology: Topology) -> CpuSet:
    return CpuSet(i for core in topology.cores for i in core)


def machines() -> Iterator[tuple[str, str, Topology]]:
    """Return name, text and value of each recorded machine."""
    for path in sorted(DATA.glob("*.xml")):
        text = path.read_text()
        yield path.stem, text, read_file(text)


def built(gpus: int, nics: int, pus: int) -> Topology:
    """Return a node of two packages with four NUMA nodes each, two PUs per core, a port beside each GPU."""
    cores, nodes = pus // 2, 8
    core = [CpuSet((i, i + cores)) for i in range(cores)]
    share = cores // nodes
    numa = tuple(
        NumaNode(n, CpuSet(p for c in core[n * share : (n + 1) * share] for p in c), 64 * GIB, package=n // 4)
        for n in range(nodes)
    )
    cards = tuple(Gpu(f"0000:{i + 1:02x}:00.0", f"GPU-{i}", numa_node=i * nodes // gpus) for i in range(gpus))
    ports = tuple(Nic(f"mlx5_{i}", f"0000:{i + 1:02x}:10.0", numa_node=i * nodes // nics) for i in range(nics))
    hops = tuple(Hop(g.pci, n.pci, 2, 1) for g, n in zip(cards, ports, strict=False))
    return Topology(numa, tuple(core), cards, ports, hops)


def milliseconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1000


def times(runs: int) -> None:
    said = [
        subprocess.run([sys.executable, "-c", LIVE], stdout=subprocess.PIPE, check=True).stdout for _ in range(runs)
    ]
    live = [[float(word) for word in line.split()] for line in said]
    case = f"this machine, {len(os.sched_getaffinity(0))} PUs, first in a process"
    report(case, "hpcgpu", "discover_ms", [d for d, _ in live], "ms")
    report(case, "hpcgpu", "discover_and_plan_ms", [d + p for d, p in live], "ms")
    for gpus, nics, count in ((8, 0, 256), (8, 8, 256), (16, 16, 512)):
        node = built(gpus, nics, count)
        allowed = pus(node)
        values = [milliseconds(partial(plan_bindings, node, node.gpus, allowed)) for _ in range(runs)]
        report(f"{gpus} GPUs, {nics} NICs, {count} PUs", "hpcgpu", "plan_ms", values, "ms")
    for name, text, _ in machines():
        values = [milliseconds(partial(read_and_plan, text)) for _ in range(runs)]
        report(name, "hpcgpu", "read_and_plan_ms", values, "ms")


def read_and_plan(text: str) -> None:
    topology = read_file(text)
    plan_bindings(topology, topology.gpus or simulated_gpus(topology, 4, GIB, "here"), pus(topology))


def ours(topology: Topology, wanted: Settings | None = None) -> tuple[Binding, ...]:
    return plan_bindings(topology, in_pci_order(topology), pus(topology), (wanted or Settings()).binding_rules)


def half_local(topology: Topology, cpusets: Sequence[CpuSet]) -> int:
    """Count the workers of which at least half of the cores are on their GPU's NUMA node."""
    return sum(share >= 0.5 for share in local_shares(topology, cpusets))


def local_shares(topology: Topology, cpusets: Sequence[CpuSet]) -> list[float]:
    homes = [local_cores(topology, g) for g in in_pci_order(topology)]
    return [len(c & home) / len(c) for c, home in zip(cpusets, homes, strict=True)]


def owners(topology: Topology, cpusets: Sequence[CpuSet]) -> list[int]:
    """Return how many workers each core has."""
    return [sum(bool(core & c) for c in cpusets) for core in topology.cores]


def load_spread(topology: Topology, chosen: Sequence[Sequence[Nic]]) -> float:
    load = {n.name: 0.0 for n in usable_ports(topology)}
    for ports in chosen:
        for port in ports:
            if port.name in load:
                load[port.name] += 1 / len(ports)
    return max(load.values()) - min(load.values())


def on_dead_port(chosen: Sequence[Sequence[Nic]]) -> int:
    return sum(bool(ports) and not any(n.active for n in ports) for ports in chosen)


def on_nearest(topology: Topology, chosen: Sequence[Sequence[Nic]]) -> int:
    near = best_class(topology)
    return sum(bool(ports) and set(ports) <= set(best) for ports, best in zip(chosen, near, strict=True))


def report_cores(found: dict[str, Topology]) -> None:
    rules: dict[str, CoreRule] = {
        "hpcgpu": lambda t: tuple(b.cpuset for b in ours(t)),
        'hpcgpu, cores="local"': lambda t: tuple(b.cpuset for b in ours(t, LOCAL)),
        **CORE_RULES,
    }
    for name, topology in found.items():
        homes = {g.numa_node for g in topology.gpus}
        away = sum(n.memory_bytes for n in topology.numa_nodes if n.os_index not in homes)
        total = sum(n.memory_bytes for n in topology.numa_nodes)
        report(name, "the machine", "memory_on_numa_nodes_without_gpu", [away / total], "share")
        for who, rule in rules.items():
            right = half_local(topology, rule(topology))
            report(name, who, HALF_LOCAL, [right], f"of {len(topology.gpus)} workers")
    for who, rule in rules.items():
        placed = [(t, rule(t)) for t in found.values()]
        case = f"all {len(found)} machines"
        right, workers = sum(half_local(t, c) for t, c in placed), sum(len(c) for _, c in placed)
        report(case, who, HALF_LOCAL, [right], f"of {workers} workers")
        counts = [owners(t, c) for t, c in placed]
        report(case, who, "cores_local", [fmean(fmean(local_shares(t, c)) for t, c in placed)], "share")
        report(case, who, "cores_of_several_workers", [fmean(fmean(k > 1 for k in c) for c in counts)], "share")
        report(case, who, "cores_of_no_worker", [fmean(fmean(k == 0 for k in c) for c in counts)], "share")


def report_ports(found: dict[str, Topology]) -> None:
    rules: dict[str, NicRule] = {"hpcgpu": lambda t: tuple(b.nics for b in ours(t)), **NIC_RULES}
    for name, topology in found.items():
        if len(usable_ports(topology)) < 2:  # nothing to choose
            continue
        for who, rule in rules.items():
            chosen = rule(topology)
            report(name, who, "port_load_spread", [load_spread(topology, chosen)], "workers")
            report(name, who, "workers_on_a_dead_port", [on_dead_port(chosen)], f"of {len(chosen)} workers")
            near = on_nearest(topology, chosen)
            report(name, who, "workers_on_nearest_active_ports", [near], f"of {len(chosen)} workers")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    times(parser.parse_args().runs)
    known = {name: t for name, _, t in machines() if t.gpus and name not in NOT_COUNTED}
    report_cores(known)
    report_ports(known)


if __name__ == "__main__":
    main()

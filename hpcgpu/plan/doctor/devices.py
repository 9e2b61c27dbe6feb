"""The doctor's checks of a node's GPUs and network ports; the table and other checks are in ``nodes``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hpcgpu.model import Hop, Nic
from hpcgpu.plan.doctor.facts import GpuSpeed, NodeFacts, TrialFacts, Ucx
from hpcgpu.plan.doctor.finding import CheckResult, failed, not_looked_at, ok, warning, worst
from hpcgpu.units import format_bytes

_SLOW_INIT_S, _SLOW_COPY = 10.0, 4e9
RDMA = ("infiniband", "roce", "opa", "slingshot", "efa")


def on(node: NodeFacts, seen: CheckResult) -> CheckResult:
    """Return a result with the node's name."""
    return seen._replace(seen=f"{node.host}: {seen.seen}")


def each(facts: TrialFacts, fact: str, look: Callable[[NodeFacts, Any], CheckResult]) -> CheckResult:
    """Return the worst result of the nodes, each judged by this fact of it."""
    values = [(node, getattr(node, fact)) for node in facts.nodes]
    return worst(
        on(node, not_looked_at(node.unknown.get(fact, "it is not known")) if value is None else look(node, value))
        for node, value in values
    )


def check_gpus(facts: TrialFacts) -> CheckResult:
    """Check that each node has the requested GPUs."""
    if not facts.wanted_gpus:
        return not_looked_at("no GPU was asked for, or simulated ones")
    poor = [node for node in facts.nodes if len(node.gpus) < facts.wanted_gpus]
    if not poor:
        first = facts.nodes[0]
        if modes := {mode: node.host for node in facts.nodes for mode in node.compute_modes if mode}:
            return warning(
                "; ".join(f"{host} has GPUs in compute mode {mode}" for mode, host in modes.items()),
                "no other process can use a worker's GPU: make arrays in tasks, since the scheduler opens a GPU for an "
                "array in submit, and leave workers_per_gpu at 1; or start NVIDIA's MPS in the job",
            )
        return ok(f"{len(first.gpus)} on each node: {first.gpus[0]}, driver {first.driver or 'unknown'}")
    counts = [f"{node.host} shows {len(node.gpus)} of {facts.wanted_gpus} GPUs" for node in poor]
    granted = [f" (granted: {node.granted_gpus})" if node.granted_gpus is not None else "" for node in poor]
    summary = "; ".join(map("".join, zip(counts, granted, strict=True)))
    silent = next((node.no_driver or "no driver answers" for node in poor if not node.driver), "")
    if any(node.granted_gpus for node in poor) and silent:
        return failed(
            f"{summary}; {silent}",
            "the GPUs were granted, and the node's NVIDIA driver does not answer: run nvidia-smi in such a job; in a "
            "container let it have the GPUs (apptainer --nv); tell the administrators, or leave the node out",
        )
    if silent:
        return failed(
            f"{summary}; {silent}",
            "the job is on nodes without GPUs, or none was granted: give the queue of the GPU nodes (--queue), and "
            "see in hpcgpu plan how they are asked for (the site's gpus: gpus-per-node, gres or none)",
        )
    return failed(
        summary,
        "the batch system granted fewer: see in hpcgpu plan how they are asked for, and take away a --gres or "
        "--gpus of your own in --job-extra-directives",
    )


def check_drivers(facts: TrialFacts) -> CheckResult:
    """Check that all nodes have one driver version."""
    drivers = {node.host: node.driver for node in facts.nodes if node.driver}
    if not drivers:
        return not_looked_at("no NVIDIA driver there")
    versions = ", ".join(f"{host}: {version}" for host, version in drivers.items())
    if len(set(drivers.values())) > 1:
        return warning(versions, "libraries may work on some nodes only: tell the administrators, or leave a node out")
    return ok(f"{next(iter(drivers.values()))} on each node")


def check_nics(facts: TrialFacts) -> CheckResult:
    """Check that the network ports are alive, those nearest to GPUs above all."""
    return each(facts, "nics", _nics_of)


def _nics_of(node: NodeFacts, nics: Sequence[Nic]) -> CheckResult:
    """Judge a node's ports: an unused port may be dead, a port that a GPU would use may not."""
    ports = [nic for nic in nics if not nic.virtual]
    fast = [nic for nic in ports if nic.kind in RDMA] or ports
    alive = [f"{nic.name}:{nic.port}" for nic in fast if nic.active]
    dead = ", ".join(f"{nic.name}:{nic.port} ({nic.kind}) is {nic.state}" for nic in fast if not nic.active)
    if not dead:
        return ok(", ".join(alive)) if alive else not_looked_at("no network card is seen")
    lost = {nic.pci for nic in fast if not nic.active} - {nic.pci for nic in fast if nic.active}
    near = sorted({gpu for gpu, pci, *_ in _nearest(node) if pci in lost})
    summary = f"{dead}, nearest to the GPU at {', '.join(near)}" if near else dead
    if alive and not near:
        return ok(f"{', '.join(alive)}; no GPU misses the others: {summary}")
    left = f"workers take the next ports ({', '.join(alive)})" if alive else "no fast port is left"
    return warning(
        summary,
        f"{left}, as hpcgpu topo shows; variables of your own (UCX_NET_DEVICES, NCCL_IB_HCA) must not name the dead "
        "ones; tell the administrators",
    )


def _nearest(node: NodeFacts) -> list[Hop]:
    """Return the PCI paths of each GPU to its nearest ports."""

    def length(hop: Hop) -> tuple[int, int]:
        return (-hop.depth, hop.bridges)

    least = {gpu: min(length(hop) for hop in node.hops if hop.gpu == gpu) for gpu in {hop.gpu for hop in node.hops}}
    return [hop for hop in node.hops if length(hop) == least[hop.gpu]]


def check_cuda(facts: TrialFacts) -> CheckResult:
    """Check how fast CUDA starts and copies."""
    return each(facts, "speed", lambda _, speed: _speed_of(speed))


def _speed_of(speed: GpuSpeed) -> CheckResult:
    copies = [
        f"{name} {format_bytes(int(value))}/s"
        for name, value in (("near", speed.near_bytes_per_s), ("far", speed.far_bytes_per_s))
        if value
    ]
    cuda = f"CUDA {speed.cuda // 1000}.{speed.cuda % 1000 // 10}, " if speed.cuda else ""
    summary = f"{speed.name}: {cuda}cuInit and context in {speed.init_s:.2f} s{', copies from memory ' * bool(copies)}"
    summary += ", ".join(copies)
    if speed.init_s > _SLOW_INIT_S:
        return warning(summary, "each worker waits so long: have the persistence daemon of the driver switched on")
    if 0 < speed.near_bytes_per_s < _SLOW_COPY:
        return warning(summary, "the GPU's PCIe link is slow: compare nvidia-smi -q -d PCIE, tell the administrators")
    return ok(summary)


def check_ucx(facts: TrialFacts) -> CheckResult:
    """Check that UCX has a transport for the network."""
    return each(facts, "ucx", lambda node, ucx: _ucx_of(node, ucx, facts.protocol))


def _ucx_of(node: NodeFacts, ucx: Ucx, protocol: str) -> CheckResult:
    summary = f"UCX {ucx.version}: {', '.join(ucx.transports)}"
    fast = any(name.startswith(("rc", "dc", "ud", "srd")) for name in ucx.transports)
    if any(nic.kind in ("infiniband", "roce") and nic.active for nic in node.nics or ()) and not fast:
        advice = "UCX sees no InfiniBand: install rdma-core on the nodes, or a UCX that was built with it"
        return (
            failed(summary, f"{advice}; --protocol tls does without") if protocol == "ucx" else warning(summary, advice)
        )
    return ok(summary)

"""The doctor's checks of connections between machines, and of network ports."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.model import Hop, Nic
from hpcgpu.plan.doctor import (
    CheckResult,
    Link,
    NodeFacts,
    TrialFacts,
    Ucx,
    each,
    failed,
    not_looked_at,
    ok,
    warning,
)

RDMA = ("infiniband", "roce", "opa", "slingshot", "efa")
_SLOW_LINK_S = 0.05
_MOST_LINKS = 4
_CLOCK_S, _CERTIFICATE_S = 1.0, 86400.0  # certificates are valid from a day before they are made


def check_links(facts: TrialFacts) -> CheckResult:
    """Check that the nodes reach each other, at each address."""
    links = [link for node in facts.nodes for link in node.links]
    if len(facts.nodes) < 2:
        return not_looked_at("one node only")
    if not links:
        return failed(
            "the nodes have not found each other's addresses",
            "the folder of the run is slow to show new files: look at the home's file system",
        )
    return _check_ways(links, "between nodes")


def check_login_links(links: Sequence[Link]) -> CheckResult:
    """Check that this machine, on which a cluster object lives, reaches the nodes."""
    result = _check_ways(links, "from here to the nodes")
    if any(not link.error for link in links):
        return result
    return warning(
        result.seen,
        "a cluster object here connects through the batch system instead (a tunnel by srun or ssh), which is "
        "slower: run scripts in the job (hpcgpu plan --script), or ask the administrators to open the nodes' ports",
    )


def check_clock(facts: TrialFacts) -> CheckResult:
    """Check that all machines have the same time."""
    links = [*(facts.links or ()), *(link for node in facts.nodes for link in node.links)]
    answered = [link for link in links if not link.error]
    if not answered:
        return not_looked_at("no machine could reach another")
    off = max(answered, key=lambda link: abs(link.clock_s))
    if abs(off.clock_s) <= _CLOCK_S:
        return ok("all machines have the same time")
    order = "ahead of" if off.clock_s > 0 else "behind"
    summary = f"the clock of {off.target} is {abs(off.clock_s):.1f} s {order} that of {off.source}"
    if abs(off.clock_s) > _CERTIFICATE_S:
        return failed(summary, "certificates made here are not valid there: have the clocks set (chronyd, ntpd)")
    return warning(summary, "times in logs and on the dashboard do not fit: have the clocks set (chronyd, ntpd)")


def _check_ways(links: Sequence[Link], where: str) -> CheckResult:
    """Check connections: one open way between two machines is enough."""
    open_ = [link for link in links if not link.error]
    pairs = {(link.source, link.target) for link in open_}
    if cut := [link for link in links if (link.source, link.target) not in pairs]:
        return failed(
            _describe(cut),
            "a firewall between them closes the ports: ask the administrators to open TCP ports above 1024 between "
            "nodes, or name an interface that they leave open by --interface",
        )
    # Several machines have one address, as bridges of containers do: it leads to no other machine.
    local = {k.address for k in links if any(k.address == o.address and k.target != o.target for o in links)}
    dead = [link for link in links if link.error and link.address not in local]
    if dead:
        good = sorted({link.interface for link in links} - {link.interface for link in dead})
        named = f"name one that works: --interface {good[0]}" if good else "have the administrators look at them"
        return warning(_describe(dead), f"connections by these interfaces cost time before another is taken: {named}")
    slowest = max(open_, key=lambda link: link.took_s)
    text = f"{len(open_)} connections {where} work, the slowest in {slowest.took_s * 1e3:.1f} ms"
    if slowest.took_s > _SLOW_LINK_S:
        return warning(f"{text} ({slowest.address})", "the network is slow or busy: try another by --interface")
    return ok(f"{text} ({', '.join(sorted({link.interface for link in open_}))})")


def _describe(links: Sequence[Link]) -> str:
    return "; ".join(f"{k.source} to {k.target} at {k.address} ({k.interface}): {k.error}" for k in links[:_MOST_LINKS])


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

"""The doctor's checks of connections between machines."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.plan.doctor.facts import Link, TrialFacts
from hpcgpu.plan.doctor.finding import CheckResult, failed, not_looked_at, ok, warning

UCX = "ucx"
_SLOW_LINK_S = 0.05
_MOST_LINKS = 4


def check_links(facts: TrialFacts) -> CheckResult:
    """Check that the nodes reach each other, at each address."""
    links = [link for node in facts.nodes for link in node.links if link.protocol != UCX]
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
        "slower: run scripts in the job (hpcgpu jobscript), or ask the administrators to open the nodes' ports",
    )


def check_ucx_links(facts: TrialFacts) -> CheckResult:
    """Check that the nodes reach each other by UCX, where it is installed."""
    links = [link for node in facts.nodes for link in node.links if link.protocol == UCX]
    if not links:
        why = next((f"{node.host}: {node.no_ucx_links}" for node in facts.nodes if node.no_ucx_links), "one node only")
        return not_looked_at(why)
    cut = _cut(links)
    if not cut:
        return _open_seen(links, "between nodes")
    summary = _describe(cut)
    advice = (
        "UCX finds no way that both nodes have: name the network card that it shall take (UCX_NET_DEVICES), see "
        "what ucx_info -d lists on both, or take --protocol tls"
    )
    return failed(summary, advice) if facts.protocol == UCX else warning(summary, advice)


def _check_ways(links: Sequence[Link], where: str) -> CheckResult:
    """Check connections by TCP and TLS: of each protocol, one open way between two machines is enough."""
    if plain := _cut([link for link in links if link.protocol == "tcp"]):
        return failed(
            _describe(plain),
            "a firewall between them closes the ports: ask the administrators to open TCP ports above 1024 between "
            "nodes, or name an interface that they leave open by --interface",
        )
    if secret := _cut([link for link in links if link.protocol == "tls"]):
        return failed(
            _describe(secret),
            "plain TCP is open and TLS is not: certificates are not valid where a clock is wrong by a day (see clocks "
            "below), or something between the machines looks into connections: tell the administrators. "
            "--no-security does without encryption",
        )
    # Several machines have one address, as bridges of containers do: it leads to no other machine.
    local = {k.address for k in links if any(k.address == o.address and k.target != o.target for o in links)}
    dead = [link for link in links if link.error and link.address not in local]
    if dead:
        good = sorted({link.interface for link in links} - {link.interface for link in dead})
        named = f"name one that works: --interface {good[0]}" if good else "have the administrators look at them"
        return warning(_describe(dead), f"connections by these interfaces cost time before another is taken: {named}")
    return _open_seen(links, where)


def _cut(links: Sequence[Link]) -> list[Link]:
    """Return the connections between machines that have no open path."""
    open_ = {(link.source, link.target) for link in links if not link.error}
    return [link for link in links if (link.source, link.target) not in open_]


def _open_seen(links: Sequence[Link], where: str) -> CheckResult:
    open_ = [link for link in links if not link.error]
    # the handshake of TLS takes several ways, and a busy CPU: it says little of the network
    slowest = max((link for link in open_ if link.protocol != "tls"), key=lambda link: link.took_s)
    protocols = " and ".join(sorted({link.protocol for link in open_}))
    text = f"{len(open_)} connections {where} work ({protocols}), the slowest in {slowest.took_s * 1e3:.1f} ms"
    if slowest.took_s > _SLOW_LINK_S:
        return warning(f"{text} ({slowest.address})", "the network is slow or busy: try another by --interface")
    names = ", ".join(sorted({link.interface for link in open_}))
    return ok(f"{text} ({names})")


def _describe(links: Sequence[Link]) -> str:
    several = len({k.protocol for k in links}) > 1 or any(k.protocol != "tcp" for k in links)
    return "; ".join(
        f"{k.source} to {k.target} at {k.address} ({k.interface}{f', {k.protocol}' if several else ''}): {k.error}"
        for k in links[:_MOST_LINKS]
    )

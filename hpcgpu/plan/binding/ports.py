"""The network ports of one node: which of them are usable, why others are not, and their distances from GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcgpu.errors import ConfigError
from hpcgpu.model import Gpu, Nic, Topology, WorkerSpec

# If a node has several fabrics, one of them carries the job. RoCE beside InfiniBand is for storage or management, also
# where its port is nearer (JUSUF), unless it has rails, which are more ports and on the root complexes of the GPUs.
FABRICS = ("infiniband", "slingshot", "opa", "roce")
SWITCH, ROOT, NODE, PACKAGE, FAR, UNKNOWN = range(6)
DISTANCES = ("switch", "root", "node", "package", "machine", "unknown")
DISTANCE_WORDS = (
    "same switch",
    "same root complex",
    "same NUMA node",
    "across NUMA nodes",
    "across packages",
    "distance unknown",
)
# A port whose PCI link has less than this part of the widest one is for management: the fabric manager's ConnectX-7
# on NVSwitch boards of B200 have 3.9 GB/s beside 63.
_NARROW = 1 / 4


class Why(NamedTuple):
    """The reason why a port is not used, in words for one port and for several."""

    singular: str
    plural: str


_ETHERNET = Why(*("plain Ethernet is left to the kernel's routes",) * 2)
# RDMA devices on which no port is planned.
_UNDRIVEN = {
    "efa": Why(*("EFA, which UCX's verbs do not drive: Dask's traffic takes the kernel's routes",) * 2),
    "usnic": Why(*("usNIC, which UCX does not drive: Dask's traffic takes the kernel's routes",) * 2),
}
SPARE = Why("no worker needs it", "no worker needs them")
_FULL = Why("it has its share of workers", "they have their share of workers")
_STATES = {
    "down": Why("its port is down", "their ports are down"),
    "init": Why("no subnet manager has set its port up", "no subnet manager has set their ports up"),
    "armed": Why("its port is armed, not active", "their ports are armed, not active"),
}


class Distance(NamedTuple):
    """The distance of a port from a GPU; smaller is nearer."""

    kind: int  # index into DISTANCES
    height: int = 0  # of the lowest bridge above both: minus its depth below the host bridge
    bridges: int = 0  # on the way between the two


class Ports:
    """The ports of a node under the setting ``nics``; ConfigError for a name that no port of the node has."""

    def __init__(self, topology: Topology, nics: str | tuple[str, ...] = "balanced") -> None:
        self._hops = {hop[:2]: hop for hop in topology.hops}
        self._package = {n.os_index: n.package for n in topology.numa_nodes}
        self.all = tuple(sorted(topology.nics, key=lambda n: (n.pci, n.port, n.name)))
        named = None if isinstance(nics, str) else _named(self.all, nics)
        self.why_not: Mapping[Nic, Why] = self._why_not(topology.gpus, named)
        self.usable = tuple(n for n in self.all if n not in self.why_not)

    def distance(self, gpu: Gpu, nic: Nic) -> Distance:
        """Return the distance between the port and the GPU."""
        hop = self._hops.get((gpu.pci, nic.pci))
        if hop is not None:
            return Distance(SWITCH if hop.depth else ROOT, -hop.depth, hop.bridges)
        a, b = gpu.numa_node, nic.numa_node
        if a not in self._package or b not in self._package:
            return Distance(UNKNOWN)
        if a == b:
            return Distance(NODE)
        return Distance(PACKAGE if self._package[a] == self._package[b] else FAR)

    def _why_not(self, gpus: Sequence[Gpu], named: frozenset[Nic] | None) -> dict[Nic, Why]:
        """Return why each unusable port is not usable. A port that is named by the user only has to be active."""
        out: dict[Nic, Why] = {}
        for nic in self.all:
            if named is not None and nic not in named:
                out[nic] = Why("it is not among the nics asked for", "they are not among the nics asked for")
            elif not nic.active:
                out[nic] = _STATES.get(nic.state, _STATES["down"])
        if named is not None:
            return out
        for nic in self.all:
            if nic not in out and nic.kind not in FABRICS:
                out[nic] = _UNDRIVEN.get(nic.kind, _ETHERNET)
        out |= _narrow(self.all, out)
        out |= _virtual(self.all, out)
        kind = self._fabric(gpus, [n for n in self.all if n not in out])
        for nic in self.all:
            if nic not in out and nic.kind != kind:
                out[nic] = Why(f"it is {nic.kind} beside {kind}", f"they are {nic.kind} beside {kind}")
        return out | _slow(self.all, out)

    def _fabric(self, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> str:
        """Return the kind of the ports that carry the job: the first of FABRICS, unless only another has rails."""
        ports = {kind: [n for n in nics if n.kind == kind] for kind in FABRICS}
        kinds = [kind for kind in FABRICS if ports[kind]]
        if not kinds or self._has_rails(gpus, ports[kinds[0]]):
            return kinds[0] if kinds else ""
        more = (k for k in kinds[1:] if len(ports[k]) > len(ports[kinds[0]]) and self._has_rails(gpus, ports[k]))
        return next(more, kinds[0])

    def _has_rails(self, gpus: Sequence[Gpu], nics: Sequence[Nic]) -> bool:
        """Return whether half of the GPUs or more have a port on their own root complex."""
        return 2 * sum(any(self.distance(g, n).kind <= ROOT for n in nics) for g in gpus) >= len(gpus) > 0

    def passed_over(self, gpu: Gpu, chosen: Nic) -> tuple[str, ...]:
        """Say which nearer ports the worker of ``gpu`` does not use, and why."""
        limit = self.distance(gpu, chosen)
        near = sorted((self.distance(gpu, n), i) for i, n in enumerate(self.all) if n.kind in FABRICS)
        nearer = [(d, self.all[i]) for d, i in near if d < limit]
        groups: dict[Why, list[tuple[Distance, Nic]]] = {}
        for d, nic in nearer:
            groups.setdefault(self.why_not.get(nic, _FULL), []).append((d, nic))
        out = []
        for why, ports in groups.items():
            names = ", ".join(label(n) for _, n in ports)
            if len(ports) > 1:
                out.append(f"{names} are nearer but {why.plural} → {label(chosen)}")
            else:
                rank = "nearest" if ports[0][0] == nearer[0][0] else "nearer"
                out.append(f"{names} is {rank} but {why.singular} → {label(chosen)}")
        return tuple(out)


def label(nic: Nic) -> str:
    """Return the port's name for people: with its number, unless it is the first."""
    return nic.name if nic.port == 1 else f"{nic.name}:{nic.port}"


def unused_ports(ports: Ports, specs: Sequence[WorkerSpec]) -> tuple[tuple[Nic, Why], ...]:
    """Return the ports that no worker uses, each with the reason."""
    used = {nic for spec in specs for nic in spec.binding.nics}
    return tuple((nic, ports.why_not.get(nic, SPARE)) for nic in ports.all if nic not in used)


def _named(nics: tuple[Nic, ...], names: tuple[str, ...]) -> frozenset[Nic]:
    out: set[Nic] = set()
    for name in names:
        matching = {n for n in nics if name in (n.name, f"{n.name}:{n.port}", n.interface)}
        if not matching:
            names_there = ", ".join(f"{n.name}:{n.port}" for n in nics) or "none"
            raise ConfigError(f"nics names {name!r}, but this node has no such port; it has: {names_there}")
        out |= matching
    return frozenset(out)


def _narrow(nics: Sequence[Nic], out: Mapping[Nic, Why]) -> dict[Nic, Why]:
    """Return the ports whose PCI link is far narrower than that of the node's other RDMA ports."""
    rdma = [n for n in nics if n.active and n.kind in (*FABRICS, *_UNDRIVEN)]
    widest = max((n.link_gbytes_s for n in rdma), default=0.0)
    why = "a PCI link of {:.1f} GB/s where others have {:.1f}: a management port"
    texts = {n: why.format(n.link_gbytes_s, widest) for n in rdma if 0 < n.link_gbytes_s < widest * _NARROW}
    return {n: Why(f"it has {text}", f"they have {text}") for n, text in texts.items() if n not in out}


def _virtual(nics: Sequence[Nic], out: Mapping[Nic, Why]) -> dict[Nic, Why]:
    """Return the virtual functions of the kinds that have whole cards, too."""
    left = [n for n in nics if n not in out]
    whole = {n.kind for n in left if not n.virtual}
    return {
        n: Why("it is a virtual function", "they are virtual functions") for n in left if n.virtual and n.kind in whole
    }


def _slow(nics: Sequence[Nic], out: Mapping[Nic, Why]) -> dict[Nic, Why]:
    """Return the ports that have less than half of the highest rate: for management or storage."""
    left = [n for n in nics if n not in out]
    fastest = max((n.rate_gbps for n in left), default=0.0)
    texts = {n: f"{n.rate_gbps:g} Gb/s where others have {fastest:g}" for n in left if 0 < n.rate_gbps < fastest / 2}
    return {n: Why(f"it has {text}", f"they have {text}") for n, text in texts.items()}

"""The network ports of one node: which of them are usable, why others are not, and their distances from GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hpcgpu.errors import ConfigError
from hpcgpu.model import Gpu, Nic, Topology, WorkerSpec

# If a node has several fabrics, one of them carries the job: RoCE beside InfiniBand is for storage or management (on
# JUSUF the port nearest to the GPU is the RoCE one). Plain Ethernet is left to the kernel's routes.
FABRICS = ("infiniband", "slingshot", "opa", "roce")
PCI, NODE, PACKAGE, FAR, UNKNOWN = range(5)
DISTANCES = ("pci", "node", "package", "machine", "unknown")


class Why(NamedTuple):
    """The reason why a port is not used, in words for one port and for several."""

    one: str
    many: str


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
    """The distance of a port from a GPU; smaller is nearer.

    Attributes
    ----------
    kind : int
        Index into ``DISTANCES``: below one PCI host bridge, same NUMA node, same package, far, unknown.
    bridges : int
        PCI bridges between the two, if they are below one host bridge.

    """

    kind: int
    bridges: int = 0


class Ports:
    """The ports of a node under a rule.

    Parameters
    ----------
    nics : str or tuple of str
        A rule of :class:`hpcgpu.model.Settings`, or names of the ports that may be used: ``mlx5_0``, ``mlx5_0:1``,
        or the interface ``ib0``.

    Raises
    ------
    ConfigError
        No port of the node has such a name.

    """

    def __init__(self, topology: Topology, nics: str | tuple[str, ...] = "balanced") -> None:
        self._hops = {(gpu, nic): bridges for gpu, nic, bridges in topology.hops}
        self._package = {n.os_index: n.package for n in topology.numa_nodes}
        self.all = tuple(sorted(topology.nics, key=lambda n: (n.pci, n.port, n.name)))
        named = None if isinstance(nics, str) else _named(self.all, nics)
        self.why_not: Mapping[Nic, Why] = _why_not(self.all, named)
        self.usable = tuple(n for n in self.all if n not in self.why_not)

    def distance(self, gpu: Gpu, nic: Nic) -> Distance:
        """Return how far the port is from the GPU."""
        bridges = self._hops.get((gpu.pci, nic.pci))
        if bridges is not None:
            return Distance(PCI, bridges)
        a, b = gpu.numa_node, nic.numa_node
        if a not in self._package or b not in self._package:
            return Distance(UNKNOWN)
        if a == b:
            return Distance(NODE)
        return Distance(PACKAGE if self._package[a] == self._package[b] else FAR)

    def passed_over(self, gpu: Gpu, chosen: Nic) -> tuple[str, ...]:
        """Say which nearer ports the worker of ``gpu`` does not use, and why."""
        limit = self.distance(gpu, chosen)
        near = sorted((self.distance(gpu, n), i) for i, n in enumerate(self.all) if n.kind in FABRICS)
        nearer = [(d, self.all[i]) for d, i in near if d < limit]
        groups: dict[Why, list[tuple[Distance, Nic]]] = {}
        for d, nic in nearer:
            groups.setdefault(self.why_not.get(nic, _FULL), []).append((d, nic))
        out = []
        for why, found in groups.items():
            names = ", ".join(label(n) for _, n in found)
            if len(found) > 1:
                out.append(f"{names} are nearer but {why.many} → {label(chosen)}")
            else:
                rank = "nearest" if found[0][0] == nearer[0][0] else "nearer"
                out.append(f"{names} is {rank} but {why.one} → {label(chosen)}")
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
        found = {n for n in nics if name in (n.name, f"{n.name}:{n.port}", n.interface)}
        if not found:
            there = ", ".join(f"{n.name}:{n.port}" for n in nics) or "none"
            raise ConfigError(f"nics names {name!r}, but this node has no such port; it has: {there}")
        out |= found
    return frozenset(out)


def _why_not(nics: tuple[Nic, ...], named: frozenset[Nic] | None) -> dict[Nic, Why]:
    """Return why each unusable port is not usable. A port that is asked for by name only has to be active."""
    out: dict[Nic, Why] = {}
    for nic in nics:
        if named is not None and nic not in named:
            out[nic] = Why("it is not among the nics asked for", "they are not among the nics asked for")
        elif not nic.active:
            out[nic] = _STATES.get(nic.state, _STATES["down"])
    if named is not None:
        return out
    active = [n for n in nics if n not in out]
    kind = next((k for k in FABRICS if any(n.kind == k for n in active)), "")
    ports = [n for n in active if n.kind == kind]
    fastest = max((n.rate_gbps for n in ports), default=0.0)
    whole = any(not n.virtual for n in ports)
    for nic in active:
        if nic.kind not in FABRICS:
            out[nic] = _UNDRIVEN.get(nic.kind, _ETHERNET)
        elif nic.kind != kind:
            out[nic] = Why(f"it is {nic.kind} beside {kind}", f"they are {nic.kind} beside {kind}")
        elif nic.virtual and whole:
            out[nic] = Why("it is a virtual function", "they are virtual functions")
        elif 0 < nic.rate_gbps < fastest / 2:  # a management or storage port
            text = f"{nic.rate_gbps:g} Gb/s where others have {fastest:g}"
            out[nic] = Why(f"it has {text}", f"they have {text}")
    return out

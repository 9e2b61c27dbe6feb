"""Which network port each worker uses: only what works, as many workers on each port within one, the nearest then."""

from __future__ import annotations

from collections.abc import Sequence

from hpcgpu.model import Binding, Gpu, Nic, Topology

# Of several fabrics in a node one carries the job: InfiniBand beside RoCE means that RoCE is for storage or
# management (JUSUF: the port nearest to the GPU is the RoCE one). Plain Ethernet is left to the kernel's routes.
_FABRICS = ("infiniband", "slingshot", "opa", "roce")
_UCX_KINDS = ("infiniband", "roce")
_SAME_NODE, _SAME_PACKAGE, _FAR, _UNKNOWN = 1, 2, 3, 4
_CLASS, _BRIDGE, _MUST, _INFINITE = 10**12, 10**9, 10**15, 10**20


def usable_nics(topology: Topology) -> tuple[Nic, ...]:
    """Return the active ports of the node's fastest fabric, by PCI address.

    A port with less than half of the fastest one's rate is a management or storage port.
    """
    active = [n for n in topology.nics if n.active]
    kind = next((k for k in _FABRICS if any(n.kind == k for n in active)), "")
    ports = [n for n in active if n.kind == kind]
    fastest = max((n.rate_gbps for n in ports), default=0.0)
    return tuple(sorted((n for n in ports if not 0 < n.rate_gbps < fastest / 2), key=_by_pci))


def distance(topology: Topology, gpu: Gpu, nic: Nic) -> tuple[int, int]:
    """Return (class, PCI bridges): 0 below one host bridge, 1 same NUMA node, 2 same package, 3 far, 4 unknown."""
    for gpu_pci, nic_pci, bridges in topology.hops:
        if (gpu_pci, nic_pci) == (gpu.pci, nic.pci):
            return 0, bridges
    packages = {n.os_index: n.package for n in topology.numa_nodes}
    if gpu.numa_node not in packages or nic.numa_node not in packages:
        return _UNKNOWN, 0
    if gpu.numa_node == nic.numa_node:
        return _SAME_NODE, 0
    return (_SAME_PACKAGE if packages[gpu.numa_node] == packages[nic.numa_node] else _FAR), 0


def plan_nics(topology: Topology, gpus: Sequence[Gpu]) -> tuple[tuple[Nic, tuple[str, ...]] | None, ...]:
    """Return the port of each GPU and why, or None for all where no port is usable.

    Loads of the ports differ by at most one; among such plans the sum of distances is the least;
    ties go by PCI order, so that the i-th GPU has the same rail on equal nodes.
    """
    nics = usable_nics(topology)
    if not nics or not gpus:
        return tuple(None for _ in gpus)
    order = sorted(range(len(gpus)), key=lambda i: (gpus[i].pci, gpus[i].uuid))
    ranked = [gpus[i] for i in order]
    full = len(gpus) // len(nics)
    slots = [j for j in range(len(nics)) for _ in range(full + (len(gpus) % len(nics) > 0))]
    # All but the last slot of each port must be filled: far below any sum of distances.
    must = [k % (len(slots) // len(nics)) < full for k in range(len(slots))]
    costs = []
    for i, gpu in enumerate(ranked):
        near = [
            _weight(distance(topology, gpu, n)) + ((2 * i + 1) * len(nics) - (2 * j + 1) * len(gpus)) ** 2
            for j, n in enumerate(nics)
        ]
        costs.append([near[j] - (_MUST if m else 0) for j, m in zip(slots, must, strict=True)])
    out: list[tuple[Nic, tuple[str, ...]] | None] = [None] * len(gpus)
    for i, slot in enumerate(_assign(costs)):
        nic = nics[slots[slot]]
        out[order[i]] = (nic, _reasons(topology, ranked[i], nic))
    return tuple(out)


def ucx_env(binding: Binding) -> tuple[tuple[str, str], ...]:
    """Return UCX_NET_DEVICES for a worker on InfiniBand or RoCE; nothing for others.

    UCX has no transport for Slingshot: there a worker talks tcp on the binding's interface.
    """
    ports = [f"{n.name}:{n.port}" for n in binding.nics if n.kind in _UCX_KINDS]
    return (("UCX_NET_DEVICES", ",".join(ports)),) if ports else ()


def _by_pci(nic: Nic) -> tuple[str, int, str]:
    return nic.pci, nic.port, nic.name


def _weight(at: tuple[int, int]) -> int:
    return at[0] * _CLASS + at[1] * _BRIDGE


def _reasons(topology: Topology, gpu: Gpu, nic: Nic) -> tuple[str, ...]:
    """Say which nearer ports were passed over, and why."""
    chosen = distance(topology, gpu, nic)
    usable = usable_nics(topology)
    passed: dict[str, list[str]] = {}
    for other in sorted(topology.nics, key=lambda n: (distance(topology, gpu, n), _by_pci(n))):
        if distance(topology, gpu, other) >= chosen:
            break
        if other.kind not in _FABRICS:
            continue
        if not other.active:
            why = "port down"
        elif other in usable:
            why = "has its share of workers"
        else:
            why = f"{other.kind}{_rate(other)}"
        passed.setdefault(why, []).append(f"{other.name}:{other.port}")
    return tuple(f"nearer than {nic.name}:{nic.port}, but {why}: {', '.join(names)}" for why, names in passed.items())


def _rate(nic: Nic) -> str:
    return f" with {nic.rate_gbps:g} Gb/s" if nic.rate_gbps else ""


def _assign(costs: Sequence[Sequence[int]]) -> list[int]:
    """Return a column for each row, all different, with the least sum of costs, for rows <= columns.

    The Hungarian method by shortest augmenting paths, O(rows² · columns): 16 GPUs on 16 ports take
    about a millisecond.
    """
    rows, columns = len(costs), len(costs[0])
    row_price, column_price = [0] * rows, [0] * columns
    owner: list[int] = [-1] * columns
    for row in range(rows):
        # Dijkstra from the new row to the nearest free column, over reduced costs.
        length, came_from = [_INFINITE] * columns, [-1] * columns
        done: list[int] = []
        column, at, base = -1, row, 0
        while True:
            _relax(costs[at], row_price[at], column_price, base, column, done, length, came_from)
            column = min((j for j in range(columns) if j not in done), key=lambda j: (length[j], j))
            base = length[column]
            if owner[column] < 0:
                break
            done.append(column)
            at = owner[column]
        row_price[row] += base
        for j in done:
            row_price[owner[j]] += base - length[j]
            column_price[j] -= base - length[j]
        while column >= 0:
            before = came_from[column]
            owner[column] = owner[before] if before >= 0 else row
            column = before
    found = {r: j for j, r in enumerate(owner) if r >= 0}
    return [found[r] for r in range(rows)]


def _relax(
    costs: Sequence[int],
    row_price: int,
    column_price: Sequence[int],
    base: int,
    column: int,
    done: Sequence[int],
    length: list[int],
    came_from: list[int],
) -> None:
    """Shorten the ways to the open columns by going through this row, which ``column`` led to."""
    for j in range(len(costs)):
        way = base + costs[j] - row_price - column_price[j]
        if j not in done and way < length[j]:
            length[j], came_from[j] = way, column

"""The layout of a run: which rank does what, for any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from hpcgpu.errors import WorldError
from hpcgpu.model import Layout, NodeLayout
from hpcgpu.model.allocation import NO_GPU


class RankRecord(NamedTuple):
    """The facts that a rank sends to the rendezvous."""

    rank: int
    host: str
    gpus: int
    isolated: bool = False
    devices: str = ""
    trouble: str = ""


def plan_layout(
    records: Sequence[RankRecord],
    node_count: int = 0,
    workers_per_gpu: int = 1,
    cpu_workers: int = 0,
    *,
    scheduler: bool = True,
    without_gpus: bool = False,
) -> Layout:
    """Plan which rank starts which workers; WorldError if a node of the job has no rank, or no rank has a GPU.

    The workers of a node are divided among its ranks, except rank 0 if it is the scheduler and not the only rank. Ranks
    in excess of GPUs are idle. An isolated rank is a node of its own. Each host has ``cpu_workers`` more, without GPU.
    ``without_gpus``: no rank needs a GPU.
    """
    devices: dict[str, set[str]] = {}
    for record in records:
        devices.setdefault(record.host, set()).add(record.devices)
    homes: dict[str, list[RankRecord]] = {}
    for record in sorted(records, key=lambda r: r.rank):
        alone = record.isolated or len(devices[record.host]) > 1
        home = f"{record.host}/{record.rank}" if alone else record.host
        homes.setdefault(home, []).append(record)
    hosts = len({r.host for r in records})
    if node_count > hosts:
        raise WorldError(
            f"the job has {node_count} nodes, but ranks run on {hosts} of them; "
            "start at least one rank per node (hpcgpu plan --script shows a command that does)"
        )
    if not without_gpus and not any(r.gpus for r in records):
        troubles = {r.host: r.trouble for r in records if r.trouble}
        why = f" ({'; '.join(f'{host}: {trouble}' for host, trouble in troubles.items())})" if troubles else ""
        raise WorldError(f"no GPU can be opened on any node of this run{why}: {NO_GPU}")
    of_host: dict[str, list[str]] = {}
    for home, ranks in homes.items():
        of_host.setdefault(ranks[0].host, []).append(home)
    beside: dict[str, int] = {}
    for mine in of_host.values():
        beside |= {home: len(share) for home, share in zip(mine, _shares(cpu_workers, len(mine)), strict=True)}
    return Layout(
        tuple(
            _plan_node(i, tuple(ranks), workers_per_gpu, beside[home], scheduler)
            for i, (home, ranks) in enumerate(homes.items())
        )
    )


def _plan_node(index: int, records: tuple[RankRecord, ...], each: int, cpu_workers: int, scheduler: bool) -> NodeLayout:
    ranks = tuple(r.rank for r in records)
    hosts = [r for r in ranks if r != 0 or not scheduler] or list(ranks)
    on_gpus = max(r.gpus for r in records) * each
    shares = dict(zip(hosts, _shares(on_gpus, len(hosts)), strict=True))
    # From the last rank on: it has no GPU if there are more ranks than GPUs.
    for rank, share in zip(reversed(hosts), _shares(cpu_workers, len(hosts)), strict=True):
        shares[rank] += tuple(on_gpus + position for position in share)
    return NodeLayout(index, ranks, tuple(shares.get(r, ()) for r in ranks), cpu_workers)


def _shares(workers: int, ranks: int) -> list[tuple[int, ...]]:
    """Deal positions 0..workers-1 in contiguous blocks, sizes within one, larger ones first."""
    size, extra = divmod(workers, ranks)
    starts = [i * size + min(i, extra) for i in range(ranks + 1)]
    return [tuple(range(a, b)) for a, b in itertools.pairwise(starts)]

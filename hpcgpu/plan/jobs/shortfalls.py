"""Shortfalls: more than the queues have, in the request for a job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hpcgpu.errors import opt, plain
from hpcgpu.model import JobSpec, Offer
from hpcgpu.units import format_bytes, format_duration


def shortfalls(spec: JobSpec, offers: Sequence[Offer]) -> tuple[str, ...]:
    """Return what the job requests and none of the queues has, in users' option names; () if one may run it."""
    queues = {offer.queue: [o for o in offers if o.queue == offer.queue] for offer in offers}
    return min((tuple(map(plain, _of_queue(spec, kinds))) for kinds in queues.values()), key=len, default=())


def _of_queue(spec: JobSpec, kinds: Sequence[Offer]) -> Iterator[str]:
    queue = f"queue {kinds[0].queue}"
    longest_s, most, nodes = kinds[0].walltime_s, kinds[0].most_nodes, sum(kind.nodes for kind in kinds)
    if spec.walltime_s and longest_s is not None and -(-spec.walltime_s // 60) > longest_s / 60:
        walltime = opt("walltime", format_duration(spec.walltime_s))
        yield f"{walltime}, but {queue} has a limit of {format_duration(longest_s)}"
    if most is not None and spec.nodes > most:
        yield f"{opt('nodes', spec.nodes)}, but {queue} gives a job {most} at most"
    elif spec.nodes > nodes:
        yield f"{opt('nodes', spec.nodes)}, but {queue} has {nodes}"
    too_much = list(_of_each_node(spec, kinds, queue))
    yield from too_much
    fits = sum(kind.nodes for kind in kinds if not any(_of_each_node(spec, [kind], queue)))
    if not too_much and fits < spec.nodes <= nodes:
        fitting = f"only {fits} of the {nodes} nodes of {queue} have the requested resources"
        yield f"{opt('nodes', spec.nodes)}, but {fitting}"


def _of_each_node(spec: JobSpec, kinds: Sequence[Offer], queue: str) -> Iterator[str]:
    gpus = _most([kind.gpus for kind in kinds])
    if gpus is not None and spec.gpus_per_node > gpus:
        yield f"{opt('gpus_per_node', spec.gpus_per_node)}, but the nodes of {queue} have {gpus} at most"
    cpus, cores = _most([kind.cpus for kind in kinds]), spec.tasks_per_node * (spec.cpus_per_task or 1)
    if cpus is not None and cores > cpus:
        each = opt("cores_per_gpu")
        yield f"{cores} cores of each node ({each} of each GPU), but the nodes of {queue} have {cpus} at most"
    memory, size = _most([kind.memory_bytes for kind in kinds]), spec.memory_per_node_bytes
    if memory is not None and size is not None and size > memory:
        yield f"{opt('memory', format_bytes(size))}, but the nodes of {queue} have {format_bytes(memory)} at most"


def _most(counts: Sequence[int | None]) -> int | None:
    """Return the largest count; None if one is unknown."""
    known = [count for count in counts if count is not None]
    return max(known) if len(known) == len(counts) else None

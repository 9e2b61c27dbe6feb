"""Queues and nodes of a site, for the draft of its site file: Slurm 22.05.8, OpenPBS 23.06.06."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcgpu.batch.batch_system import limit_s
from hpcgpu.batch.pbs import size_bytes
from hpcgpu.batch.slurm import ask_offers, list_offers
from hpcgpu.model import Command, Offer, Result
from hpcgpu.model.site import Inventory, NodeType, Queue
from hpcgpu.units import format_duration

_WORD = re.compile(r"(\w+)=(\S*)")
_ARRAY = re.compile(r"^MaxArraySize\s*=\s*(\d+)", re.MULTILINE)


def questions(batch: str) -> tuple[Command, ...]:
    """Return the commands that ask for queues, their limits and their nodes, in the order of :func:`read`'s results."""
    if batch == "slurm":
        return (
            ask_offers(None),
            Command(("scontrol", "show", "partition", "--oneliner")),
            Command(("scontrol", "show", "config")),
        )
    return (
        Command(("pbsnodes", "-av", "-F", "json")),
        Command(("qstat", "-Q", "-f", "-F", "json")),
        Command(("qstat", "-B", "-f", "-F", "json")),
    )


def read(batch: str, results: Sequence[Result]) -> Inventory:
    """Parse the answers; ``silent`` names the programs that failed."""
    silent = tuple(
        f"{result.argv[0]}: {' '.join(result.message.split())}" for result in results if result.returncode != 0
    )
    first, second, third = ("" if result.returncode != 0 else result.stdout for result in results)
    return (_slurm if batch == "slurm" else _pbs)(first, second, third, silent)


def _limits(fewest: int, most: int) -> tuple[int, int] | None:
    """Return the limits if a job can keep to them; None if they close the queue, or if no field names one."""
    return (max(fewest, 1), most) if max(fewest, 1) <= most else None


def _name(offer: Offer) -> str:
    """Name nodes with GPUs as a type of a site file: ``a100x4``."""
    return f"{re.sub(r'[^a-z0-9-]', '-', offer.gpu.lower()) or 'gpu'}x{offer.gpus}"


def _types(offers: Sequence[Offer]) -> dict[str, NodeType]:
    """Return the types of nodes with GPUs, each with the least of its nodes' resources."""
    out: dict[str, NodeType] = {}
    for name in dict.fromkeys(_name(offer) for offer in offers if offer.gpus):
        same = [offer for offer in offers if _name(offer) == name]
        cpus = [offer.cpus for offer in same if offer.cpus]
        memory = [offer.memory_bytes for offer in same if offer.memory_bytes]
        out[name] = NodeType(
            gpus=same[0].gpus or 0,
            gpu=same[0].gpu,
            cpus=min(cpus, default=None),
            job_memory=f"{min(memory) >> 20} MiB" if memory else None,
        )
    return out


def _main_type(offers: Sequence[Offer]) -> str:
    """Return the type of most nodes of a queue; "" without GPUs."""
    counts = Counter[str]()
    for offer in offers:
        if offer.gpus:
            counts[_name(offer)] += offer.nodes
    return counts.most_common(1)[0][0] if counts else ""


# --- Slurm


def _slurm(sinfo: str, partitions: str, config: str, silent: tuple[str, ...]) -> Inventory:
    offers = list(list_offers(sinfo))
    lines = [dict(_WORD.findall(line)) for line in partitions.splitlines()]
    partitions_by_name = {fields.get("PartitionName", ""): fields for fields in lines}
    by_queue: dict[str, list[Offer]] = {}
    for offer in offers:
        by_queue.setdefault(offer.queue, []).append(offer)
    gpus = {offer.gpu for offer in offers if offer.gpus}
    limit = _ARRAY.search(config)
    return Inventory(
        batch="slurm",
        queues=tuple(
            _partition(k, fields)
            for q, k in by_queue.items()
            if _main_type(k) and (fields := partitions_by_name.get(q, {})).get("State", "UP") in ("UP", "DOWN")
        ),
        nodes=_types(offers),
        default=next((offer.queue for offer in offers if offer.is_default), ""),
        gpu_type=gpus.pop() if len(gpus) == 1 else "",
        array_limit=int(limit[1]) if limit else None,
        silent=silent,
    )


def _partition(kinds: Sequence[Offer], fields: Mapping[str, str]) -> Queue:
    first = kinds[0]
    fewest, most, longest = first.fewest_nodes, first.most_nodes, first.walltime_s
    return Queue(
        name=first.queue,
        nodes=None if fewest is None or most is None else _limits(fewest, most),
        walltime=format_duration(longest) if longest else None,
        shared={"EXCLUSIVE": False, "": None}.get(fields.get("OverSubscribe", ""), True),
        node=_main_type(kinds),
        text=_times(fields.get("DefaultTime", "")),
    )


def _times(default: object, fewest: object = "") -> str:
    """Format for people the time of a queue's job without walltime, and the shortest that it may ask for."""
    texts = {"a job without walltime has": default, "the shortest walltime is": fewest}
    times = {text: limit_s(str(time)) for text, time in texts.items()}
    return "; ".join(f"{text} {format_duration(time_s)}" for text, time_s in times.items() if time_s)


# --- PBS


def _pbs(nodes: str, queues: str, server: str, silent: tuple[str, ...]) -> Inventory:
    offers = list(_vnodes(nodes))
    facts = next(iter(_part(server, "Server").values()), {})
    sizes = [part.get("max_array_size") for part in (facts, *_part(queues, "Queue").values())]
    limit = min((size for size in sizes if isinstance(size, int)), default=None)
    return Inventory(
        batch="pbs",
        queues=tuple(_queues(_part(queues, "Queue"), _types(offers))),
        nodes=_types(offers),
        default=str(facts.get("default_queue", "")),
        array_limit=limit,
        silent=silent,
    )


def _part(text: str, name: str) -> dict[str, dict[str, Any]]:
    try:
        part = json.loads(text)[name]
    except (ValueError, KeyError, TypeError):
        return {}
    return {k: v for k, v in part.items() if isinstance(v, dict)} if isinstance(part, dict) else {}


def _vnodes(text: str) -> Iterator[Offer]:
    """Yield each host, its vnodes added up."""
    hosts: dict[str, list[dict[str, Any]]] = {}
    for name, vnode in _part(text, "nodes").items():
        has = vnode.get("resources_available")
        if isinstance(has, dict):
            hosts.setdefault(str(has.get("host", name)), []).append(has)
    for parts in hosts.values():
        yield Offer(
            queue="",
            nodes=1,
            gpus=sum(_count(part.get("ngpus")) for part in parts),
            gpu=str(next((part["gpu_type"] for part in parts if part.get("gpu_type")), "")),
            cpus=sum(_count(part.get("ncpus")) for part in parts) or None,
            memory_bytes=sum(size_bytes(str(part.get("mem", ""))) for part in parts) or None,
        )


def _count(value: object) -> int:
    return int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else 0


def _queues(queues: Mapping[str, Mapping[str, Any]], types: Mapping[str, NodeType]) -> Iterator[Queue]:
    """Yield the open queues; PBS does not show here which nodes are theirs."""
    for name, queue in queues.items():
        if queue.get("enabled") != "True" or queue.get("started") == "False":
            continue
        parts = (queue.get(f"resources_{part}") for part in ("max", "min", "default"))
        most, least, default = (part if isinstance(part, dict) else {} for part in parts)
        gpus, nodes = _count(most.get("ngpus")), _count(most.get("nodect"))
        yield Queue(
            name=name,
            nodes=_limits(_count(least.get("nodect")), nodes),
            gpus=_limits(_count(least.get("ngpus")), gpus),
            walltime=format_duration(seconds) if (seconds := limit_s(str(most.get("walltime", "")))) else None,
            node=next(iter(types)) if len(types) == 1 else "",
            text=_times(default.get("walltime"), least.get("walltime")),
        )

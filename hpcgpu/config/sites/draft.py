"""The draft of a site file, from what the batch system and this node report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

import yaml

from hpcgpu.config.sites.node_topology import places_of
from hpcgpu.model import Topology
from hpcgpu.model.site import Inventory

UNKNOWN = "# unknown:"


_MORE = {
    "title": "the machine and the centre",
    "match": "a variable or host name that tells this machine from others; match: {host: ...}",
    "queues": "none with GPUs was seen; queues: [{name: gpu, nodes: [1, 8], walltime: 24h}]",
    "nodes": "none with GPUs was seen; nodes: {gpu: {gpus: 4, cpus: 64}}",
    "defaults": "the queue that is taken where queue= is not given; defaults: {queue: ...}",
    "account": "is a job without one refused, and which variable has it; account: {needed: true, env: [...]}",
    "rules": "what must jobs say or not say; rules: [{require: walltime}, {forbid: --mem, why: ...}]",
    "network.ucx": "has UCX a transport for the network, and which interfaces are used",
    "launcher": "what starts ranks, if it is not found by itself; launcher: {command: [mpiexec]}",
    "scratch": "the fast local folder of the nodes; scratch: {path: $TMPDIR}",
    "modules": "must every job load some; modules: {load: [cuda]}",
    "login": "what happens to processes that compute on login nodes; login: {policy: ...}",
    "dashboard": "has the site a portal for web pages of nodes; dashboard: {url: 'https://.../{node}/{port}/'}",
    "charge": "what a job costs; charge: {unit: SU, per_gpu_hour: 1}",
}


def render_draft(
    inventory: Inventory, name: str, date: str, topology: Topology | None, match: Mapping[str, str]
) -> str:
    """Return the YAML of a draft, which ``hpcgpu site check`` accepts, and below it what is unknown.

    ``topology`` is this node's, None if unreadable; ``match`` has variables that name the machine, with their values.
    """
    is_slurm = inventory.batch == "slurm"
    programs = "sinfo and scontrol" if is_slurm else "pbsnodes and qstat"
    dialect = {"gpu_type": inventory.gpu_type, "array_limit": inventory.array_limit}
    blocks: dict[str, dict[str, Any]] = {
        "match": {"env": dict(match)} if match else {},
        "dialect": {key: value for key, value in dialect.items() if value},
        "defaults": {"queue": inventory.default} if inventory.default in [q.name for q in inventory.queues] else {},
    }
    places = {key: places_of(node, topology) for key, node in inventory.nodes.items()}
    facts: dict[str, Any] = {
        **{"version": 2, "name": name, "batch": inventory.batch},
        "sources": {"M": {"title": f"what {programs} say on the machine", "date": date}},
        **{key: {**block, "source": "M"} for key, block in blocks.items() if block},
        "queues": [{**_as_plain(queue), "source": "M"} for queue in inventory.queues],
        "nodes": {key: {**_as_plain(node), **places[key], "source": "M"} for key, node in inventory.nodes.items()},
    }
    facts = {key: value for key, value in facts.items() if value}
    gpus = "gpus-per-node, gres, gpus or none" if is_slurm else "ngpus, gpus or none"
    unknown = [
        *inventory.silent,
        f"dialect: how the site wants GPUs, CPUs and memory asked for (gpus: {gpus}; memory: none; cpus: false)",
        "how much of the memory jobs may ask for, if it is less than job_memory",
    ]
    for queue in inventory.queues:
        if missing := [key for key in ("nodes", "walltime") if getattr(queue, key) is None]:
            unknown.append(f"{' and '.join(missing)} of queue {queue.name}, or unlimited")
    for key in (key for key, values in places.items() if not values):
        unknown.append(f"{key}.numa_cores, gpu_numa, ports: run hpcgpu site new on such a node, in a job")
    unknown += [f"{key}: {text}" for key, text in _MORE.items() if key not in facts]
    text = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, width=1000, default_flow_style=None)
    return text + "".join(f"{UNKNOWN} {line}\n" for line in unknown)


def _as_plain(block: Any) -> dict[str, Any]:  # a block of the schema
    """Return a block's values that are not its defaults."""
    plain = asdict(block)
    defaults = {f.name: f.default_factory() if f.default_factory is not MISSING else f.default for f in fields(block)}
    return {name: value for name, value in plain.items() if value != defaults[name]}

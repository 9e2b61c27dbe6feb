"""A rank's node: what the rank was granted of it, and the workers that are planned on it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcgpu.errors import LaunchError
from hpcgpu.host import log
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import CpuSet

if TYPE_CHECKING:
    from hpcgpu.config.terms import Terms
    from hpcgpu.model import Gpu, Layout, RunDocument, WorkerSpec
    from hpcgpu.plan.layout import RankRecord

Records = Sequence[Mapping[str, Any]]


def granted(terms: Terms, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return what this rank may use, for its record in the meeting."""
    if terms.gpus is not None:
        from hpcgpu.model.simulated import parse_simulated

        count, devices = parse_simulated(terms.gpus).per_node, ""
    else:
        count, devices = len(_real_gpus(environ)), environ.get("CUDA_VISIBLE_DEVICES", "")
    wanted = terms.gpus_per_node
    return {"gpus": min(count, wanted or count), "devices": devices, "cpus": str(CpuSet(os.sched_getaffinity(0)))}


def _real_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    from hpcgpu.host import gpus

    found, _ = gpus.nvml_facts()
    return gpus.visible(found, environ.get("CUDA_VISIBLE_DEVICES"))


def rank_record(record: Mapping[str, Any]) -> RankRecord:
    """Return the part of a record that the layout is planned from."""
    from hpcgpu.plan.layout import RankRecord

    return RankRecord(record["rank"], record["host"], record["gpus"], record["isolated"], record["devices"])


def plan(
    run: RunDocument, environ: Mapping[str, str], scratch: str, records: Records, layout: Layout, rank: int
) -> tuple[tuple[int, WorkerSpec], ...]:
    """Return the workers of the leader ``rank``, each with the rank that it belongs to.

    Raises
    ------
    LaunchError
        The node has fewer GPUs than ``gpus_per_node`` says.

    """
    from hpcgpu.host import addresses, cgroup, discover  # psutil takes 30 CPU ms, which every rank would pay
    from hpcgpu.model.simulated import parse_simulated
    from hpcgpu.plan.binding import place_simulated
    from hpcgpu.plan.workers import NodeFacts, node_warnings, plan_workers

    home, host, settings = layout.node_of(rank), records[rank]["host"], run.settings
    topology = discover.topology()
    if settings.gpus is not None:
        simulated = parse_simulated(settings.gpus)
        gpus = place_simulated(topology, simulated.per_node, simulated.memory_bytes, host)
    else:
        visible = {g.uuid for g in _real_gpus(environ)}
        gpus = tuple(g for g in topology.gpus if g.uuid in visible)
        _say(host, topology.warnings)
    if settings.gpus_per_node and len(gpus) < settings.gpus_per_node:
        raise LaunchError(
            f"{settings.gpus_per_node} GPUs per node were asked for ({settings.where('gpus_per_node')}), "
            f"but {len(gpus)} can be opened on {host}"
        )
    masks = {r: CpuSet.parse(records[r]["cpus"]) for r in home.ranks}
    allowed = CpuSet().union(*masks.values())
    os.sched_setaffinity(0, allowed)
    facts = NodeFacts(
        name=host,
        topology=topology,
        gpus=gpus,
        allowed=CpuSet(allowed),
        allowed_nodes=cgroup.granted_memory_nodes(),
        memory_bytes=cgroup.memory_limit_bytes(),
        environ=environ,
        scratch=scratch,
        masks=masks if settings.respect_launcher else {},
        interfaces=addresses.usable_interfaces(),
        **_job(run, environ),
    )
    before = [n for n in layout.nodes if n.node < home.node and records[n.leader]["host"] == host]
    workers = plan_workers(settings, facts, home, before)
    _say(host, node_warnings(settings, masks, [spec for _, spec in workers]))
    return workers


def _job(run: RunDocument, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the job by which the workers are named, of a member."""
    if run.shape != "member":
        return {}
    job = read_allocation(environ)
    # without a batch system, and nobody who says, the process that was started is the job
    return {"job_id": job.job_id or str(os.getpid()), "restart_count": job.restart_count}


def _say(host: str, warnings: Sequence[str]) -> None:
    for warning in warnings:
        log.say(f"{host}: {warning}")

"""A rank's node: what the rank was granted of it, and the workers that are planned on it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcgpu.errors import LaunchError
from hpcgpu.host import log
from hpcgpu.launch.environment import read_allocation
from hpcgpu.model import CpuSet

if TYPE_CHECKING:
    from hpcgpu.config.terms import Terms
    from hpcgpu.model import Gpu, Layout, RunDocument, Settings, Topology, WorkerSpec
    from hpcgpu.plan.layout import RankRecord

Records = Sequence[Mapping[str, Any]]


class Planned(NamedTuple):
    """The workers of a leader, each with the rank that it belongs to, and what people should know of the node."""

    workers: tuple[tuple[int, WorkerSpec], ...]
    notes: tuple[str, ...]


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
) -> Planned:
    """Return the workers of the leader ``rank``.

    Raises
    ------
    LaunchError
        The node has fewer GPUs than ``gpus_per_node`` says.

    """
    from hpcgpu.host import addresses, cgroup, discover  # psutil takes 30 CPU ms, which every rank would pay
    from hpcgpu.plan.workers import NodeFacts, node_warnings, plan_workers

    home, host, settings = layout.node_of(rank), records[rank]["host"], run.settings
    topology = discover.topology()
    gpus = _gpus_of(settings, topology, environ, host)
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
    notes = topology.warnings if settings.gpus is None else ()
    notes += node_warnings(settings, masks, [spec for _, spec in workers])
    log.say_of(host, notes)
    return Planned(workers, (*notes, *_folder_notes(settings.local_directory, len(workers))))


def _gpus_of(settings: Settings, topology: Topology, environ: Mapping[str, str], host: str) -> tuple[Gpu, ...]:
    """Return the GPUs of a node that its workers may use, simulated or real."""
    from hpcgpu.model.simulated import parse_simulated
    from hpcgpu.plan.binding import place_simulated

    if settings.gpus is not None:
        simulated = parse_simulated(settings.gpus)
        gpus = place_simulated(topology, simulated.per_node, simulated.memory_bytes, host)
    else:
        visible = {g.uuid for g in _real_gpus(environ)}
        gpus = tuple(g for g in topology.gpus if g.uuid in visible)
    if settings.gpus_per_node and len(gpus) < settings.gpus_per_node:
        raise LaunchError(
            f"{settings.gpus_per_node} GPUs per node were asked for ({settings.where('gpus_per_node')}), "
            f"but {len(gpus)} can be opened on {host}"
        )
    return gpus


def _folder_notes(folder: str | None, workers: int) -> tuple[str, ...]:
    """Return what the workers are going to say of the folder that they spill to, each for itself."""
    import dask

    from hpcgpu.spill import limits, places

    each_bytes = limits.size_of("max-spill", dask.config.get("distributed.worker.memory.max-spill"))
    return places.notes(folder, each_bytes * workers)


def _job(run: RunDocument, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the job by which the workers are named, of a member."""
    if run.shape != "member":
        return {}
    job = read_allocation(environ)
    # without a batch system, and nobody who says, the process that was started is the job
    return {"job_id": job.job_id or str(os.getpid()), "restart_count": job.restart_count}

"""What would be planned on this machine, as text."""

from __future__ import annotations

import os

from hpcgpu.host import cgroup, discover
from hpcgpu.model import NodeLayout, Settings
from hpcgpu.model.simulated import parse_simulated
from hpcgpu.plan.binding import place_simulated
from hpcgpu.plan.explain import binding_table, render_table
from hpcgpu.plan.workers import NodeFacts, plan_workers


def topology_table(planned: str | None) -> str:
    """Return what each GPU's worker would be tied to on this machine, and what is known of it."""
    topology = discover.topology()
    shown = topology.gpus
    if planned is not None:
        simulated = parse_simulated(planned)
        shown = place_simulated(topology, simulated.count, simulated.memory_bytes, "this")
    lines = [f"read by {topology.source}", *(f"note: {w}" for w in topology.warnings)]
    if not shown:
        return "\n".join([*lines, "no GPU here; plan for some: hpcgpu topo --gpus sim:4", ""])
    facts = NodeFacts(
        name="gpu",
        topology=topology,
        gpus=tuple(shown),
        allowed=cgroup.granted_cpus(),
        allowed_nodes=cgroup.granted_memory_nodes(),
        memory_bytes=cgroup.memory_limit_bytes(),
        environ=os.environ,
        scratch="",
    )
    all_on_one = NodeLayout(0, (0,), (tuple(range(len(shown))),))
    limits = Settings(device_memory_limit=0)  # the table has none, and a GPU's size may be unknown
    specs = [spec for _, spec in plan_workers(limits, facts, all_on_one)]
    return "\n".join([*lines, render_table(binding_table(specs))])

"""A job before it is submitted: layout, cost, warnings, and what differs between two plans."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu.model import JobSpec, Settings, Site
from hpcgpu.model.site import Charge, Network, Queue, Source
from hpcgpu.report import job as preview
from hpcgpu.report.job import Preview, layout_of

SITE = Site(
    name="here",
    batch="slurm",
    sources={"D": Source(title="the guide", date="2026-08")},
    queues=(Queue(name="gpu", charge=2.0), Queue(name="plain")),
    network=Network(kind="slingshot", ucx=False, source="D"),
    charge=Charge(unit="SU", per_node_hour=3.0, source="D"),
)
SPEC = JobSpec(
    name="hpcgpu", argv=("hpcgpu",), nodes=2, tasks_per_node=4, gpus_per_node=4, walltime_s=7200, queue="gpu"
)


def planned(spec: JobSpec = SPEC, site: Site | None = SITE, settings: Settings | None = None) -> Preview:
    return Preview(
        settings=settings or Settings(),
        values=(("queue", "gpu", "option --queue"),),
        spec=spec,
        script="#!/bin/bash\nhpcgpu\n",
        site=site,
        layout=layout_of(Settings(), spec.nodes, 4),
        node=None,
        node_from="nobody says it",
    )


@given(
    nodes=st.integers(1, 20),
    gpus=st.integers(1, 8),
    ranks=st.sampled_from(["gpu", "node"]),
    each=st.integers(1, 3),
    beside=st.integers(0, 2),
)
def test_layout_has_all_workers_and_rank_0_first(nodes: int, gpus: int, ranks: str, each: int, beside: int) -> None:
    layout = layout_of(Settings(ranks=ranks, workers_per_gpu=each, cpu_workers=beside), nodes, gpus)
    assert layout.worker_count == nodes * (gpus * each + beside)
    assert layout.nodes[0].ranks[0] == 0
    assert sum(len(node.ranks) for node in layout.nodes) == (nodes * gpus + 1 if ranks == "gpu" else nodes)
    assert all(not node.idle for node in layout.nodes)


def test_cost_has_nodes_hours_queue_rule_and_source() -> None:
    assert preview.cost(planned()) == (
        "about 24 SU if it runs to its limit of 02:00:00: 3 for a node and hour times 2 in gpu (the guide, 2026-08)"
    )
    by_gpu = replace(SITE, charge=Charge(per_gpu_hour=0.5, source="D"))
    assert preview.cost(planned(replace(SPEC, queue="plain"), by_gpu)) == (
        "about 8 units if it runs to its limit of 02:00:00: 0.5 for a GPU and hour (the guide, 2026-08)"
    )


@pytest.mark.parametrize("spec", [replace(SPEC, walltime_s=None), SPEC])
def test_no_cost_is_invented(spec: JobSpec) -> None:
    site = SITE if spec.walltime_s is None else replace(SITE, charge=Charge(text="ask them"))
    assert preview.cost(planned(spec, site)) == ""
    assert preview.cost(planned(site=None)) == ""


def test_a_poor_request_says_what_to_write() -> None:
    said = list(preview.warnings(planned(replace(SPEC, walltime_s=None))))
    assert [text.rpartition(" ")[2] for text in said[:1]] == ["cores_per_gpu="]
    assert "4 cores for 4 GPUs" in said[0]
    assert "memory=" in said[1]
    assert "walltime=" in said[2]
    good = replace(SPEC, cpus_per_task=8, memory_per_node_bytes=1 << 38)
    assert list(preview.warnings(planned(good))) == []
    whole = replace(SITE, dialect={"cpus": False, "memory": "none"})
    assert list(preview.warnings(planned(site=whole))) == []
    ucx = Settings(protocol="ucx")
    assert list(preview.warnings(planned(good, settings=ucx))) == ["UCX has no transport for the network of here"]


def test_plan_equals_itself_and_differences_have_paths() -> None:
    before = json.loads(json.dumps(preview.described(planned())))
    assert preview.differences(before, before) == ()
    other = replace(planned(replace(SPEC, nodes=3, walltime_s=3600)), script="#!/bin/bash\nhpcgpu --other\n")
    found = preview.differences(before, json.loads(json.dumps(preview.described(other))))
    assert "request.nodes: 2 (default) -> 3 (default)" in found
    assert "script: -hpcgpu" in found
    assert "script: +hpcgpu --other" in found
    assert any(line.startswith("estimates: ") or line.startswith("estimates[1]: ") for line in found)


def test_the_text_has_all_sections_in_their_order() -> None:
    text = preview.render(planned())
    heads = [line.removesuffix(":") for line in text.splitlines() if line and not line.startswith(" ")]
    assert heads == ["settings", "request", "layout", "node", "memory", "network", "estimates", "warnings", "script"]
    assert "  slingshot, for which UCX has no transport (the guide, 2026-08)" in text

"""A site's documented nodes, beside nodes as they are."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from paths import ROOT

from hpcgpu.config.sites.read import read_site
from hpcgpu.errors import ConfigError
from hpcgpu.model import CpuSet, Site, Topology
from hpcgpu.model.site_facts import NodeType
from hpcgpu.plan.binding.site_node import disagreements, topology_of


def load(name: str) -> Site:
    return read_site((ROOT / "site_configs" / f"{name}.yaml").read_text(), name)


DELTA, POLARIS = load("delta"), load("polaris")
A100X4 = topology_of(DELTA.nodes["a100x4"])


def test_a_node_as_documented() -> None:
    for name, node in DELTA.nodes.items():
        queue = next(queue.name for queue in DELTA.queues if queue.node == name)
        assert disagreements(topology_of(node), DELTA, queue) == ()
    assert disagreements(replace(A100X4, gpus=A100X4.gpus[:1]), DELTA, None) == ()  # a job may have a part of it
    assert disagreements(A100X4, Site(name="x", batch="slurm"), None) == ()  # no facts
    assert disagreements(A100X4, Site(name="x", batch="slurm", nodes={"a": NodeType(gpus=4)}), None) == ()
    two_kinds = replace(DELTA, defaults={})  # of an unknown queue the most similar type counts
    assert disagreements(topology_of(DELTA.nodes["h200x8"]), two_kinds, "new-queue") == ()
    with pytest.raises(ConfigError, match="NUMA nodes of the GPUs are not documented"):
        topology_of(NodeType(gpus=4))


@pytest.mark.parametrize(
    ("topology", "said"),
    [
        (
            replace(A100X4, gpus=tuple(replace(gpu, numa_node=i) for i, gpu in enumerate(A100X4.gpus))),
            r"says GPUs on the NUMA nodes 3, 2, 1, 0 \(Delta docs, .*; delta:\d+\), this node has them on 0, 1",
        ),
        (
            replace(
                A100X4, numa_nodes=tuple(replace(n, memory_bytes=2 * n.memory_bytes) for n in A100X4.numa_nodes[:2])
            ),
            r"says 4 NUMA nodes \(.*\), this node has 2: ",
        ),
        (replace(A100X4, gpus=A100X4.gpus * 2), r"says 4 GPUs \(.*\), this node has 8"),
        (
            replace(A100X4, numa_nodes=tuple(replace(n, memory_bytes=n.memory_bytes // 2) for n in A100X4.numa_nodes)),
            r"says .*iB of memory \(.*\), this node has .*iB: ",
        ),
        (replace(A100X4, cores=(CpuSet([0]),)), r"says 64 cores \(.*\), this node has 1"),
        (
            replace(A100X4, nics=(replace(A100X4.nics[0], kind="infiniband"),)),
            r"says its network is slingshot \(.*\), this node has infiniband",
        ),
    ],
)
def test_a_difference_names_both_and_the_source(topology: Topology, said: str) -> None:
    [words] = disagreements(topology, DELTA, "gpuA100x4")
    assert re.search(said, words)
    assert words.startswith("the site file of delta says")

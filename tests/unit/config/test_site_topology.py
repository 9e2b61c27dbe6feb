"""A site's documented nodes as topologies."""

from __future__ import annotations

import pytest
from paths import ROOT

from hpcgpu.config.sites.machine import topology_of
from hpcgpu.config.sites.read import read_site
from hpcgpu.errors import ConfigError
from hpcgpu.model.site_facts import NodeType


def test_topology_of_a_documented_node_has_its_gpus_and_cores() -> None:
    site = read_site((ROOT / "site_configs" / "delta.yaml").read_text(), "delta")
    for node in site.nodes.values():
        topology = topology_of(node)
        assert tuple(gpu.numa_node for gpu in topology.gpus) == node.gpu_numa
        assert len(topology.cores) == sum(node.numa_cores)
    with pytest.raises(ConfigError, match="NUMA nodes of the GPUs are not documented"):
        topology_of(NodeType(gpus=4))

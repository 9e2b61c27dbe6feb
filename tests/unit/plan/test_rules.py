"""The rules that the topology benchmark sets beside ours do what their owners' do: counts known from those machines."""

import sys

import pytest
from machines import DOCUMENTED, machine
from paths import ROOT

from hpcgpu.model import Topology

sys.path.append(str(ROOT / "benchmarks"))

import _rules as rules

SD665, CORONA, LASSEN = machine("turin-4gpu-nvml"), machine("epyc-corona"), machine("coral-lassen")
JUWELS = DOCUMENTED["juwels-booster-a100"]  # as JURECA-DC, MeluXina and XE8640 H100


def placed_right(topology: Topology, rule: rules.CoreRule, part: str = "os_index") -> int:
    """Workers whose first core is on the NUMA node, or the package, of their GPU."""
    where = {pu: getattr(n, part) for n in topology.numa_nodes for pu in n.cpuset}
    home = {n.os_index: getattr(n, part) for n in topology.numa_nodes}
    pairs = zip(rule(topology), rules.in_pci_order(topology), strict=True)
    return sum(where[min(cores)] == home[gpu.numa_node] for cores, gpu in pairs)


@pytest.mark.parametrize(
    ("topology", "bindpcie", "block", "socket", "dask_cuda"),
    [
        pytest.param(JUWELS, 1, 0, 4, 1, id="JUWELS Booster"),
        pytest.param(SD665, 0, 1, 4, 1, id="SD665-N"),
        pytest.param(CORONA, 0, 1, 4, 1, id="Corona"),
        pytest.param(LASSEN, 4, 4, 4, 2, id="Lassen"),
    ],
)
def test_workers_placed_right(topology: Topology, bindpcie: int, block: int, socket: int, dask_cuda: int) -> None:
    assert placed_right(topology, rules.bindpcie) == bindpcie
    assert placed_right(topology, rules.block_of_cores) == block
    assert placed_right(topology, rules.socket_by_rank, "package") == socket
    assert placed_right(topology, rules.dask_cuda_worker) == dask_cuda

"""Ranks under ``hpcgpu bind --report``, each beside its GPU by its mask and by its report, on nodes of this machine."""

import json
import re

from hpcgpu.host import discover
from hpcgpu.model import CpuSet
from hpcgpu.plan.binding.bindings import simulated_gpus
from hpcgpu.plan.binding.ranks import plan_rank

NAMES = ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", "LOCAL_RANK")
MASK = f"""import json, os
local = next(os.environ[name] for name in {NAMES} if name in os.environ)
os.write(1, (json.dumps([int(local), sorted(os.sched_getaffinity(0))]) + chr(10)).encode())"""


def count(allowed: CpuSet) -> int:
    """Four ranks, or two where a part of a large machine is allowed: ranks that share cores are refused there."""
    return 4 if len(allowed) >= 8 or len(discover.topology().cores) < 4 else 2


def words(allowed: CpuSet, python: str) -> list[str]:
    """Return what follows ``hpcgpu``."""
    return ["bind", "--gpus", f"sim:{count(allowed)}", "--report", "--", python, "-c", MASK]


def check(output: str, host: str, allowed: CpuSet) -> None:
    """The ranks of ``host`` have the places of workers; their reports are read from the kernel."""
    topology, size = discover.topology(), count(allowed)
    gpus = simulated_gpus(topology, size, 1 << 28, host)
    masks = dict(map(json.loads, re.findall(r"^\[\d.*\]$", output, re.MULTILINE)))
    assert masks.keys() == set(range(size)), output
    for rank, mask in masks.items():
        binding = plan_rank(topology, gpus, allowed, rank, size).binding
        assert CpuSet(mask) == binding.cpuset
        (line,) = re.findall(rf"^hpcgpu: rank {rank} of {size} .*", output, re.MULTILINE)
        place = f"local rank {rank} of {size} on {host}: GPU {gpus[rank].pci} {gpus[rank].uuid}; PUs {binding.cpuset};"
        assert place in line
        assert "planned" not in line

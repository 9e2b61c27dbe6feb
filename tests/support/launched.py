"""What ranks that a launcher started say of themselves, and what was promised: see ``launch_probe.py``."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from hpcgpu.model.layout import World

PROBE = "tests/support/launch_probe.py"
ME = ("@ME@",)


def check(seen: dict[str, Any], world: World, hosts: list[str]) -> None:
    ranks = seen["ranks"]
    assert [(r["rank"], r["size"]) for r in ranks] == [(i, world.size) for i in range(world.size)]
    promised = Counter(dict.fromkeys(hosts, world.per_node))
    promised[hosts[0]] += world.extra
    assert Counter(r["host"] for r in ranks) == promised
    assert ranks[0]["host"] == hosts[0]
    free = set(range(os.cpu_count() or 1)) & os.sched_getaffinity(0)
    assert all(set(r["cpus"]) == free for r in ranks), "a rank is bound"


def others(world: World) -> list[int]:
    return [i for i in range(world.size) if i != 1]

"""No user code meets a handle, or a proxy of another store, by UCX: the paths of ``process/deploy/test_comms.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import SUPPORT
from waiting import scaled

# In a process of its own: UCX stays in one, with its sockets, to its end.
PATHS = """
import asyncio, json, os, sys
from pathlib import Path
from hpcgpu.deploy import network
network.prepare("ucx:")
from hpcgpu import sim
from hpcgpu.sim import register
from store_clusters import cluster
from value_paths import by_all_paths, strange

async def main():
    sim.set_current_gpu(sim.SimGpu(64 << 20))
    register()
    jit = sys.argv[2] == "jit"
    async with cluster(Path(sys.argv[1]), plugin=True, jit_unspill=jit, protocol="ucx") as (client, a, b):
        met = await by_all_paths(client, a, b)
        moves = {way: a.data.counters[way].number + b.data.counters[way].number for way in a.data.counters}
        print(json.dumps([len(met), strange(met), moves]))
        sys.stdout.flush()
        os._exit(0)

asyncio.run(asyncio.wait_for(main(), 120))
"""


@pytest.mark.parametrize("mode", ["whole", "jit"])
def test_all_paths_by_ucx_give_user_code_values(tmp_path: Path, mode: str) -> None:
    environ = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    argv = [sys.executable, "-c", PATHS, str(tmp_path / "tmp"), mode]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(150), env=environ)
    assert done.returncode == 0, done.stderr
    paths, met, moves = json.loads(done.stdout.splitlines()[-1])
    assert paths > 10
    assert met == {}
    assert min(moves.values()) > 0

"""Clusters in an event loop: what is not awaited begins all the same, or is an error that says what to write."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from distributed import Client
from pbs_replay import Pbs
from waiting import scaled, when

from hpcgpu import ConfigError, PBSGPUCluster

ELASTIC = {"gpus": "sim:1x16MiB", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}


def test_a_cluster_that_was_not_awaited_says_so_before_anything_is_submitted(pbs: Pbs) -> None:
    async def use() -> None:
        cluster = PBSGPUCluster(**ELASTIC, asynchronous=True)
        assert repr(cluster) == "PBSGPUCluster(hpcgpu, not started: await it)"
        assert cluster.status.name == "created"
        calls: list[Callable[[], object]] = [
            *(lambda: cluster.scale(2), lambda: cluster.adapt(maximum=2), lambda: cluster.wait_for_workers(1)),
            *(cluster.memory, cluster.bindings, cluster.detach),
            lambda: Client(cluster, asynchronous=True),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=r"has not started yet: .* write 'cluster = await PBSGPUCluster\("):
                call()

    with pytest.warns(RuntimeWarning, match=r"PBSGPUCluster was never awaited, so it has not started"):
        asyncio.run(use())
        gc.collect()
    assert pbs.calls("qsub") == []


def test_what_is_not_awaited_is_done(pbs: Pbs) -> None:
    """As dask-jobqueue's scale, which is no coroutine."""

    async def use() -> None:
        async with PBSGPUCluster(**ELASTIC, asynchronous=True) as cluster, Client(cluster, asynchronous=True) as client:
            cluster.scale(1)
            await cluster.wait_for_workers(1, timeout=scaled(60))
            assert await client.submit(sum, [1, 2]) == 3
            cluster.close()
            async with asyncio.timeout(scaled(60)):
                await when(lambda: cluster.status.name == "closed")

    asyncio.run(use())
    assert all(map(pbs.over, pbs.ids()))


SCRIPT = """
from hpcgpu import LocalGPUCluster
cluster = LocalGPUCluster(gpus="sim:1", asynchronous=True)
print(cluster)
"""


def test_an_asynchronous_cluster_without_an_event_loop_is_an_error_that_says_what_to_write(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env={"HOME": str(tmp_path)})
    assert (done.returncode, done.stdout) == (1, "")
    assert "ConfigError: asynchronous=True outside of an event loop: leave it out, or write" in done.stderr

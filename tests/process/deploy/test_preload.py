"""Plain dask workers with the store, by hpcgpu's preload: real processes."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from distributed import Client, LocalCluster, Worker, wait
from paths import SUPPORT
from programs import python
from waiting import until

DASK = str(Path(sys.executable).with_name("dask"))
PRELOAD = ("--preload", "hpcgpu.spill.preload")
# What a user writes for 'dask worker'.
MODULE = """
    from distributed import Worker
    from hpcgpu.sim import register
    from hpcgpu.spill import GpuSpillBuffer

    register()

    class SpillingWorker(Worker):
        def __init__(self, *args, **kwargs):
            store = {"device_memory_limit": "400KiB", "memory_limit": "600KiB"}
            super().__init__(*args, data=(GpuSpillBuffer, store), **kwargs)
"""
IN_A_LOCAL_CLUSTER = """
import sys
import numpy as np
from distributed import Client, LocalCluster, wait
from hpcgpu.spill import GpuSpillBuffer, SpillPlugin

store = {"device_memory_limit": 0, "memory_limit": "600KiB", "local_directory": sys.argv[1]}
by = {"plugins": [SpillPlugin()]} if sys.argv[2] == "plugin" else {"preload": ["hpcgpu.spill.preload"]}
with LocalCluster(1, dashboard_address=None, data=(GpuSpillBuffer, store), **by) as cluster, Client(cluster) as client:
    futures = client.map(np.full, [100 << 10] * 20, range(20), dtype="u1")
    wait(futures)
    assert client.submit(lambda arrays: [int(each[-1]) for each in arrays], futures).result() == list(range(20))
    while not min(client.run(lambda dask_worker: dask_worker.data.spilled_total.disk).values()):
        continue  # the spill thread writes later
    print(*client.run(lambda: [*sys.modules]).popitem()[1])
"""


@contextlib.contextmanager
def dask_worker(folder: Path, *options: str) -> Iterator[tuple[Client, Path]]:
    """A scheduler here and one worker, as a process; the client, and the worker's log."""
    ranks.script(folder, MODULE, "spilling.py")
    log, env = folder / "worker.log", {"PYTHONPATH": f"{folder}:{SUPPORT}"}
    limits = ("--nthreads", "2", "--memory-limit", "0", "--no-dashboard", "--local-directory", str(folder / "tmp"))
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster, Client(cluster) as client:
        argv = [DASK, "worker", cluster.scheduler_address, "--host", "127.0.0.1", *limits, *options]
        with ranks.started(argv, log, **env) as worker:
            # beside other tests that start clusters it takes half a minute
            until(lambda: client.nthreads() or worker.poll() is not None, "the worker is there, or gone", limit_s=120)
            assert worker.poll() is None, log.read_text()
            yield client, log


def array(i: int) -> Any:
    import numpy as np

    from hpcgpu import sim

    return sim.asarray(np.full(100 << 10, i, "u1"))


def look(*values: Any) -> list[tuple[str, int]]:
    return [(type(value).__name__, int(value[-1])) for value in values]


def settled(dask_worker: Worker) -> bool:
    return bool(dask_worker.data.settle(30))


def moved(dask_worker: Worker) -> dict[str, int]:
    return {way: count.number for way, count in dask_worker.data.counters.items()}


def ask(client: Client, function: Callable[..., Any]) -> Any:
    [answer] = client.run(function).values()
    return answer


@pytest.mark.parametrize(("preload", "nanny"), [(True, "--no-nanny"), (False, "--nanny")])
def test_working_set_over_all_limits(tmp_path: Path, preload: bool, nanny: str) -> None:
    """Right answers and real values with and without; the preload installs the plugin (its laws: test_comms.py)."""
    spilling = ("--worker-class", "spilling.SpillingWorker", nanny)
    with dask_worker(tmp_path, *spilling, *(PRELOAD if preload else ())) as (client, _):
        futures = client.map(array, range(40))
        wait(futures)
        assert ask(client, settled)
        expected = [("SimArray", i) for i in range(40)]
        for _ in range(2):
            seen = [client.submit(look, f, pure=False) for f in futures]
            assert [pair for [pair] in client.gather(seen)] == expected
        assert client.submit(look, *futures).result() == expected
        assert min(ask(client, moved).values()) > 0
        assert ask(client, lambda dask_worker: "hpcgpu" in dask_worker.plugins) == preload


@pytest.mark.parametrize("by", ["plugin", "preload"])
def test_store_in_a_local_cluster_does_without_deploy(tmp_path: Path, by: str) -> None:
    done = python(IN_A_LOCAL_CLUSTER, tmp_path, by)
    assert done.returncode == 0, done.stderr
    names = done.stdout.split()
    assert {"hpcgpu.spill", "hpcgpu.spill.distributed.worker"} <= set(names)
    assert [name for name in names if name.startswith(("hpcgpu.deploy", "hpcgpu.plan", "hpcgpu.config"))] == []


def test_preload_without_the_store_says_what_to_write(tmp_path: Path) -> None:
    with dask_worker(tmp_path, "--no-nanny", *PRELOAD) as (client, log):
        assert client.submit(sum, [1, 2]).result() == 3
        assert not ask(client, lambda dask_worker: "hpcgpu" in dask_worker.plugins)
        said = re.findall("hpcgpu.spill.preload changes nothing.*", log.read_text())
    assert len(said) == 1
    assert "data=(hpcgpu.spill.GpuSpillBuffer," in said[0]
    assert "--worker-class" in said[0]

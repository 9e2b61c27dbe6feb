"""A cluster that speaks UCX: values of all tiers go to peers; workers die and come back; nothing outlives it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ranks
import sockets
from distributed import Client, Worker, wait
from paths import DATA
from waiting import scaled, until

from hpcgpu import LocalGPUCluster

MIB = 1 << 20


@pytest.fixture(scope="module")
def client(own_folders: Path) -> Iterator[Client]:
    given = {"gpus": "sim:2x64MiB", "env": {"UCX_NET_DEVICES": "lo"}}
    with LocalGPUCluster(protocol="ucx", **given) as cluster, Client(cluster) as client:
        yield client


def two(client: Client) -> tuple[str, str]:
    client.wait_for_workers(2, timeout=scaled(60))
    first, second = sorted(client.scheduler_info()["workers"])
    return first, second


def test_all_interfaces_are_listened_on_as_documented(client: Client) -> None:
    """Though all processes are on one node, and workers have one interface (UCX_NET_DEVICES)."""
    two(client)
    pids = [client.run_on_scheduler(os.getpid), *client.run(os.getpid).values()]
    assert [[where for where in sockets.of(pid) if where.where == "all interfaces"] != [] for pid in pids] == [True] * 3
    assert '`protocol="ucx"` (ucxx 0.52) listens on all interfaces, even when' in sockets.DOCUMENT.read_text()


def test_host_device_and_spilled_arrays_go_to_a_peer(client: Client) -> None:
    def on_host(i: int) -> Any:
        return np.full(8 * MIB, i, dtype="u1")

    def on_device(i: int) -> Any:
        from hpcgpu import sim

        return sim.asarray(np.full(8 * MIB, i, dtype="u1"))

    def tiers(dask_worker: Worker) -> dict[str, int]:
        assert dask_worker.data.settle(60)
        return dict(dask_worker.data.tiers)

    first, second = two(client)
    assert first.startswith("ucx://127.0.0.1:")
    for make, count, kind in ((on_host, 4, "ndarray"), (on_device, 16, "SimArray")):  # 128 MiB on a device of 64
        arrays = client.map(make, range(count), workers=[first], pure=False)
        wait(arrays, timeout=scaled(60))
        assert make is on_host or client.run(tiers, workers=[first])[first]["host"] >= 64 * MIB
        sums = client.map(lambda a: (type(a).__name__, int(a.sum())), arrays, workers=[second], pure=False)
        assert client.gather(sums) == [(kind, i * 8 * MIB) for i in range(count)]


def test_each_worker_has_what_was_planned_for_ucx(client: Client) -> None:
    """In its environment, in UCX itself, and as its address."""

    def seen(dask_worker: Worker) -> tuple[str, str, str]:
        import ucxx

        return os.environ["UCX_NET_DEVICES"], ucxx.get_config()["NET_DEVICES"], dask_worker.address

    two(client)
    bound = client.cluster.bindings()
    assert bound.differences == {}
    assert [dict(w.spec.env)["UCX_NET_DEVICES"] for w in bound.workers] == ["lo", "lo"]
    assert {(e, u, a.rpartition(":")[0]) for e, u, a in client.run(seen).values()} == {("lo", "lo", "ucx://127.0.0.1")}


def test_killed_and_restarted_workers_come_back(client: Client) -> None:
    first, _ = two(client)
    before = client.run(os.getpid)
    held = client.submit(lambda: np.arange(MIB), workers=[first], allow_other_workers=True, pure=False)
    wait(held, timeout=scaled(60))
    os.kill(before[first], signal.SIGKILL)
    assert client.submit(lambda a: int(a[-1]), held, pure=False).result(timeout=scaled(60)) == MIB - 1
    until(lambda: len(workers := client.scheduler_info()["workers"]) == 2 and first not in workers, "a new worker")
    middle = client.run(os.getpid)
    client.restart(timeout=scaled(60))
    after = client.run(os.getpid)
    assert len(after) == 2
    assert not set(after.values()) & {*before.values(), *middle.values()}
    assert client.submit(sum, [1, 2]).result(timeout=scaled(60)) == 3


def family(leader: str) -> list[psutil.Process]:
    """The leader and all that it has started."""
    process = psutil.Process(int(leader))
    return [process, *process.children(recursive=True)]


def test_nothing_lives_on_after_close(monkeypatch: pytest.MonkeyPatch, own_folders: Path) -> None:
    """The call of a seed; with data on the way, and with the client's connection still open."""
    (call,) = [line for line in (DATA / "seeds/calls.py.txt").read_text().splitlines() if "'ucx'" in line]
    monkeypatch.setenv("HPCGPU_GPUS", "sim:2")
    names = {"LocalCUDACluster": LocalGPUCluster}
    exec(call, names)
    cluster = names["cluster"]
    client = Client(cluster)
    assert client.submit(sum, [1, 2]).result(scaled(60)) == 3
    first, second = two(client)
    data = client.submit(bytes, 64 * MIB, workers=[first])
    size = client.submit(len, data, workers=[second])
    processes = family(cluster.job_id)
    assert len(processes) == 5
    cluster.close()
    assert psutil.wait_procs(processes, timeout=scaled(10))[1] == []
    assert size.status in ("pending", "finished", "cancelled", "lost", "error")
    with contextlib.suppress(RuntimeError):  # distributed 2026.7.1, where a new connection's time is up just then
        client.close()


def test_nothing_lives_on_after_the_clients_end(tmp_path: Path) -> None:
    """Killed, it says no goodbye, and its connections end by the kernel alone."""
    code = """
        from hpcgpu import LocalGPUCluster
        cluster = LocalGPUCluster(gpus="sim:2", protocol="ucx")
        client = Client(cluster)
        print(client.submit(sum, [1, 2]).result(), cluster.job_id, flush=True)
        signal.pause()
    """
    argv = [sys.executable, str(ranks.script(tmp_path, code))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=ranks.environment()) as process:
        result, leader = process.stdout.readline().split()
        processes = family(leader)
        process.kill()
    assert result == "3"
    assert psutil.wait_procs(processes, timeout=scaled(60))[1] == []

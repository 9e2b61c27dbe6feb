"""Arrays of the real CuPy between two workers of a node: a copy to page-locked memory, and one read of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_nvml
import pytest
from cupy_arrays import filled, last_of
from distributed import Client, wait
from paths import ROOT, TESTS
from waiting import scaled, until

from hpcgpu import LocalGPUCluster

MIB = 1 << 20
NO_DASK_CUDA = "not measured: dask_cuda is not installed"
GPUS = [fake_nvml.FakeGpu(f"0000:0{i}:00.0", f"GPU-{i:08x}-0000-0000-0000-000000000000", size_mib=256) for i in (1, 2)]


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drivers = os.environ["LD_LIBRARY_PATH"]
    monkeypatch.setenv("FAKE_NVML_GPUS", fake_nvml.compiled(tmp_path).environment(GPUS)["FAKE_NVML_GPUS"])
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}:{drivers}")
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "support"))  # workers import what they run


@pytest.fixture
def client(gpus: None) -> Iterator[Client]:
    with LocalGPUCluster(dashboard=False, quiet=True) as cluster, Client(cluster) as made:
        yield made


def facts(client: Client, address: str) -> dict[str, int]:
    """Return the bytes that a worker has copied from peers, moved, and locked."""

    def read(dask_worker: Any) -> dict[str, int]:
        from hpcgpu.deploy.network.node_copies import this_process

        locked = sum(copies.idle_bytes for copies in dask_worker.data._executor.page_locked)
        moved = {name: count.nbytes for name, count in dask_worker.data.counters.items()}
        return {"copied": this_process.copied_bytes, "locked": locked, **moved}

    return dict(client.run(read, workers=[address])[address])


def test_arrays_that_are_up_reach_a_peer_by_one_read(client: Client) -> None:
    first, second = sorted(client.nthreads())
    arrays = client.map(filled, [4 * MIB] * 8, range(8), workers=[first], pure=False)
    wait(arrays)
    assert client.submit(last_of, *arrays, workers=[second]).result() == [*range(8)]
    there, here = facts(client, first), facts(client, second)
    assert (there["locked"] >= 4 * MIB, there["device_to_host"]) == (True, 0)
    assert (here["copied"], here["host_to_device"]) == (32 * MIB, 32 * MIB)


def test_arrays_survive_a_sender_that_dies(client: Client) -> None:
    first, second = sorted(client.nthreads())
    arrays = client.map(filled, [4 * MIB] * 40, range(40), workers=[first], allow_other_workers=True, pure=False)
    wait(arrays)
    (pid,) = client.run(os.getpid, workers=[first]).values()
    result = client.submit(last_of, *arrays, workers=[second], pure=False)
    until(lambda: result.done() or facts(client, second)["copied"], "it copies", every_s=0.001)
    os.kill(pid, signal.SIGKILL)
    assert result.result(timeout=scaled(100)) == [*range(40)]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("name", ["peers", "lock", "stage", "mixed", "lost", "beside"])
def test_a_measurement_for_a_gpu_runs(name: str) -> None:
    argv = [sys.executable, "benchmarks/gpu_first_hour.py", name]
    env = {**os.environ, "HPCGPU_SLOWNESS": str(scaled(1))}
    done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=scaled(110), check=True)
    figures = [json.loads(line) for line in done.stdout.splitlines()]
    assert [f["why"] for f in figures if f["value"] is None] == [NO_DASK_CUDA] * (name == "beside")
    assert {f["value"] for f in figures if f["measure"] == "is_right"} == ({1.0} if name == "beside" else set())

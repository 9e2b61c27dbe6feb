"""Checkpoints on real clusters: a script that was killed goes on, and nothing that was synced is computed again."""

import functools
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import dask.array as da
import dask.bag as db
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
import ranks
from distributed import Client, LocalCluster, wait
from waiting import scaled, until

from hpcgpu import Checkpoint, LocalGPUCluster
from hpcgpu.checkpoint.segments import Index
from hpcgpu.errors import CheckpointError, ConfigError
from hpcgpu.host import process

CHUNKS, FREE = 12, 5
# argv: folder, number of workers; RAN: a file with a byte for each task that ran; GATE: a FIFO or nothing
SCRIPT = """
import dask.array as da
import numpy as np
from distributed import LocalCluster
from hpcgpu import Checkpoint

folder, workers = sys.argv[1:]
gate = os.environ["GATE"]

def work(block):
    with open(os.environ["RAN"], "ab", buffering=0) as f:
        f.write(b"x")
        if os.environ["GATE"] and f.tell() > 5:
            open(os.environ["GATE"]).close()  # nothing opens its other end
    return np.random.default_rng(int(block[0])).random(1000)

if __name__ == "__main__":
    x = da.arange(12, chunks=1).map_blocks(work, chunks=(1000,), dtype=float, meta=np.empty(0))
    options = {"processes": bool(gate), "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(n_workers=int(workers), **options) as cluster, Client(cluster):
        with Checkpoint(folder) as checkpoint:
            x = checkpoint.persist(x, name="x")
            np.save(f"{folder}.npy", x.compute())
"""
FULL = """
import numpy as np, dask.array as da
from distributed import LocalCluster, wait
from hpcgpu import Checkpoint

signal.alarm(100)
folder, filler = sys.argv[1], f"{os.path.dirname(sys.argv[1])}/filler"
with open(filler, "wb") as f:
    f.write(bytes(5 << 20))
cluster = LocalCluster(n_workers=1, processes=False, dashboard_address=None)
with cluster, Client(cluster), Checkpoint(folder) as checkpoint:
    x = checkpoint.persist(da.ones((8, 1 << 17), chunks=(1, -1)), name="x")
    wait(x)
    print(checkpoint.flush(), float(x.sum().compute()))
    progress = checkpoint.progress()
    print(0 < progress.rows[0].done < 8, progress.waiting > 0, *progress.troubles)
    wait(checkpoint.persist(da.zeros((2, 1 << 17), chunks=(1, -1)), name="dropped"))
    (worker,) = cluster.workers.values()
    while len(worker.data) > 8 or checkpoint.progress().waiting > 8 - progress.rows[0].done:
        time.sleep(0.1)
    print(checkpoint.flush(), *checkpoint.progress().troubles[1:])
    os.unlink(filler)
    while checkpoint.progress().waiting:
        time.sleep(0.1)
    print([(row.name, row.done) for row in checkpoint.progress().rows])
    wait(checkpoint.persist(da.zeros((2, 1 << 17), chunks=(1, -1)), name="dropped"))
    print(checkpoint.flush(), *checkpoint.progress().troubles)
"""


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None)
    with cluster, Client(cluster) as client:
        yield client


class Ran:
    """Counts tasks of this process's workers."""

    def __init__(self) -> None:
        self.count = 0


RAN = Ran()


def counted(x: Any) -> Any:
    RAN.count += 1
    return x


def ran_in(call: Callable[[], Any]) -> int:
    before = RAN.count
    call()
    return RAN.count - before


def array(n: int = 1) -> Any:
    x = da.arange(8 * 100, chunks=100) * n
    return x.map_blocks(counted, dtype=x.dtype, meta=np.empty(0, x.dtype))


def script(tmp_path: Path, workers: int) -> list[str]:
    return [sys.executable, str(ranks.script(tmp_path, SCRIPT)), str(tmp_path / "run"), str(workers)]


def chunks_in(folder: Path) -> Index:
    index = Index(folder)
    index.refresh()
    return index


def test_killed_script_goes_on_with_other_numbers_of_workers(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    env = ranks.environment(GATE=str(gate), RAN=str(tmp_path / "ran"))
    options = {"start_new_session": True, "stderr": subprocess.DEVNULL}
    # else it waits for its gate for ever when this test is killed
    dies = functools.partial(process.die_with_parent, os.getpid(), signal.SIGKILL)
    killed = subprocess.Popen(script(tmp_path, 2), env=env, preexec_fn=dies, **options)
    until(lambda: len(chunks_in(tmp_path / "run").chunks) >= 3, "three chunks are synced", limit_s=120)
    os.killpg(killed.pid, signal.SIGKILL)  # the script, the scheduler in it, the nannies and workers
    killed.wait()
    index = chunks_in(tmp_path / "run")
    index.check()
    expected = np.concatenate([np.random.default_rng(i).random(1000) for i in range(CHUNKS)])
    left = CHUNKS - len(index.chunks)
    assert CHUNKS - FREE <= left <= CHUNKS - 3
    for workers, count in ((3, left), (1, 0)):
        ran = tmp_path / f"ran-{workers}"
        done = ranks.run_command(script(tmp_path, workers), env={"GATE": "", "RAN": str(ran)}, timeout=scaled(120))
        assert done.returncode == 0, done.stderr
        assert (ran.stat().st_size if ran.exists() else 0) == count
        assert np.load(tmp_path / "run.npy").tobytes() == expected.tobytes()
    segments = list((tmp_path / "run").glob("*.segment"))
    assert len(segments) <= 2 + 3  # a file for each worker that wrote


COLLECTIONS: dict[str, Callable[[], Any]] = {
    "array": array,
    "structured": lambda: array().astype([("a", "i8"), ("b", "f4")]),
    "bag": lambda: db.from_sequence([{"n": i} for i in range(9)], npartitions=3).map(counted),
    "frame": lambda: (
        dd.from_pandas(pd.DataFrame({"a": range(9), "b": list("abcdefghi")}), npartitions=3)
        .map_partitions(counted, meta={"a": "i8", "b": "str"})
        .assign(c=lambda frame: frame.a + 1)
    ),
    "delayed": lambda: dask.delayed(counted)({"a": [dask.delayed(counted)(1), "text"]}),
}


@pytest.mark.parametrize("kind", COLLECTIONS)
def test_collection_made_again_is_loaded_and_equal(client: Client, tmp_path: Path, kind: str) -> None:
    make = COLLECTIONS[kind]
    results = [make().compute(scheduler="synchronous")]

    def start() -> None:
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            x = checkpoint.persist(make(), name="x")
            results.append(x.compute())
            assert checkpoint.flush()

    assert ran_in(start) > 0
    assert ran_in(start) == 0
    with client.as_current():
        results.append(Checkpoint(tmp_path / "run").load("x").compute())
    results.append(Checkpoint(tmp_path / "run").load("x").compute(scheduler="threads"))  # without a cluster
    for result in results[1:]:
        assert type(result) is type(results[0])
        assert result.equals(results[0]) if kind == "frame" else np.array_equal(result, results[0])


def test_restored_chunks_are_read_again_when_their_worker_goes(tmp_path: Path) -> None:
    def start(*, loses_a_worker: bool) -> None:
        cluster = LocalCluster(n_workers=2, threads_per_worker=1, processes=False, dashboard_address=None)
        with cluster, Client(cluster) as client, Checkpoint(tmp_path / "run", client) as checkpoint:
            x = checkpoint.persist(array(), name="x")
            wait(x)
            if loses_a_worker:
                assert client.run(lambda dask_worker: len(dask_worker.data), workers=[cluster.workers[0].address])
                cluster.sync(cluster.workers[0].close, nanny=False)
            assert np.array_equal(x.compute(), np.arange(800))

    assert ran_in(lambda: start(loses_a_worker=False)) == 8
    assert ran_in(lambda: start(loses_a_worker=True)) == 0


def test_damaged_chunk_is_computed_again_and_named(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpoint(tmp_path / "run", client) as checkpoint:
        checkpoint.persist(array(), name="x").compute()
        checkpoint.flush()
    index = chunks_in(tmp_path / "run")
    chunk, place = sorted(index.chunks.items(), key=lambda item: item[1])[0]
    path = tmp_path / "run" / place.segment
    content = bytearray(path.read_bytes())
    content[content.index(int(100 * chunk.part[1] + 7).to_bytes(8, "little"), place.offset) + 1] ^= 1
    path.write_bytes(content)

    def again() -> None:
        with Checkpoint(tmp_path / "run", client) as checkpoint, caplog.at_level(logging.WARNING):
            x = checkpoint.persist(array(), name="x")
            assert np.array_equal(x.compute(), np.arange(800))

    assert ran_in(again) == 1
    assert "'x' has 1 damaged chunk, computed again: ('counted-" in caplog.text
    assert f", {chunk.part[1]}) (in {place.segment})" in caplog.text


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    ("entry", "other", "how"),
    [("python", '"python":"3.8"', "by Python 3.8"), ("format", '"format":99', "in format 99")],
)
def test_chunks_of_another_version_are_computed_again(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture, entry: str, other: str, how: str
) -> None:
    def start() -> None:
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            assert np.array_equal(checkpoint.persist(array(), name="x").compute(), np.arange(800))

    start()
    manifest = tmp_path / "run" / "x.name"
    manifest.write_text(re.sub(rf'"{entry}":[^,}}]+', other, manifest.read_text()))
    again = f"'x' was written {how}: its chunks are computed again"
    progress = Checkpoint(tmp_path / "run", client).progress()
    assert (progress.rows[0].done, again in str(progress)) == (0, True)
    assert "8 of 8" in ranks.in_process("checkpoint", str(tmp_path / "run")).stdout
    assert ran_in(start) == 8
    assert again in caplog.text


def test_restored_chunk_is_read_once(client: Client, tmp_path: Path) -> None:
    def start() -> int:
        before = bytes_read()
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            x = checkpoint.persist(da.arange(1 << 23, chunks=1 << 20), name="x")
            assert int(x.sum().compute()) == (1 << 22) * ((1 << 23) - 1)
            assert checkpoint.flush()
        return bytes_read() - before

    assert start() < 32 << 20
    assert 64 << 20 <= start() < 96 << 20


def test_another_computation_is_refused_until_overwritten(client: Client, tmp_path: Path) -> None:
    with Checkpoint(tmp_path / "run", client) as checkpoint:
        wait(checkpoint.persist(array(1), name="x"))
        checkpoint.flush()
        with pytest.raises(ConfigError, match=r"'x' in .* is another computation \(the graph: tasks .* overwrite=True"):
            checkpoint.persist(array(2), name="x")
        x = checkpoint.persist(array(2), name="x", overwrite=True)
        assert np.array_equal(x.compute(), np.arange(800) * 2)
        assert checkpoint.flush()
    assert np.array_equal(Checkpoint(tmp_path / "run").load("x").compute(), np.arange(800) * 2)


def test_random_numbers_without_a_seed_go_on_if_alike(client: Client, tmp_path: Path) -> None:
    values = []
    for options in ({}, {"alike": True}):
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            values.append(checkpoint.persist(da.random.random(100, chunks=10), name="x", **options).compute())
            checkpoint.flush()
    assert values[0].tobytes() == values[1].tobytes()
    with Checkpoint(tmp_path / "run", client) as checkpoint, pytest.raises(ConfigError, match="have other arguments"):
        checkpoint.persist(da.random.random(100, chunks=10), name="x")


def test_names_that_share_chunks_have_all_of_them(client: Client, tmp_path: Path) -> None:
    def start() -> None:
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            x = checkpoint.persist(array(), name="x")
            y = checkpoint.persist(x[:400], name="y")
            again = checkpoint.persist(array(), name="x")
            z = checkpoint.persist(x + 1, name="z")
            assert [int(each.sum().compute()) for each in (x, y, again, z)] == [319600, 79800, 319600, 320400]
            assert checkpoint.flush()

    assert ran_in(start) == 8
    assert ran_in(start) == 0
    checkpoint = Checkpoint(tmp_path / "run")
    assert [(row.name, row.done, row.count) for row in checkpoint.progress().rows] == [
        ("x", 8, 8),
        ("y", 4, 4),
        ("z", 8, 8),
    ]
    assert int(checkpoint.load("y").sum().compute()) == 79800


def test_delayed_of_a_persisted_delayed_is_known_again(client: Client, tmp_path: Path) -> None:
    def start() -> None:
        with Checkpoint(tmp_path / "run", client) as checkpoint:
            x = checkpoint.persist(dask.delayed(counted)(3), name="x")
            assert checkpoint.persist(dask.delayed(counted)(x), name="y").compute() == 3
            checkpoint.flush()

    assert (ran_in(start), ran_in(start)) == (2, 0)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("an open connection")


def test_value_that_cannot_be_pickled_is_named(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpoint(tmp_path / "run", client) as checkpoint:
        x = checkpoint.persist(dask.delayed(Unpicklable)(), name="x")
        wait(x)
        assert not checkpoint.flush()
        assert "lacks 1 chunk: Unpicklable-" in caplog.text
        progress = checkpoint.progress()
        assert progress.rows[0].done == 0
        assert any("Unpicklable-" in text and "is not saved" in text for text in progress.troubles), progress.troubles
    with pytest.raises(CheckpointError, match=r"'x' in .* has 0 of 1 chunks"):
        Checkpoint(tmp_path / "run").load("x")


def test_full_disk_stops_no_job_and_is_caught_up(tmp_path: Path) -> None:
    inside = ranks.unshared("--mount")
    mount = 'mount -t tmpfs -o size=12M,mode=700 none "$0" && exec "$@"'
    (tmp_path / "small").mkdir()
    argv = [sys.executable, str(ranks.script(tmp_path, FULL)), str(tmp_path / "small" / "run")]
    done = ranks.run_command([*inside, "sh", "-c", mount, str(tmp_path / "small"), *argv], timeout=scaled(120))
    assert done.returncode == 0, done.stderr
    first, second, dropped, then, last = done.stdout.splitlines()
    assert first == f"False {float(1 << 20)}"
    assert second.startswith("True True incomplete since 20")
    assert "No space left on device" in second
    assert dropped.startswith("False ('zeros")
    assert dropped.count("is not saved: it was dropped while the disk took nothing") == 2
    assert then == "[('dropped', 0), ('x', 8)]"
    assert last == "True"


def test_folder_that_a_worker_does_not_see_is_refused(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    other_node = [*ranks.unshared("--mount"), "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', str(here)]
    dask = [str(ranks.BIN / "dask"), "worker", "--host", "127.0.0.1", "--no-dashboard", "--no-nanny", "--name", "far"]
    cluster = LocalCluster(n_workers=1, processes=False, protocol="tcp", dashboard_address=None)
    with cluster, Client(cluster) as client:
        argv = [*other_node, *dask, "--local-directory", str(tmp_path / "far"), cluster.scheduler_address]
        with ranks.started(argv, tmp_path / "log"):
            until(lambda: len(client.nthreads()) == 2, "both workers are there", limit_s=120)
            with pytest.raises(ConfigError, match=rf"{here}/run is not seen by 1 of 2 workers \(tcp://127.0.0.1:\d+\)"):
                Checkpoint(here / "run", client).persist(array(), name="x")
    assert not (here / "run" / "owner").exists()


def test_device_arrays_are_loaded_by_workers_with_the_store(tmp_path: Path) -> None:
    def make() -> Any:
        from hpcgpu.sim import RandomState

        return da.random.RandomState(RandomState=RandomState, seed=0).random_sample((512, 512), chunks=(128, 128))

    sums = []
    for workers in (2, 1):
        cluster = LocalGPUCluster(gpus=f"sim:{workers}x1MiB", memory_limit="1GB", security=False)
        with cluster, Client(cluster) as client, Checkpoint(tmp_path / "run", client) as checkpoint:
            x = checkpoint.persist(make(), name="x")
            wait(x)
            specs = client.run(lambda dask_worker: [str(t.run_spec) for t in dask_worker.state.tasks.values()])
            sums.append(x.map_blocks(lambda block: block.get(), meta=np.empty((0, 0))).compute())
            assert checkpoint.flush()
            assert checkpoint.progress().rows[0].done == 16
            texts = [text for each in specs.values() for text in each]
    assert texts and all("load(" in text for text in texts), texts
    assert sums[0].tobytes() == sums[1].tobytes()


def test_checkpoint_made_again_in_a_session_goes_on(client: Client, tmp_path: Path) -> None:
    first = Checkpoint(tmp_path / "run", client)
    wait(first.persist(array(), name="x"))
    second = Checkpoint(tmp_path / "run", client)
    assert ran_in(lambda: wait(second.persist(array(2), name="x", overwrite=True))) == 8
    with pytest.raises(ConfigError, match="has been taken over by"):
        first.persist(array(), name="y")
    first.close()
    wait(second.persist(array(3), name="y"))
    second.close()
    assert [(row.name, row.done) for row in first.progress().rows] == [("x", 8), ("y", 8)]
    assert int(first.load("y").sum().compute()) == 3 * 319600


def test_script_that_fails_keeps_its_chunks_and_its_error(tmp_path: Path) -> None:
    cluster = LocalCluster(n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None)
    with cluster, Client(cluster) as client:
        with pytest.raises(ZeroDivisionError), Checkpoint(tmp_path / "run", client) as checkpoint:
            wait(checkpoint.persist(array(), name="x"))
            1 / 0  # noqa: B018
        assert checkpoint.progress().rows[0].done == 8
        with pytest.raises(ZeroDivisionError), Checkpoint(tmp_path / "run", client) as checkpoint:
            checkpoint.persist(array(), name="x")
            client.close()
            1 / 0  # noqa: B018
    assert Checkpoint(tmp_path / "run").names == ("x",)
    assert not (tmp_path / "run" / "owner").exists()

"""Large values between the processes of a run on one node: they are copied, whatever the call and the end of a peer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import ranks
from distributed import Client, wait
from waiting import scaled, until

from hpcgpu import LocalGPUCluster
from hpcgpu.deploy.network.node_copies import this_process

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"gpus": "sim:2x64MiB", "dashboard": False, "quiet": True}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with LocalGPUCluster(**OPTIONS) as cluster, Client(cluster) as made:
        yield made


class Work:
    """Functions for workers, which cannot import this module: pickled by value, since they are no names of it."""

    def __init__(self) -> None:
        def make(i: int, nbytes: int = 4 * MIB) -> np.ndarray:
            return np.arange(i, i + nbytes // 8).view(np.uint8)

        def total(*arrays: np.ndarray) -> int:
            return sum(int(a.sum(dtype=np.int64)) for a in arrays)

        def are_in_a_pool(*arrays: Any) -> bool:
            """Tell whether a pool of buffers lends the memory of each array."""
            from hpcgpu.spill.storage.disk import Loan

            parts = list(arrays)
            while any(part is not None and not isinstance(part, Loan) for part in parts):
                parts = [p if isinstance(p, Loan) else p.obj if isinstance(p, memoryview) else p.base for p in parts]
            return None not in parts

        def copied() -> int:
            from hpcgpu.deploy.network.node_copies import this_process

            return int(this_process.copied_bytes)

        self.make, self.total, self.are_in_a_pool, self.copied = make, total, are_in_a_pool, copied


WORK = Work()


def copied_bytes(client: Client, name: str = "copied_bytes") -> dict[str, int]:
    """Bytes that each worker has copied from peers so far; ``cut_bytes``: received by data connections."""

    def read() -> int:
        from hpcgpu.deploy.network.node_copies import this_process

        return int(getattr(this_process, name))

    return dict(client.run(read))


def test_values_of_a_worker_are_copied_into_the_stores_pool(client: Client) -> None:
    first, second = sorted(client.nthreads())
    arrays = client.map(WORK.make, range(8), workers=[first], pure=False)
    wait(arrays)
    before = copied_bytes(client)[second]
    assert client.submit(WORK.total, *arrays, workers=[second]).result() == WORK.total(*map(WORK.make, range(8)))
    assert copied_bytes(client)[second] - before == 8 * 4 * MIB
    assert client.submit(WORK.are_in_a_pool, *arrays, workers=[second]).result()
    assert "large values within a node: by one copy" in str(client.cluster.bindings())


def test_scatter_and_gather_are_copied(client: Client) -> None:
    value = WORK.make(1, 16 * MIB)
    before, before_here = sum(copied_bytes(client).values()), this_process.copied_bytes
    futures = client.scatter([value] * 2, hash=False)
    assert all((client.gather(f) == value).all() for f in futures)
    assert this_process.copied_bytes - before_here == 2 * 16 * MIB
    assert sum(copied_bytes(client).values()) - before >= 2 * 16 * MIB


def test_a_shuffle_by_p2p_takes_its_shards_as_they_are(client: Client) -> None:
    """Shards of 64 KiB and more are frames of their own, in no pickle."""
    pytest.importorskip("dask.dataframe")

    def note_kinds(dask_worker: Any) -> None:
        from distributed.shuffle import _shuffle

        read, dask_worker.kinds = _shuffle.buffers_to_table, set()
        _shuffle.buffers_to_table = lambda data: dask_worker.kinds.update(type(x) for _, x in data) or read(data)

    client.run(note_kinds)
    rows = da.arange(400_000, chunks=100_000).to_dask_dataframe(columns=["x"])
    mixed = rows.assign(key=rows["x"] % 10).shuffle("key", npartitions=4, shuffle_method="p2p").compute()
    assert sorted(mixed["x"]) == list(range(400_000))
    assert set.union(*client.run(lambda dask_worker: dask_worker.kinds).values()) == {memoryview}


def test_a_rechunk_by_p2p_is_right(client: Client) -> None:
    before = sum(copied_bytes(client).values())
    x = da.arange(2**21, chunks=2**17).reshape(2**10, 2**11)
    assert (x.T.rechunk((2**10, 2**8), method="p2p") + 1).sum().compute() == 2**20 * (2**21 - 1) + 2**21
    assert sum(copied_bytes(client).values()) > before


def kill_during_a_transfer(client: Client, name: str) -> None:
    """Kill a worker while another one gets its arrays, and see that the sum is right."""
    first, second = sorted(client.nthreads())
    expected = WORK.total(*map(WORK.make, range(40)))
    arrays = client.map(WORK.make, range(40), workers=[first], allow_other_workers=True, pure=False)
    wait(arrays)
    before = copied_bytes(client, name)[second]
    (pid,) = client.run(os.getpid, workers=[first]).values()
    result = client.submit(WORK.total, *arrays, workers=[second], pure=False)
    until(lambda: result.done() or copied_bytes(client, name)[second] > before, "it copies", every_s=0.001)
    os.kill(pid, signal.SIGKILL)
    assert result.result(timeout=scaled(100)) == expected


def test_values_survive_a_peer_that_dies_during_the_copy(client: Client) -> None:
    kill_during_a_transfer(client, "copied_bytes")


def test_a_plain_client_of_a_script_copies(tmp_path: Path) -> None:
    code = """
        import numpy as np
        from hpcgpu.deploy.network.node_copies import this_process
        with Client() as c:
            made = c.map(np.full, [2**22] * 4, range(4))
            assert [int(x[-1]) for x in c.gather(made)] == [0, 1, 2, 3]
            print("copied", this_process.copied_bytes >> 20)
    """
    done = ranks.run(ranks.script(tmp_path, code), options=("--gpus", "sim:2"))
    assert ("copied 128\n" in done.stdout, "preload" in done.stderr) == (True, False), done.stdout + done.stderr


def test_switched_off_and_without_encryption() -> None:
    for options, way in (
        ({"node_copies": False}, "by the connection (node_copies=False)"),
        ({"protocol": "tcp"}, "by one copy"),
    ):
        with LocalGPUCluster(**OPTIONS, **options) as cluster, Client(cluster) as client:
            first, second = sorted(client.nthreads())
            arrays = client.map(WORK.make, range(4), workers=[first])
            assert client.submit(WORK.total, *arrays, workers=[second]).result() == WORK.total(
                *map(WORK.make, range(4))
            )
            assert (sum(copied_bytes(client).values()) > 0) == (way == "by one copy")
            assert f"large values within a node: {way}" in " ".join(str(cluster.bindings()).split())
            before = this_process.copied_bytes
            value = WORK.make(1, 16 * MIB)
            for direct in (True, False):  # by the scheduler, too
                assert (client.gather(client.scatter(value, direct=direct, hash=False), direct=direct) == value).all()
            copies = {"here": this_process.copied_bytes - before, "scheduler": client.run_on_scheduler(WORK.copied)}
            assert {who: nbytes > 0 for who, nbytes in copies.items()} == dict.fromkeys(copies, way == "by one copy")
            if way != "by one copy":
                kill_during_a_transfer(client, "cut_bytes")
                assert sum(copied_bytes(client, "cut_bytes").values()) > 0

"""Large values between the processes of a run on one node: they are copied, whatever the call and the end of a peer."""

import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import psutil
import pytest
import ranks
from distributed import Client, Future, wait
from distributed.client import FutureCancelledError
from waiting import scaled, until

from hpcgpu import LocalGPUCluster
from hpcgpu.deploy.network.node_copies import this_process

MIB = 1 << 20
OPTIONS: dict[str, Any] = {"gpus": "sim:2x64MiB", "dashboard": False, "quiet": True}


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with LocalGPUCluster(**OPTIONS, protocol="tcp") as cluster, Client(cluster) as made:
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

        def moved(name: str = "copied_bytes") -> int:
            from hpcgpu.deploy.network.node_copies import this_process

            return int(getattr(this_process, name))

        def held() -> tuple[int, int]:
            """Count messages whose frames are lent or cut, and descriptors."""
            lenders = [x for x in gc.get_objects() if type(x).__name__ == "_Lender"]
            return sum(len(x.frames) for x in lenders), psutil.Process().num_fds()

        def limit(seconds: float) -> None:
            """End each connection by a peer that takes no bytes for so long."""
            for connection in psutil.Process().net_connections("tcp"):
                with socket.socket(fileno=os.dup(connection.fd)) as copy:
                    copy.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1e3))

        self.make, self.total, self.are_in_a_pool, self.moved = make, total, are_in_a_pool, moved
        self.held, self.limit = held, limit


WORK = Work()
TOTAL = WORK.total(*map(WORK.make, range(40)))


def copied_bytes(client: Client, name: str = "copied_bytes") -> dict[str, int]:
    """Bytes that each worker has copied from peers so far; ``cut_bytes``: received by data connections."""
    return dict(client.run(WORK.moved, name))


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


@pytest.fixture(scope="module", params=["copied_bytes", "cut_bytes"])
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Client, str]]:
    copies = request.param == "copied_bytes"
    with LocalGPUCluster(**OPTIONS, node_copies=copies) as cluster, Client(cluster) as made:
        yield made, request.param


def transfer(client: Client, name: str) -> tuple[Future, int, int]:
    """Begin to move arrays; return the future of their sum, and the pids of sender and receiver."""
    client.wait_for_workers(2)
    first, second = sorted(client.nthreads())
    arrays = client.map(WORK.make, range(40), workers=[first], allow_other_workers=True, pure=False)
    wait(arrays)
    before, pids = copied_bytes(client, name)[second], client.run(os.getpid)
    result = client.submit(WORK.total, *arrays, workers=[second], pure=False)
    until(lambda: result.done() or copied_bytes(client, name)[second] > before, "bytes come", every_s=0.001)
    return result, pids[first], pids[second]


def held(client: Client) -> list[int]:
    """Wait until nothing is lent; return the descriptors of each worker."""
    until(lambda: not any(lent for lent, _ in client.run(WORK.held).values()), "no frame is held")
    return [count for _, count in client.run(WORK.held).values()]


def test_values_go_the_way_that_the_option_allows(way: tuple[Client, str]) -> None:
    client, name = way
    first, second = sorted(client.nthreads())
    arrays = client.map(WORK.make, range(8), workers=[first], pure=False)
    assert client.submit(WORK.are_in_a_pool, *arrays, workers=[second]).result() or name == "cut_bytes"
    text = "by one copy" if name == "copied_bytes" else "by the connection (node_copies=False)"
    assert f"large values within a node: {text}" in " ".join(str(client.cluster.bindings()).split())
    before, value = this_process.copied_bytes, WORK.make(1, 16 * MIB)
    for direct in (True, False):  # by the scheduler, too
        assert (client.gather(client.scatter(value, direct=direct, hash=False), direct=direct) == value).all()
    here, scheduler = this_process.copied_bytes - before, client.run_on_scheduler(WORK.moved)
    copied = [here, scheduler, sum(copied_bytes(client).values())]
    assert [nbytes > 0 for nbytes in copied] == [name == "copied_bytes"] * 3


def test_values_cross_full_buffers_and_a_stopped_receiver(way: tuple[Client, str]) -> None:
    client, name = way
    for nbytes, count in ((3 * MIB, 40), (60 << 10, 300), (4 << 10, 300)):
        both = sorted(client.nthreads())
        made = [client.map(WORK.make, range(count), nbytes=nbytes, workers=[w], pure=False) for w in both]
        sums = [client.submit(WORK.total, *made[i], workers=[both[not i]], pure=False) for i in range(2)]
        assert client.gather(sums) == [WORK.total(*(WORK.make(i, nbytes) for i in range(count)))] * 2
    descriptors = []
    for _ in range(2):
        result, _, receiver = transfer(client, name)
        client.run(WORK.limit, 0.5)
        os.kill(receiver, signal.SIGSTOP)
        time.sleep(1.5)  # longer than the limit
        os.kill(receiver, signal.SIGCONT)
        assert result.result(timeout=scaled(100)) == TOTAL
        descriptors.append(max(held(client)))
    assert descriptors[1] <= descriptors[0] + 4, "as of one connection more, with data connections"


def test_values_that_change_on_their_way_are_old_or_new(way: tuple[Client, str], tmp_path: Path) -> None:
    client, _ = way
    for value in range(0, 20, 2):
        array = np.full(8 * MIB, value, np.uint8)
        kinds = client.submit(lambda x: set(np.unique(x).tolist()), array, pure=False)
        array[:] = value + 1
        assert kinds.result() <= {value, value + 1}
        scattered = client.scatter(array, hash=False)
        array[:] = 255
        assert (scattered.result() == value + 1).all()
    (path := tmp_path / "mapped").write_bytes(b"1" * 64 * MIB)
    first, second = sorted(client.nthreads())
    mapped = client.submit(np.memmap, path, np.uint8, "r", workers=[first], allow_other_workers=True, pure=False)
    wait(mapped)
    result = client.submit(WORK.total, mapped, workers=[second], pure=False)
    os.truncate(path, 0)  # who reads it gets SIGBUS, and who maps it again an error
    wait(result, timeout=scaled(60))
    assert client.gather([result], errors="skip") in ([], [ord("1") * 64 * MIB])


def test_values_survive_a_restart_and_a_dead_peer(way: tuple[Client, str]) -> None:
    client, name = way
    result, _, _ = transfer(client, name)
    client.restart()
    assert result.status in ("cancelled", "finished")
    result, sender, _ = transfer(client, name)
    os.kill(sender, signal.SIGKILL)
    assert result.result(timeout=scaled(100)) == TOTAL
    assert held(client)
    result, *pids = transfer(client, name)
    os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)
    with contextlib.suppress(FutureCancelledError, OSError):  # as far as the client had come
        assert result.result(timeout=scaled(60)) == TOTAL
    until(lambda: not any(map(psutil.pid_exists, pids)), "the workers have ended")


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

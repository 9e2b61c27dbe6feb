"""The memory of workers: how it is trimmed, allocated, watched; and the summary of a run."""

import ctypes
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ranks
from distributed import Client, Worker, wait
from shared_host import by_root
from waiting import until

import hpcgpu
from hpcgpu import LocalGPUCluster, sim
from hpcgpu.host import host_memory

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
THRESHOLD = "MALLOC_TRIM_THRESHOLD_"
FRAGMENTS = 4000  # of 16 KiB: below the mmap threshold, so that they lie in the heap
# Fills the simulated GPU (400 MiB, in a worker whose memory_limit is 250 MB) and lets the monitors look at it.
FILL = """
    from hpcgpu import sim
    c = Client()
    pid = c.run(os.getpid)

    def fill(dask_worker):
        import numpy as np
        gpu = sim.current_gpu()
        dask_worker.kept = [gpu.asarray(np.ones(50 << 20, "u1")) for _ in range(8)]
        return gpu.used_bytes, dask_worker.monitor.proc.memory_info().rss, dask_worker.monitor.get_process_memory()

    used, rss, measured = next(iter(c.run(fill).values()))

    async def look(dask_worker):
        import asyncio
        for _ in range(20):  # the monitors look every 100 ms
            await asyncio.sleep(0.1)
            dask_worker.memory_manager.memory_monitor and await dask_worker.memory_manager.memory_monitor(dask_worker)
        return dask_worker.status.name

    (limit,) = (worker["memory_limit"] for worker in c.scheduler_info()["workers"].values())
    assert used == 400 << 20
    assert rss > limit > measured > 0
    assert (list(c.run(look).values()), c.run(os.getpid)) == (["running"], pid)
"""


def heap_left(mib: int = 32) -> int:
    """Fill the end of the heap, free it, and return what of it glibc has kept: ``keepcost`` of mallinfo2(3)."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.mallinfo2.restype = type("Mallinfo2", (ctypes.Structure,), {"_fields_": [("numbers", ctypes.c_size_t * 10)]})
    blocks = [0] * (mib * MIB // (60 * KIB))  # a list that grows would itself lie between them, or above
    for i in range(len(blocks)):
        blocks[i] = libc.malloc(60 * KIB)
    for block in reversed(blocks):
        libc.free(block)
    return int(libc.mallinfo2().numbers[9])


def fill(dask_worker: Worker) -> None:
    """Leave a heap that is free but for its end, which glibc keeps."""
    blocks = [bytes(16 * KIB) for _ in range(FRAGMENTS)]
    dask_worker.left = [blocks[-1], *blocks[:-1:100]]


def check_threshold(client: Client, kept: bool, threshold: str) -> None:
    """Compare with what glibc does in the forked workers."""
    assert {nbytes > 16 * MIB for nbytes in client.run(heap_left).values()} == {kept}
    assert set(client.run(os.getenv, THRESHOLD).values()) == {threshold}


@pytest.mark.usefixtures("importable")
def test_trimming_gives_back_what_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the end of the heap, without being asked, beyond a threshold of ours."""
    monkeypatch.delenv(THRESHOLD, raising=False)
    with LocalGPUCluster(gpus="sim:2") as cluster, Client(cluster) as client:
        check_threshold(client, False, str(16 * MIB))
        client.run(fill)
        given_back = cluster.trim_memory()
        names = [w.spec.name for w in cluster.bindings().workers]
        assert list(given_back) == names
        assert min(given_back.values()) > FRAGMENTS * 16 * KIB // 2
        again = hpcgpu.trim_memory(client)
        assert max(again.values()) < FRAGMENTS * 16 * KIB // 4
        memory = cluster.memory()
        assert [w.name for w in memory.workers] == names
        assert all(w.device_source == "simulated" and w.device_limit_bytes for w in memory.workers)


@pytest.mark.usefixtures("importable")
def test_the_users_threshold_of_glibc_is_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THRESHOLD, str(GIB))
    with LocalGPUCluster(gpus="sim:1") as cluster, Client(cluster) as client:
        check_threshold(client, True, str(GIB))


def test_the_heap_is_trimmed_before_data_goes_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond 0.7 of ``memory_limit``, distributed asks the store to bring the process down to 0.6."""
    monkeypatch.delenv(THRESHOLD, raising=False)

    def fill_more(dask_worker: Worker) -> int:
        blocks = [b"x" * (64 * KIB) for _ in range(480 * MIB // (64 * KIB))]
        dask_worker.left = blocks[::100]
        return host_memory.resident_bytes()

    with LocalGPUCluster(gpus="sim:1", memory_limit="600MiB") as cluster, Client(cluster) as client:
        data = client.submit(np.ones, 20 * MIB, dtype="u1")
        wait(data)
        assert min(client.run(fill_more).values()) > 480 * MIB
        until(lambda: max(client.run(host_memory.resident_bytes).values()) < 360 * MIB, "the heap is trimmed")
        assert set(client.run(lambda dask_worker: dask_worker.data.tiers["disk"]).values()) == {0}


def test_the_workers_of_a_cluster_have_jemalloc() -> None:
    if not host_memory.find_jemalloc(os.environ):
        pytest.skip("no libjemalloc.so.2 here")
    with LocalGPUCluster(gpus="sim:1", allocator="jemalloc") as cluster, Client(cluster):
        assert cluster.memory().total.allocator.startswith("jemalloc 5.")


@pytest.mark.usefixtures("importable")
def test_where_there_is_no_jemalloc_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Then the workers' threshold of glibc is in force; a value that is no number is left out."""
    monkeypatch.delenv(THRESHOLD, raising=False)
    monkeypatch.setattr(host_memory, "find_jemalloc", lambda environ: "")  # a machine without it
    options = {"allocator": "jemalloc", "env": {THRESHOLD: "1000000000", "MALLOC_TOP_PAD_": "much"}}
    with LocalGPUCluster(gpus="sim:1", **options) as cluster, Client(cluster) as client:
        assert cluster.memory().total.allocator == "system"
        check_threshold(client, True, "1000000000")
    assert capfd.readouterr().err.count("no libjemalloc.so.2 in ") == 1


def test_a_full_simulated_gpu_neither_pauses_nor_terminates(tmp_path: Path) -> None:
    options = ("--gpus", "sim:1x450MiB", "--memory-limit", "250MB")
    done = ranks.run(ranks.script(tmp_path, FILL), options=options)
    assert done.returncode == 0, done.stderr
    assert not re.search("Pausing|Restarting|memory budget", done.stderr)


def test_a_host_full_of_memory_is_still_terminated(tmp_path: Path) -> None:
    code = """
        import queue
        c, news = Client(), queue.Queue()
        before = list(c.scheduler_info()["workers"])
        c.subscribe_topic("all", lambda event: news.put(event[1]))
        f = c.submit(lambda: (bytearray(400 << 20), time.sleep(60)), retries=0)
        while (event := news.get())["action"] != "add-worker":
            continue
        print("another worker" if event["worker"] not in before else "the same")
    """
    done = ranks.run(ranks.script(tmp_path, code), options=("--gpus", "sim:1x64MiB", "--memory-limit", "300MB"))
    assert done.stdout == "another worker\n", done.stderr
    assert "exceeded 95% memory budget" in done.stderr


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup of 700 MiB."""
    files = {"/sys/fs/cgroup/memory": "memory.limit_in_bytes", "/sys/fs/cgroup": "memory.max"}
    above = next(path for path in files if Path(path).is_dir())
    folder = Path(above, f"hpcgpu-test-{os.getpid()}")
    try:
        folder.mkdir()
        (folder / files[above]).write_text(str(700 * MIB))
    except OSError as e:
        pytest.skip(f"no memory cgroup can be made here: {e}")
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text(), "its processes have ended", limit_s=30)
    folder.rmdir()


@by_root
def test_processes_killed_for_lack_of_memory_are_named(tmp_path: Path, small_cgroup: Path) -> None:
    """A worker, then the script; of a job with three ranks."""
    code = """
        import queue, warnings
        c, texts = Client(), queue.Queue()
        warnings.showwarning = lambda text, *_: texts.put(str(text))
        error = c.submit(lambda: len(bytes(1) * (2 << 30)), retries=0).exception()
        print(type(error).__name__, texts.get(timeout=60), flush=True)
        bytes(1) * (2 << 30)
    """
    inside = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(small_cgroup / "cgroup.procs")]
    argv = [*inside, *ranks.command(ranks.script(tmp_path, code), options=("--gpus", "sim:2x16MiB"), ranks=3)]
    late = {"TERMINATE": "False", "PAUSE": "False"}  # Dask's own look at the memory comes too late
    env = {f"DASK_DISTRIBUTED__WORKER__MEMORY__{name}": value for name, value in late.items()}
    done = ranks.run_command(argv, {**env, "DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "0"})
    why = rf"was killed by signal 9: out of memory \(700.0 MiB, cgroup {small_cgroup}; .*"
    text = rf"worker \S+ \(process \d+\) {why}"
    assert re.fullmatch(f"KilledWorker {text}\n", done.stdout), done.stderr
    assert re.search(f"WARNING - {text}", done.stderr)
    assert re.search(f"hpcgpu: the script {why}", done.stderr)
    assert done.returncode == 137


def test_a_script_ends_with_its_summary(tmp_path: Path) -> None:
    code = """
        from distributed import wait
        c = Client()
        c.submit(time.sleep, 0.3).result()
        wait(c.map(lambda i: 100 // (i - 7), range(30), pure=False))
        print("done")
    """
    done = ranks.run(ranks.script(tmp_path, code), options=("--gpus", "sim:2"))
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    summary = re.findall(r"^hpcgpu: summary: (.*)$", done.stderr, re.M)
    assert re.search(r" with 2 GPUs, 0\.\d\d GPU hours, a task ran in ", summary[0])  # on a slow machine 12 s: 0.01
    assert summary[2] == "nothing was spilled"
    assert "JSON" not in done.stderr  # which the log of a batch job has


def test_a_cluster_is_asked_while_it_runs_and_after_its_end() -> None:
    with LocalGPUCluster(gpus="sim:2x64MiB", quiet=True) as cluster, Client(cluster) as client:
        held = client.map(lambda i: sim.asarray(np.full(8 << 20, i, "u1")), range(16))
        client.gather(client.map(lambda x: int(x[0]), held))
        assert all(client.run(lambda dask_worker: dask_worker.data.settle(60)).values())
        first = cluster.summary()  # the workers' figures of now, though their heartbeats are half a second apart
        assert (first.gpus, first.workers, first.restarts) == (2, 2, 0)
        assert first.moved_bytes["device_to_host"] >= 16 * MIB
        assert 0 < first.busy_share <= 1
        assert first.peak_bytes["device"] >= 40 * MIB
        client.restart_workers([next(iter(client.scheduler_info()["workers"]))])
        client.wait_for_workers(2)
    last = cluster.summary()
    assert last.restarts == 1
    assert last.moved_bytes["device_to_host"] >= first.moved_bytes["device_to_host"]
    assert json.loads(last.as_json())["gpus"] == 2

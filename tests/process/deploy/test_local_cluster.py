"""LocalGPUCluster: the cluster class, whole, on this machine."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import dask
import psutil
import pytest
import ranks
from distributed import Client, get_worker
from waiting import scaled, until

import hpcgpu
from hpcgpu import LocalGPUCluster, SLURMGPUCluster
from hpcgpu.errors import ConfigError, JobError, LaunchError, SubmitError


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)  # so that it is looked for again
    return tmp_path


def runs(home: Path) -> list[Path]:
    """The folders of runs that are there."""
    return [*(home / ".hpcgpu" / "runs").glob("*"), *(home / "tmp").glob("hpcgpu-*")]


def test_with(own_home: Path) -> None:
    with LocalGPUCluster(gpus="sim:2", nthreads=2) as cluster, Client(cluster) as client:
        assert client.submit(sum, [1, 2]).result() == 3
        assert len(client.scheduler_info()["workers"]) == 2
        assert "workers=2, threads=4" in repr(cluster)
        assert client.scheduler.address.startswith("tls://127.0.0.1:")
        # what was imported once is out of the collector's sight, everything else in it
        assert set(client.run(lambda: gc.isenabled() and gc.get_freeze_count() > 10_000).values()) == {True}
        for refused in (cluster.scale, cluster.adapt):
            with pytest.raises(ConfigError, match="GPUs of this machine"):
                refused(2)
        job = psutil.Process(int(cluster.job_id))
        family = [job, *job.children(recursive=True)]
    assert cluster.status.name == "closed"
    assert len(family) == 5  # leader, fork server, scheduler, two workers
    assert psutil.wait_procs(family, timeout=scaled(30))[1] == []
    assert runs(own_home) == []


@pytest.mark.parametrize("ranks", ["gpu", "node"])
def test_cpu_workers_beside_those_of_the_gpus(ranks: str) -> None:
    launcher = "mpirun" if ranks == "gpu" else "fork"
    given = {"gpus": "sim:2", "cpu_workers": 2, "ranks": ranks, "launcher": launcher}
    with LocalGPUCluster(**given) as cluster, Client(cluster) as client:
        workers = client.scheduler_info(n_workers=-1)["workers"]
        on_gpu = {a for a, w in workers.items() if w["resources"] == {"GPU": 1}}
        on_cpu = {a for a, w in workers.items() if w["resources"] == {"CPU": 1}}
        assert (len(workers), len(on_gpu), len(on_cpu)) == (4, 2, 2)
        assert all(w["name"].rpartition("-")[2].startswith("cpu") == (a in on_cpu) for a, w in workers.items())
        for resource, where in (("GPU", on_gpu), ("CPU", on_cpu)):
            tasks = client.map(lambda i: get_worker().address, range(8), resources={resource: 1}, pure=False)
            assert set(client.gather(tasks)) <= where
        visible = client.run(lambda: os.environ.get("CUDA_VISIBLE_DEVICES"))
        assert {visible[a] for a in on_cpu} == {""}
        bindings = cluster.bindings()
        assert bindings.differences == {}
        assert [w.spec.gpu is None for w in bindings.workers] == [False, False, True, True]
        devices = {w.name: w.device_capacity_bytes for w in hpcgpu.memory(client).workers}
        assert [size is None for size in devices.values()] == [False, False, True, True]
        assert len(client.submit(lambda: b"x" * 1000, resources={"CPU": 1}).result()) == 1000


def test_bindings_are_read_back_for_all_threads() -> None:
    """Also for those made later; what strays from the plan is named."""

    def start_thread() -> None:
        threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()

    def stray() -> None:
        """Move the calling thread to other cores, as a library that binds itself does."""
        now, everything = os.sched_getaffinity(0), set(range(os.cpu_count() or 1))
        os.environ["MARK"] = "2"
        os.sched_setaffinity(0, everything - now)

    with LocalGPUCluster(gpus="sim:2", env={"MARK": "1"}) as cluster, Client(cluster) as client:
        client.run(start_thread)
        found = cluster.bindings()
        assert found.differences == {}
        for worker in found.workers:
            masks = {mask for _, mask in worker.actual.threads}
            assert masks == {worker.spec.binding.cpuset}
            assert len(worker.actual.threads) >= 3  # the event loop's, the executor's or a library's, and the new one
            assert ("MARK", "1") in worker.actual.env
        planned = found.workers[0].spec.binding.cpuset
        assert str(found).count(f"{planned}  ") >= 2
        assert "read back from the kernel" in str(found)
        name = found.workers[1].spec.name
        victim = next(a for a, w in client.scheduler_info()["workers"].items() if w["name"] == name)
        if len(os.sched_getaffinity(0)) > 1:
            client.run(stray, workers=[victim])
            found = hpcgpu.bindings(client)
            assert list(found.differences) == [name]
            assert any("threads may run on PUs" in d for d in found.differences[name])
            assert "MARK is 2, planned: 1" in found.differences[name]
            assert "1 of 2 workers not as planned" in str(found)
            assert "not as planned: " in found._repr_html_()


def test_several_workers_share_a_gpu() -> None:
    with LocalGPUCluster(gpus="sim:2x256MiB", workers_per_gpu=2) as cluster:
        workers = cluster.bindings().workers
    assert [w.spec.gpu.uuid[-1] for w in workers] == ["0", "0", "1", "1"]
    assert {w.spec.device_memory_bytes for w in workers} == {128 << 20}


def test_explain_says_where_a_setting_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCGPU_NTHREADS", "3")
    with LocalGPUCluster(gpus="sim:1") as cluster:
        text = cluster.explain()
        secret = cluster.dashboard_link.split("/")[3]
    assert "gpus = 'sim:1'    (keyword gpus of LocalGPUCluster)" in text
    assert "nthreads = 3    (HPCGPU_NTHREADS)" in text
    assert "-m hpcgpu.agent" in cluster.job_script()
    assert secret not in text + repr(cluster)


def test_ranks_by_mpirun_inside_somebody_elses_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ranks.environment(SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="3").items():
        monkeypatch.setenv(name, value)
    with LocalGPUCluster(gpus="sim:2", launcher="mpirun") as cluster, Client(cluster) as client:
        assert client.submit(sum, [1, 2]).result() == 3
        job = psutil.Process(int(cluster.job_id))
        agents = [p for p in job.children() if "hpcgpu.agent" in p.cmdline()]
        assert len(agents) == 3
    assert "mpirun" in cluster.job_script()


def test_options_reach_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"env": {"MINE": "a b"}, "resources": {"GPU": 2}, "nthreads": 2, "device_memory_limit": 0.5}
    scratch = tmp_path / "scratch"
    monkeypatch.setenv("MY_SCRATCH", str(scratch))
    options = {**given, "memory_limit": "500MB", "local_directory": "$MY_SCRATCH/spill"}
    with LocalGPUCluster(gpus="sim:1x64MiB", **options) as cluster, Client(cluster) as client:
        (facts,) = client.scheduler_info()["workers"].values()
        spec = next(iter(client.run(lambda dask_worker: dask_worker.plugins["hpcgpu"].spec).values()))
        mine = next(iter(client.run(lambda: os.environ["MINE"]).values()))
    assert (facts["nthreads"], facts["resources"], facts["memory_limit"]) == (2, {"GPU": 2}, 500_000_000)
    assert mine == "a b"
    assert spec.device_memory_limit_bytes == 32 << 20
    assert facts["local_directory"].startswith(str(scratch / "spill"))


@pytest.mark.parametrize(
    ("key", "told"), [("hpcgpu", "3 dask config hpcgpu.nthreads, {} True"), ("other", "1 default False")]
)
def test_dask_configuration_is_read_without_dask(own_home: Path, key: str, told: str) -> None:
    file = own_home / ".config/dask/mine.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(f"{key}: {{nthreads: 3}}")
    code = (
        "import sys; from hpcgpu.deploy.settings import read; s = read({}, 'x {name}').settings; "
        "print(s.nthreads, s.where('nthreads'), 'dask' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{told.format(file)}\n"


def test_workers_have_the_dask_configuration_of_the_script() -> None:
    """As those of Dask's LocalCluster."""

    def read() -> tuple[float, dict[str, int]]:
        return dask.config.get("distributed.worker.memory.target"), dask.config.get("mine")

    said = {"distributed.worker.memory.target": 0.25, "mine": {"n": 1, "function": print}}
    with dask.config.set(said), LocalGPUCluster(gpus="sim:1") as cluster, Client(cluster) as client:
        assert list(client.run(read).values()) == [(0.25, {"n": 1})]
        (worker,) = client.run(lambda dask_worker: dask_worker.data.host_limit_bytes).values()
        (limit,) = client.run(lambda dask_worker: dask_worker.memory_manager.memory_limit).values()
        assert worker == int(0.25 * limit)


def test_what_people_should_know_of_the_node_is_said(own_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run's log may go with the cluster; it says it once, too, and not for each worker."""
    given = {"gpus": "sim:2x16MiB", "device_memory_limit": "1GB", "log_directory": str(own_home)}
    with dask.config.set({"distributed.worker.memory.max-spill": "1 PiB"}), LocalGPUCluster(**given):
        said = [line.removeprefix("hpcgpu: ") for line in capfd.readouterr().err.splitlines()]
    # a slow start says that it is waited for, too
    lowered, room = [line for line in said if not re.match("dashboard:|READY|(job|pid) ", line)]
    assert "device_memory_limit=1000000000 (set by keyword device_memory_limit of LocalGPUCl" in lowered
    assert "is lowered to 16.0 MiB" in lowered
    assert "2.0 PiB may be spilled there" in room
    assert (own_home / "hpcgpu.log").read_text().count(" may be spilled there") == 1
    capfd.readouterr()  # and so does a slow end
    with LocalGPUCluster(**given, quiet=True):
        pass
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("limit", "words"), [("900TB", "memory_limit"), ("1MB", "976.6 KiB"), ("50MB", "before it has any data")]
)
def test_ranks_that_fail_raise_with_the_log(own_home: Path, limit: str, words: str) -> None:
    with pytest.raises(JobError, match=rf"exit code 1(.|\n)*{words}") as failed:
        LocalGPUCluster(gpus="sim:2", memory_limit=limit)
    assert runs(own_home) == []
    assert "the end of its log (log_directory= keeps it):" in str(failed.value)
    assert not re.search(r"/\S+\.log", str(failed.value))  # it went with the run


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"gpu": "sim:1"}, "did you mean 'gpus'"),
        ({"device_memory_limit": 1.5}, "keyword device_memory_limit of LocalGPUCluster"),
        ({"device_memory_limit": -1}, "fraction"),
        ({"device_memory_limit": "5 Gigs"}, "5GB"),
        ({"nodes": 0}, "whole number from 1"),
        ({"gpus": "sim:2", "n_workers": 3}, "leave n_workers out"),
        ({"gpus": "sim:2", "nodes": 3}, r"nodes=3 \(set by keyword nodes of LocalGPUCluster\): .* one machine"),
        ({"gpus": "sim:2", "shape": "elastic"}, "shape='elastic' .* one machine"),
        ({"gpus": "sim:2", "memory": "8GiB"}, "memory=8589934592 .* one machine"),
    ],
)
def test_bad_input_starts_nothing(own_home: Path, options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LocalGPUCluster(**options)
    assert not (own_home / ".hpcgpu").exists()


def test_submit_without_the_batch_system_names_the_way(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(own_home))
    with pytest.raises(SubmitError, match=r"sbatch: there is no such program .*; .* LocalGPUCluster"):
        SLURMGPUCluster(gpus="sim:1", quiet=True)
    assert runs(own_home) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"python": "/none/python"}, "No such file or directory: '/none/python'.*python= and launcher="),
        ({"log_directory": "/proc/none"}, "'/proc/none'.*log_directory"),
    ],
)
def test_what_cannot_be_started_is_named(own_home: Path, options: dict[str, str], words: str) -> None:
    with pytest.raises(LaunchError, match=words):
        LocalGPUCluster(gpus="sim:1", **options)
    assert runs(own_home) == []


CLIENT = """
import os, sys
from hpcgpu import LocalGPUCluster
if __name__ == "__main__":
    cluster = LocalGPUCluster(gpus="sim:1", client_grace=2)
    print(cluster.job_id, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP])
def test_a_dead_client_leaves_nothing(tmp_path: Path, own_home: Path, sig: signal.Signals) -> None:
    """A stopped one has been silent for longer than its grace; the job itself stays its zombie."""
    script = tmp_path / "client.py"
    script.write_text(CLIENT)
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as client:
        try:
            assert client.stdout
            job = psutil.Process(int(client.stdout.readline()))
            family = [job, *job.children(recursive=True)]
            client.send_signal(sig)
            if sig != signal.SIGSTOP:
                client.wait(scaled(30))
            assert psutil.wait_procs(family[sig == signal.SIGSTOP :], timeout=scaled(30))[1] == []
        finally:
            client.kill()
    until(lambda: not runs(own_home), "the folder of the run is gone")


def test_import_is_light() -> None:
    code = (
        "import sys; before = set(sys.modules); import hpcgpu; "
        "print(sorted(m for m in set(sys.modules) - before if m.split('.')[0] in "
        "('dask', 'distributed', 'numpy', 'click', 'rich', 'yaml', 'asyncio', 'msgspec')))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "[]\n"
    assert "LocalGPUCluster" in dir(hpcgpu)

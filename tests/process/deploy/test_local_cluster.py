"""LocalGPUCluster: the cluster class, whole, on this machine."""

import gc
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import dask
import psutil
import pytest
import ranks
from distributed import Client, get_worker
from waiting import Said, scaled, until

import hpcgpu
from hpcgpu import LocalGPUCluster, SLURMGPUCluster
from hpcgpu.errors import ConfigError, JobError, LaunchError, SubmitError
from hpcgpu.model.allocation import Limits
from hpcgpu.plan.jobs.needs import Size, needs

START = """
def dask_setup(worker):
    if worker.name.endswith("-1"):
        __import__("time").sleep(3600)
    if worker.name.endswith("-2") and not __import__("os").path.exists(TRIED):
        open(TRIED, "w").close()
        __import__("os")._exit(3)  # distributed only logs what a preload raises
"""


def runs(home: Path) -> list[Path]:
    """Return the folders of runs."""
    return [*(home / ".hpcgpu" / "runs").glob("*"), *Path(tempfile.gettempdir()).glob("hpcgpu-*")]


def test_a_cluster_from_start_to_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HPCGPU_NTHREADS", "2")
    cluster = LocalGPUCluster(gpus="sim:2")
    client = Client(cluster)
    assert client.submit(sum, [1, 2]).result() == 3
    assert len(client.scheduler_info()["workers"]) == 2
    assert "workers=2, threads=4" in repr(cluster)
    assert client.scheduler.address.startswith("tls://127.0.0.1:")
    # what was imported once is out of the collector's sight, everything else in it
    assert set(client.run(lambda: gc.isenabled() and gc.get_freeze_count() > 10_000).values()) == {True}
    for refused in (cluster.scale, cluster.adapt):
        with pytest.raises(ConfigError, match="GPUs of this machine"):
            refused(2)
    text = cluster.explain()
    assert re.search(r"^gpus +sim:2 +keyword gpus of LocalGPUCluster$", text, re.M)
    assert re.search(r"^nthreads +2 +HPCGPU_NTHREADS$", text, re.M)
    assert cluster.dashboard_link.split("/")[3] not in text + repr(cluster)
    assert "-m hpcgpu.agent" in cluster.job_script()
    job = psutil.Process(int(cluster.job_id))
    family = [job, *job.children(recursive=True)]
    assert len(family) == 5  # leader, fork server, scheduler, two workers
    client.close()
    cluster.close()
    assert cluster.status.name == "closed"
    assert psutil.wait_procs(family, timeout=scaled(30))[1] == []
    assert runs(tmp_path) == []


def test_dasks_variables_in_env_reach_the_workers() -> None:
    def read(dask_worker: Any) -> tuple[float, list[int]]:
        return dask_worker.memory_manager.memory_pause_fraction, dask.config.get("mine.sizes")

    options: dict[str, Any] = {"gpus": "sim:1", "dashboard": False, "quiet": True}
    pause = "DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE"
    env = {pause: "0.71", "DASK_MINE__SIZES": "[1, 2]", pause.replace("PAUSE", "TERMINATE"): "0.92"}
    with LocalGPUCluster(**options, env=env) as cluster, Client(cluster) as client:
        assert [*client.run(read).values()] == [(0.71, [1, 2])]
        terminate = client.run(lambda dask_worker: dask_worker.memory_manager.memory_terminate_fraction, nanny=True)
        assert [*terminate.values()] == [0.92]
    with pytest.raises(JobError, match=r"memory.pause: 'much' is no fraction; allowed: "):
        LocalGPUCluster(**options, env={pause: "much"})


@pytest.mark.parametrize("launcher", ["mpirun", "fork"])
def test_cpu_workers_beside_those_of_the_gpus(launcher: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside of somebody else's job, and with the user's own hosts for mpirun."""
    users = {"PRTE_MCA_prte_default_hostfile": "/none/hosts", "HYDRA_HOST_FILE": "/none/hosts"}
    for name, value in ranks.environment(SLURM_JOB_ID="7", SLURM_JOB_NUM_NODES="3", **users).items():
        monkeypatch.setenv(name, value)
    given = {"gpus": "sim:2", "cpu_workers": 2, "ranks": "gpu" if launcher == "mpirun" else "node"}
    with LocalGPUCluster(**given, launcher=launcher) as cluster, Client(cluster) as client:
        agents = [p for p in psutil.Process(int(cluster.job_id)).children() if "hpcgpu.agent" in p.cmdline()]
        assert (len(agents) > 2) == (launcher == "mpirun")
        assert ("mpirun" in cluster.job_script()) == (launcher == "mpirun")
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


async def test_several_workers_share_a_gpu_of_an_asynchronous_cluster() -> None:
    options = {"gpus": "sim:2x256MiB", "workers_per_gpu": 2, "asynchronous": True}
    async with LocalGPUCluster(**options) as cluster, Client(cluster, asynchronous=True) as client:
        workers = (await cluster.bindings()).workers
        assert [w.spec.gpu.uuid[-1] for w in workers] == ["0", "0", "1", "1"]
        assert {w.spec.device_memory_bytes for w in workers} == {128 << 20}
        assert await client.submit(sum, [1, 2]) == 3


def test_options_and_dasks_configuration_reach_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of the script, as with Dask's LocalCluster."""

    def read() -> tuple[str, float, dict[str, int]]:
        return os.environ["MINE"], dask.config.get("distributed.worker.memory.target"), dask.config.get("mine")

    monkeypatch.setenv("MY_SCRATCH", str(tmp_path / "scratch"))
    options = {"env": {"MINE": "a b"}, "resources": {"GPU": 2}, "nthreads": 2, "device_memory_limit": 0.5}
    options |= {"memory_limit": "500MB", "local_directory": "$MY_SCRATCH/spill"}
    config = {"distributed.worker.memory.target": 0.25, "mine": {"n": 1, "function": print}}
    with dask.config.set(config), LocalGPUCluster(gpus="sim:1x64MiB", **options) as cluster, Client(cluster) as client:
        (facts,) = client.scheduler_info()["workers"].values()
        assert (facts["nthreads"], facts["resources"], facts["memory_limit"]) == (2, {"GPU": 2}, 500_000_000)
        assert facts["local_directory"].startswith(str(tmp_path / "scratch/spill"))
        assert list(client.run(read).values()) == [("a b", 0.25, {"n": 1})]
        (spec,) = client.run(lambda dask_worker: dask_worker.plugins["hpcgpu"].spec).values()
        assert spec.device_memory_limit_bytes == 32 << 20
        assert list(client.run(lambda dask_worker: dask_worker.data.host_limit_bytes).values()) == [125_000_000]


@pytest.mark.parametrize("text", ["hpcgpu: {nthreads: 3}", "other: 1"])
def test_dasks_configuration_is_read_without_importing_dask(tmp_path: Path, text: str) -> None:
    path = tmp_path / ".config/dask/mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    code = "import sys; from hpcgpu.deploy.settings import read; s = read({}, 'x {name}').settings; "
    code += "print(s.nthreads, s.where('nthreads'), 'dask' in sys.modules)"
    where = f"3 dask config hpcgpu.nthreads, {path} True\n"
    done = ranks.run_command([sys.executable, "-c", code])
    assert done.stdout == (where if "hpcgpu" in text else "1 default False\n")


def test_notes_of_the_node_are_printed_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run's log may go with the cluster; it says it once, too, and not for each worker."""
    given = {"gpus": "sim:2x16MiB", "device_memory_limit": "1GB", "log_directory": str(tmp_path)}
    with dask.config.set({"distributed.worker.memory.max-spill": "1 PiB"}), LocalGPUCluster(**given):
        said = [line.removeprefix("hpcgpu: ") for line in capfd.readouterr().err.splitlines()]
    # a slow start says that it is waited for, too
    lowered, room = [line for line in said if not re.match("dashboard:|READY|this machine: ", line)]
    assert "device_memory_limit=1000000000 (set by keyword device_memory_limit of LocalGPUCl" in lowered
    assert "is lowered to 16.0 MiB" in lowered
    assert "2.0 PiB may be spilled there" in room
    assert (tmp_path / "hpcgpu.log").read_text().count(" may be spilled there") == 1
    capfd.readouterr()  # and so does a slow end
    with LocalGPUCluster(**given, quiet=True):
        pass
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("limit", "words"), [("1MB", "976.6 KiB"), ("50MB", "before it has any data")])
def test_ranks_that_fail_raise_with_the_log(tmp_path: Path, limit: str, words: str) -> None:
    with pytest.raises(JobError, match=rf"exit code 1(.|\n)*{words}") as failed:
        LocalGPUCluster(gpus="sim:2", memory_limit=limit)
    assert runs(tmp_path) == []
    assert "the end of its log (log_directory= keeps it):" in str(failed.value)
    assert not re.search(r"/\S+\.log", str(failed.value))  # it went with the run


def test_worker_that_does_not_start_is_named_with_its_reason(tmp_path: Path, said: Said) -> None:
    preload = START.replace("TRIED", repr(str(tmp_path / "tried")))
    with (
        dask.config.set({"distributed.worker.preload": [preload]}),
        LocalGPUCluster(gpus="sim:3", death_timeout=scaled(6)) as cluster,
    ):
        assert len(cluster.scheduler_info["workers"]) == 2  # one of them came the second time
        assert re.search(
            r"worker \S+-1: not registered .*\(--death-timeout\)(.|\n)*READY 2 workers.*; 1 did not", said.text
        )
        assert cluster.wanted_workers == 3
        assert re.search(
            r"<strong>2 of 3</strong>(.|\n)*1 worker not started, or lost: \S+: worker \S+-1: not registered",
            cluster._repr_html_(),
        )
        cluster.wait_for_workers(2)
        with pytest.raises(
            JobError, match=r"no more than 2 of 3 workers can be there\. .*worker \S+-1: not registered"
        ):
            cluster.wait_for_workers(3)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"gpu": "sim:1"}, ConfigError, "did you mean 'gpus'"),
        ({"device_memory_limit": 1.5}, ConfigError, "keyword device_memory_limit of LocalGPUCluster"),
        ({"n_workers": 3}, ConfigError, "leave n_workers out"),
        ({"nodes": 3}, ConfigError, r"nodes=3 \(set by keyword nodes of LocalGPUCluster\): .* one machine"),
        ({"shape": "elastic"}, ConfigError, "shape='elastic' .* one machine"),
        ({"memory": "8GiB"}, ConfigError, "memory=8589934592 .* one machine"),
        ({"python": "/none/python"}, LaunchError, "No such file or directory: '/none/python'.*python= and launcher="),
        ({"log_directory": "/proc/none"}, LaunchError, "'/proc/none'.*log_directory"),
        ({"quiet": True}, SubmitError, r"sbatch: there is no such program .*; .* LocalGPUCluster"),
    ],
)
def test_errors_before_the_start_leave_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    if error is SubmitError:
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(error, match=words):
        (SLURMGPUCluster if error is SubmitError else LocalGPUCluster)(**{"gpus": "sim:2", **options})
    assert runs(tmp_path) == []


def test_scheduler_and_node_take_what_is_counted_beforehand() -> None:
    with LocalGPUCluster(gpus="sim:6x16MiB", quiet=True) as cluster, Client(cluster) as client:
        files, _, _, threads, ports = (need.number for need in needs(Size(6, per_node=6), Limits()))
        job = psutil.Process(int(cluster.job_id))

        def taken() -> tuple[int, int, int]:
            processes = [job, *job.children(recursive=True)]
            addresses = [connection.laddr for process in processes for connection in process.net_connections()]
            open_files = client.run_on_scheduler(lambda: psutil.Process().num_fds())
            return open_files, sum(process.num_threads() for process in processes), len({a.port for a in addresses})

        client.gather(client.map(lambda x: x + 1, range(600)))
        until(
            lambda: all(n >= least for n, least in zip(taken(), (files, threads, ports), strict=True)), "all is taken"
        )
        assert taken()[0] <= files + 8, "open files are counted closely: a cluster is refused for them"
    assert re.search(rf"^open files of the scheduler +{files} ", cluster.explain(), re.M)


def test_import_is_light() -> None:
    heavy = {"dask", "distributed", "numpy", "click", "rich", "yaml", "asyncio", "msgspec"}
    code = "import sys; before = set(sys.modules); import hpcgpu; new = set(sys.modules) - before; "
    code += f"print({heavy} & {{name.partition('.')[0] for name in new}})"
    assert ranks.run_command([sys.executable, "-c", code]).stdout == "set()\n"
    assert "LocalGPUCluster" in dir(hpcgpu)


def test_address_or_name_connects_until_the_owner_ends() -> None:
    """As a second notebook does. The folder of a process that is dead has the same name."""
    code = "from distributed import Client; print(Client(*sys.argv[1:]).submit(sum, [1, 2]).result())"
    imported = "import sys; from hpcgpu import LocalGPUCluster as Local"
    loader = {"DASK_DISTRIBUTED__CLIENT__SECURITY_LOADER": "hpcgpu.deploy.cluster.security_loader.load"}
    by_name = "sys.argv[1] = Local.attach('mine')"
    ways = ((f"import sys; {code}", loader), (f"{imported}; {code}", {}), (f"{imported}; {by_name}; {code}", {}))
    with LocalGPUCluster(gpus="sim:1", job_name="mine") as cluster:
        with Client(cluster.scheduler_address) as client:
            assert client.submit(sum, [1, 2]).result() == 3
        (folder,) = Path(tempfile.gettempdir()).glob("hpcgpu-client-*")
        dead = shutil.copytree(folder, Path(f"{folder}"[:-8] + "12345678"))
        for second, env in ways:
            argv = [sys.executable, "-c", second, cluster.scheduler_address]
            other = subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, timeout=scaled(60))
            assert other.stdout == "3\n", other.stderr
        assert not dead.exists()
        with pytest.raises(AttributeError, match="has no jobs"):
            cluster.jobs  # noqa: B018 - the table of a batch system's cluster
        with pytest.raises(ConfigError, match=rf"name 'none'; .*in /\S+: mine \(job_id {cluster.job_id}\)$"):
            LocalGPUCluster.attach("none")
        with pytest.raises(ConfigError, match="take_over=True: a local cluster ends with the process that started it"):
            LocalGPUCluster.attach("mine", take_over=True)
        reads = LocalGPUCluster.attach(cluster.job_id)
        for refused in (reads.shutdown, reads.detach):
            with pytest.raises(JobError, match=rf"it ends with its owner, \S+ {os.getpid()}@"):
                refused()
        assert [len(each.scheduler_info["workers"]) for each in (reads, cluster)] == [1, 1]
    until(lambda: repr(reads).startswith("LocalGPUCluster(mine, lost: "), "the other object is lost")
    reads.close()
    with pytest.raises(ConfigError, match=r"\(TMPDIR\), .*: none$"):
        LocalGPUCluster.attach("mine")


def test_cluster_that_ends_before_its_client_leaves_nothing() -> None:
    """LocalCluster leaves three descriptors and a thread each time (distributed 2026.8.0)."""

    def count() -> tuple[int, int]:
        return len([*Path("/proc/self/fd").iterdir()]), threading.active_count()

    before = count()
    for close in (lambda cluster, _: cluster.close(), lambda _, client: client.shutdown()):
        cluster = LocalGPUCluster(gpus="sim:1x64MiB", dashboard=False, quiet=True)
        client = Client(cluster)
        assert client.submit(sum, [1, 2]).result() == 3
        close(cluster, client)
        until(lambda: count() == before, "descriptors and threads are those of before")
        client.close()
        cluster.close()
    assert count() == before


def test_visible_devices_of_simulated_gpus_are_answered(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """The keyword counts them; the variable, which a batch system may have set, does not."""
    monkeypatch.setenv("HPCGPU_GPUS", "sim:4x64MiB")
    words = "CUDA_VISIBLE_DEVICES=0,1 has no effect on simulated GPUs"
    with LocalGPUCluster(CUDA_VISIBLE_DEVICES=[0, 1], dashboard=False) as cluster:
        assert cluster.wanted_workers == 2
    assert words not in said.text
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for _ in range(2):
        with LocalGPUCluster(dashboard=False) as cluster:
            assert cluster.wanted_workers == 4
    assert said.text.count(words) == 1


@pytest.mark.parametrize("protocol", ["tls", "tcp"])
def test_second_process_joins_by_folder_or_bare_address(
    protocol: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lab's cluster has a ``local_directory``; its second notebook has the address alone, which tcp lets in."""
    monkeypatch.chdir(tmp_path)
    by_folder = "from hpcgpu import LocalGPUCluster as Local; it = Local.attach('scratch/workdir')"
    ways = [by_folder, *(["import sys; it = sys.argv[1]"] if protocol == "tcp" else [])]
    options = {"gpus": "sim:1", "local_directory": "scratch/workdir", "protocol": protocol}
    with LocalGPUCluster(**options) as cluster:
        for way in ways:
            code = f"{way}; from distributed import Client; print(Client(it).submit(sum, [1, 2]).result())"
            other = ranks.run_command([sys.executable, "-c", code, cluster.scheduler_address])
            assert other.stdout == "3\n", other.stderr
    with pytest.raises(ConfigError, match=r"0 local clusters have the folder 'scratch/workdir'; .*: none$"):
        LocalGPUCluster.attach("scratch/workdir")

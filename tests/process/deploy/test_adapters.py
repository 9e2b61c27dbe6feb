"""What users of the older tools start: dask-jobqueue's jobs, dask-mpi's ranks, and a runner in their own script."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from comms import knock
from dask_jobqueue import SLURMCluster
from distributed import Client, LocalCluster
from waiting import scaled, until

import hpcgpu
from hpcgpu.deploy.network.scheduler_file import Certificate, TlsSocket
from hpcgpu.host import host_memory

WORKER = (sys.executable, "-m", "hpcgpu.worker")
INITIALIZE = """
    import dask_mpi
    env = {"DASK_DISTRIBUTED__WORKER__MEMORY__PAUSE": "0.71"}
    options = {"gpus": "sim:2x16MiB", "jit_unspill": True, "env": env}
    dask_mpi.initialize(
        worker_class="hpcgpu.GPUWorker", worker_options=options, memory_limit="1GB", dashboard_address=None
    )
    import hpcgpu
    with Client() as client:
        client.wait_for_workers(2, timeout=60)
        table = hpcgpu.bindings(client)
        stores = client.run(lambda dask_worker: (type(dask_worker.data).__name__, dask_worker.data.jit_unspill))
        pauses = client.run(lambda dask_worker: dask_worker.memory_manager.memory_pause_fraction)
        infos = list(client.scheduler_info()["workers"].values())
        assert set(pauses.values()) == {0.71}
        assert len({w.spec.gpu.pci for w in table.workers}) == 2
        assert len({str(w.spec.binding.cpuset) for w in table.workers}) == min(2, int(sys.argv[1]))
        assert table.differences == {}
        assert set(stores.values()) == {("GpuSpillBuffer", True)}
        assert {w["memory_limit"] for w in infos} == {10**9}
    print("FOLDERS", *(w["local_directory"] for w in infos), flush=True)
"""
AGAIN = """
    import dask
    from distributed import Scheduler, SpecCluster
    from hpcgpu import GPUWorker
    from hpcgpu.deploy.network.node_copies import this_process

    def once(**options):
        gpu = {"cls": GPUWorker, "options": {"nthreads": 1, "gpus": "sim:1x16MiB", **options}}
        scheduler = {"cls": Scheduler, "options": {"dashboard": False}}
        with SpecCluster(workers={"gpu-0": gpu}, scheduler=scheduler) as cluster, Client(cluster) as client:
            return client.submit(sum, [1, 2]).result()

    try:
        once(no_such_option=1)
    except Exception:
        print("failed", end=" ")
    print(once(), this_process.allowed, end=" ")
    with dask.config.set({"hpcgpu.node_copies": False}):
        print(once(), this_process.allowed)
"""
RUNNER = """
    import urllib.request
    print("above", flush=True)
    from hpcgpu import GPURunner
    with GPURunner(gpus="sim:2x16MiB") as runner, Client(runner) as client:
        names = sorted(w["name"].rpartition("-")[2] for w in client.scheduler_info()["workers"].values())
        print("below", names, client.submit(sum, [1, 2]).result(), sys.argv[1:], flush=True)
        assert urllib.request.urlopen(client.dashboard_link, timeout=60).status == 200
    assert runner.dashboard_link == ""
    assert repr(runner) == "GPURunner(closed)"
    sys.exit(3)
"""


@contextlib.contextmanager
def scheduler(**options: Any) -> Iterator[tuple[str, Client]]:
    with LocalCluster(n_workers=0, dashboard_address=None, **options) as cluster, Client(cluster) as client:
        yield cluster.scheduler_address, client


def workers(client: Client) -> dict[str, dict[str, Any]]:
    return {w["name"]: w for w in client.scheduler_info(n_workers=-1)["workers"].values()}


def test_dask_jobqueues_command_starts_bound_spilling_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own job script's command, with TLS: names by which it counts, limits below what the kernel allows."""
    monkeypatch.setattr(ssl.SSLContext, "sslsocket_class", TlsSocket)  # CPython issue 148594

    def socket_class(dask_worker: Any) -> str:
        return dask_worker.connection_args["ssl_context"].sslsocket_class.__name__

    extra = ["--gpus", "sim:2x16MiB", "--jit-unspill", "--device-memory-limit", "0.5"]
    options = {"cores": 4, "processes": 2, "memory": "2TB", "security": True, "shared_temp_directory": str(tmp_path)}
    options |= {"worker_command": "hpcgpu.worker", "scheduler_options": {"dashboard_address": None}}
    options |= {"worker_extra_args": extra, "local_directory": str(tmp_path / "scratch")}
    with SLURMCluster(**options) as cluster, Client(cluster) as client:
        line = shlex.split(cluster.job_script().splitlines()[-1])
        assert line[1:3] == ["-m", "hpcgpu.worker"]
        with ranks.started(line, log := tmp_path / "job.log") as process:
            client.wait_for_workers(2, timeout=scaled(60))
            found = workers(client)
            bindings = hpcgpu.bindings(client)
            stores = client.run(lambda dask_worker: (type(dask_worker.data).__name__, dask_worker.data.jit_unspill))
            specs = client.run(lambda dask_worker: dask_worker.plugins["hpcgpu"].spec.device_memory_limit_bytes)
            sockets = [client.run(socket_class), client.run(socket_class, nanny=True)]
            assert client.submit(sum, [1, 2]).result() == 3
        said = log.read_text()
        assert process.returncode == 128 + signal.SIGTERM
    assert set(found) == {"dummy-name-0", "dummy-name-1"}
    assert {w["nthreads"] for w in found.values()} == {2}
    assert sum(w["memory_limit"] for w in found.values()) < host_memory.memory_limit().nbytes
    assert "is lowered to" in said
    assert not bindings.differences
    assert set(stores.values()) == {("GpuSpillBuffer", True)}
    assert set(specs.values()) == {8 << 20}
    assert {name for each in sockets for name in each.values()} == {"TlsSocket"}
    assert "2 workers at tls://" in said
    assert "not encrypted" not in said
    assert not list((tmp_path / "scratch").iterdir())


def test_worker_by_scheduler_file_ends_when_retired_or_old(tmp_path: Path) -> None:
    file = tmp_path / "scheduler.json"
    argv = [*WORKER, "--scheduler-file", str(file), "--name", "one", "--gpus", "sim:2x16MiB", "--nworkers", "1"]
    with scheduler() as (address, client):
        file.write_text(json.dumps({"address": address}))
        with ranks.started([*argv, "--memory-limit", "1GB"], log := tmp_path / "job.log") as process:
            client.wait_for_workers(1, timeout=scaled(60))
            assert {n: w["memory_limit"] for n, w in workers(client).items()} == {"one": 10**9}  # the plain name
            assert "lowered" not in log.read_text()
            assert "protocol tcp of the scheduler is not encrypted" in log.read_text()
            client.retire_workers()
            assert process.wait(scaled(60)) == 0
        with ranks.started([*argv, "--lifetime", "2s"]) as process:
            client.wait_for_workers(1, timeout=scaled(60))
            assert process.wait(scaled(60)) == 0


def test_sigterm_moves_what_a_job_alone_has(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    with (
        scheduler() as (address, client),
        ranks.started([*WORKER, address, "--name", "stays", "--gpus", "sim:1x16MiB"]),
        ranks.started([*WORKER, address, "--name", "goes", "--gpus", "sim:1x16MiB"], log) as process,
    ):
        client.wait_for_workers(2, timeout=scaled(60))
        only = client.scatter(list(range(8)), workers=["goes"])
        assert not client.submit(lambda: None, workers=["stays"]).result()
        # Closing, a scheduler logs a traceback of what it has just sent: dask-jobqueue cancels its jobs and closes.
        client.run_on_scheduler(lambda dask_scheduler: bool(dask_scheduler.handlers.pop("broadcast")))
        process.terminate()
        assert process.wait(scaled(30)) == 128 + signal.SIGTERM
        assert client.gather(only) == list(range(8))
        assert "handed over the data of 1 of 1 workers" in log.read_text()


def test_two_worker_commands_on_a_node_each_take_all_of_it() -> None:
    """As docs/coming-from/dask-cuda.md has it, with what to do."""
    line = [*WORKER, "--gpus", "sim:1x16MiB", "--name"]
    own = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *line, "own", "--memory-limit", "1GB"]
    with scheduler() as (address, client), contextlib.ExitStack() as stack:
        for argv in ([*line, "one"], [*line, "two"], own):
            stack.enter_context(ranks.started([*argv, address]))
        client.wait_for_workers(3, timeout=scaled(90))
        limits = {name: facts["memory_limit"] for name, facts in workers(client).items()}
        cores = {w.name: w.spec.binding.cpuset for w in hpcgpu.bindings(client).workers}
    assert set(cores["one"]) == set(cores["two"]) == os.sched_getaffinity(0)
    assert limits["one"] == limits["two"] > host_memory.memory_limit().nbytes / 2
    assert (len(cores["own"]), limits["own"]) == (1, 10**9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nworkers", "3", "--gpus", "sim:2"], "has 2 GPUs for this job"),
        (["--nwrokers", "3"], "No such option:? '?--nwrokers"),
        (["--worker-port", "3000"], "--worker-port: ports are free ones"),
        (["--worker-class", "a.B"], "--worker-class: each worker is watched by hpcgpu's own nanny"),
        (["--no-nanny"], "--no-nanny: each worker is watched"),
        (["--name", "a/b", "--gpus", "sim:1"], "has a slash"),
        (["--device-memory-limit", "1.5"], "set by option --device-memory-limit"),
    ],
)
def test_a_wrong_line_says_what_is_wrong(arguments: list[str], words: str) -> None:
    done = ranks.run_command([*WORKER, "tcp://127.0.0.1:1", *arguments])
    assert done.returncode in (1, 2)
    assert re.search(words, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_unreachable_or_foreign_scheduler_is_an_error(tmp_path: Path) -> None:
    """The second is said at once, or the test never ends."""
    argv = [*WORKER, "tcp://127.0.0.1:1", "--gpus", "sim:1", "--death-timeout", "1"]
    done = ranks.run_command(argv)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "the scheduler could not be reached" in done.stderr
    theirs = Certificate.make()
    (tmp_path / "cert").write_text(theirs.cert_pem)
    (tmp_path / "key").write_text(theirs.key_pem)
    words = ["--tls-ca-file", "cert", "--tls-cert", "cert", "--tls-key", "key", "--gpus", "sim:1"]

    async def join(address: str) -> subprocess.CompletedProcess[str]:
        argv = ["env", f"--chdir={tmp_path}", *WORKER, address, *words, "--death-timeout", "3600"]
        return await asyncio.to_thread(ranks.run_command, argv)

    done = knock(Certificate.make(), join)
    assert done.returncode == 1, done.stderr
    assert "the certificates do not belong together" in done.stderr


def test_ranks_of_dask_mpi_share_out_gpus_and_cores(tmp_path: Path) -> None:
    """Though a launcher has bound each of them to a core."""
    bound = (*ranks.MPIRUN[:2], "--bind-to", "core:overload-allowed", "-n", "4", sys.executable)
    argv = [*bound, str(ranks.script(tmp_path, INITIALIZE)), str(len(os.sched_getaffinity(0)))]
    done = ranks.run_command(argv, timeout=scaled(120))
    folders = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("FOLDERS")]
    assert [len(names) for names in folders] == [2], done.stderr
    assert not [name for name in folders[0] if Path(name).exists()]
    assert done.stderr.count("protocol tcp of the scheduler is not encrypted") == 1
    assert "but its worker has a share of all" in done.stderr


def test_dask_mpi_rank_beyond_the_gpus_is_an_error_of_its_own(tmp_path: Path) -> None:
    """dask-mpi's command keeps a failed rank waiting in MPI_Finalize: the run has one worker, its log the reason."""
    file, log = tmp_path / "scheduler.json", tmp_path / "log"
    argv = [*ranks.MPIRUN, "-n", "3", str(ranks.BIN / "dask-mpi"), "--worker-class", "hpcgpu.GPUWorker"]
    argv += ["--no-dashboard", "--worker-options", '{"gpus": "sim:1x16MiB"}', "--scheduler-file", str(file)]
    with ranks.started(argv, log) as process:
        until(lambda: process.poll() is not None or "LaunchError" in log.read_text(), "a rank says what is wrong")
        until(lambda: process.poll() is not None or file.exists(), "the scheduler's file")
        assert process.poll() is None, log.read_text()
        with Client(scheduler_file=str(file), timeout=scaled(60)) as client:
            client.wait_for_workers(1, timeout=scaled(60))
            assert len(workers(client)) == 1
    assert re.search(r"LaunchError: each of the 1 GPUs of \S+ .* has its worker already", log.read_text())


def test_a_worker_of_dask_worker_is_bound_too() -> None:
    """Any starter of Worker classes will do; its nanny has the place taken anew."""
    argv = [str(ranks.BIN / "dask"), "worker", "--worker-class", "hpcgpu.GPUWorker", "--nworkers", "2"]
    with scheduler() as (address, client), ranks.started([*argv, address], HPCGPU_GPUS="sim:2x16MiB"):
        for restart in (lambda: None, client.restart):
            restart()
            client.wait_for_workers(2, timeout=scaled(90))
            table = hpcgpu.bindings(client)
            assert len({w.spec.gpu.pci for w in table.workers}) == 2
            assert not table.differences


def test_gpu_worker_that_closes_or_fails_gives_its_gpu_back(tmp_path: Path) -> None:
    done = ranks.run_command([sys.executable, str(ranks.script(tmp_path, AGAIN))], timeout=scaled(120))
    assert done.stdout == "failed 3 True 3 False\n", done.stderr


@pytest.mark.parametrize("count", [0, 3])
def test_a_script_is_the_ranks_and_then_their_client(tmp_path: Path, count: int) -> None:
    launcher = [*ranks.MPIRUN, "-n", str(count)] if count else []
    argv = [*launcher, sys.executable, str(ranks.script(tmp_path, RUNNER)), "a b"]
    done = ranks.run_command(argv, timeout=scaled(120))
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("above") == max(count, 1) + 1
    assert re.findall("below.*", done.stdout) == ["below ['0', '1'] 3 ['a b']"]


def test_a_module_is_started_once_more_as_one(tmp_path: Path) -> None:
    ranks.script(tmp_path, RUNNER, "mine.py")
    done = ranks.run_command(["env", f"--chdir={tmp_path}", sys.executable, "-m", "mine"], timeout=scaled(120))
    assert (done.returncode, done.stdout.count("below")) == (3, 1), done.stderr


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("GPURunner(gpu=1)", "unknown option 'gpu', set by keyword gpu of GPURunner: did you mean 'gpus'"),
        ("GPURunner(gpus='sim:1', python='/usr/bin/python3')", "ranks have the Python that runs the script"),
        ("import mpi4py.MPI; GPURunner(gpus='sim:1')", "MPI has been started in this process"),
    ],
)
def test_a_runner_that_cannot_start_says_why(tmp_path: Path, code: str, words: str) -> None:
    done = ranks.run_command([sys.executable, str(ranks.script(tmp_path, f"from hpcgpu import GPURunner\n{code}"))])
    assert done.returncode == 1
    assert words in done.stderr


def test_a_runner_without_a_script_advises_the_local_cluster() -> None:
    code = "from hpcgpu import GPURunner; GPURunner(gpus='sim:1')"
    argv = ["bash", "-c", 'exec "$0" - <<< "$1"', sys.executable, code]
    done = ranks.run_command(argv)
    assert "use LocalGPUCluster" in done.stderr

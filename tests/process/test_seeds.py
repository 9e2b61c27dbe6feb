"""Calls and commands of the documents that the project grew from, and of docs/coming-from, on simulated GPUs."""

import ast
import itertools
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import dask
import pytest
import ranks
from click.testing import CliRunner
from distributed import Client, LocalCluster
from pages import after, blocks
from paths import DATA
from waiting import scaled, until

import hpcgpu
from hpcgpu import LocalGPUCluster
from hpcgpu.cli.worker import config

SEEDS = DATA / "seeds"
CALLS = [ast.unparse(node) for node in ast.parse((SEEDS / "calls.py.txt").read_text()).body]
CALLS.remove("cluster = LocalCUDACluster(protocol='ucx')")  # tests/ucx/test_ucx_cluster.py
COMMANDS = (SEEDS / "commands.txt").read_text().splitlines()
# The same command under three names.
NAMES = {
    "hpcgpu": ["hpcgpu", "worker"],
    "dask": ["dask", "gpu-worker"],
    "module": [sys.executable, "-m", "hpcgpu.worker"],
}

PATH = {"PATH": f"{ranks.BIN}:/usr/bin:/bin"}


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        return int(server.getsockname()[1])


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_call_of_a_seed_runs(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = re.search(r"n_workers=(\d+)", call)
    workers = int(count[1]) if count else 2
    monkeypatch.setenv("HPCGPU_GPUS", f"sim:{workers}x64MiB")
    port = free_port()
    names = {
        **{"LocalCUDACluster": LocalGPUCluster, "dask": dask},
        **{"protocol": "tcp", "visible_devices": "0,1", "device_limit": 10**7, "device_pool_size": 10**7},
        **{"dask_workdir": str(tmp_path), "dashboard_port": str(port)},
    }
    exec(call, names)
    with names["cluster"] as cluster, Client(cluster) as client:
        client.wait_for_workers(workers, timeout=scaled(90))
        assert client.submit(sum, [1, 2]).result(scaled(60)) == 3
        jit, limit = "jit_unspill" in call, cluster.memory().workers[0].device_limit_bytes
        assert all(client.run(lambda dask_worker: dask_worker.data.jit_unspill is jit).values())
        for text, expected in (("=50000", 50000), ("=0.3", int(0.3 * 2**26)), ("device_limit", 10**7)):
            assert limit == expected or text not in call
        if "dashboard_port" in call:
            assert cluster.dashboard_link.startswith(f"http://127.0.0.1:{port}/")


def test_ports_of_a_cluster_are_those_of_the_call(capfd: pytest.CaptureFixture[str]) -> None:
    """The link of the dashboard takes the next free port; the scheduler has the port or an error."""
    wanted = free_port()
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        taken = int(other.getsockname()[1])
        options = {"gpus": "sim:1x64MiB", "scheduler_port": wanted, "dashboard_address": f":{taken}"}
        with LocalGPUCluster(**options) as cluster:
            assert cluster.scheduler_address.endswith(f":{wanted}")
            port = int(cluster.dashboard_link.split("/")[2].rpartition(":")[2])
            assert port != taken
            said = f"port {taken} of this machine is taken: the link to the dashboard has port {port}"
            assert said in capfd.readouterr().err
            with pytest.raises(hpcgpu.JobError, match=f"scheduler_port={wanted}: leave it out for a free port"):
                LocalGPUCluster(gpus="sim:1x64MiB", scheduler_port=wanted)


@pytest.fixture(scope="module")
def scheduler() -> Iterator[LocalCluster]:
    with LocalCluster(n_workers=0, dashboard_address=None) as cluster:
        yield cluster


@pytest.mark.parametrize(("line", "name"), list(zip(COMMANDS, itertools.cycle(NAMES), strict=False)))
def test_command_of_a_seed_runs(line: str, name: str, scheduler: LocalCluster, tmp_path: Path) -> None:
    """``dask-scheduler`` runs at its usual address there; here Dask's configuration has the address."""
    words = shlex.split(
        line.replace("tcp://scheduler:port", scheduler.scheduler_address).replace("/scratch", str(tmp_path))
    )
    variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
    argv = [word for word in words[len(variables) :] if word not in ("dask-cuda-worker", "dask", "worker")]
    variables |= {"DASK_SCHEDULER_ADDRESS": scheduler.scheduler_address, "HPCGPU_GPUS": "sim:1x64MiB"}
    with (
        ranks.started(["env", f"--chdir={tmp_path}", *NAMES[name], *argv], **PATH, **variables),
        Client(scheduler) as client,
    ):
        client.wait_for_workers(1, timeout=scaled(90))
        memory = hpcgpu.memory(client).workers
        assert "cores now" in CliRunner().invoke(config, [scheduler.scheduler_address]).output
        jit = "jit" in line.lower()
        assert all(client.run(lambda dask_worker: dask_worker.data.jit_unspill is jit).values())
        expected = {"50000": 50000, "0.3": int(0.3 * 2**26)}.get(argv[-1] if argv else "")
        assert expected is None or {w.device_limit_bytes for w in memory} == {expected}


@pytest.mark.parametrize(("diff", "line"), [(0, 0), (1, 2)], ids=["its ranks", "our ranks"])
def test_dask_mpi(tmp_path: Path, diff: int, line: int) -> None:
    (tmp_path / "script.py").write_text(after(blocks("dask-mpi", "diff")[diff]))
    done = ranks.run_command(["env", f"--chdir={tmp_path}", *shlex.split(blocks("dask-mpi", "bash")[line])], PATH)
    assert done.stdout == "6\n", done.stderr


def test_dask_mpis_command(tmp_path: Path) -> None:
    argv = ["env", f"--chdir={tmp_path}", *shlex.split(blocks("dask-mpi", "bash")[1])]
    file = tmp_path / "scheduler.json"
    with ranks.started(argv, **PATH) as process:
        until(lambda: process.poll() is not None or file.exists(), "the scheduler's file")
        assert process.poll() is None
        with Client(scheduler_file=str(file), timeout=scaled(60)) as client:
            client.wait_for_workers(2, timeout=scaled(90))
            assert not hpcgpu.bindings(client).differences


def test_local_cuda_cluster(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(after(blocks("dask-cuda", "diff")[0]))
    done = ranks.run_command([sys.executable, str(tmp_path / "script.py")], PATH)
    assert done.stdout == "6\n", done.stderr


@pytest.mark.parametrize(("page", "count"), [("sbatch", 1), ("dask-cuda", 2)])
def test_workers_of_a_page_join_dasks_own_scheduler(
    page: str, count: int, scheduler: LocalCluster, tmp_path: Path
) -> None:
    """By its file, and by its address."""
    file = tmp_path / "scheduler.json"
    line = after(blocks(page, "diff")[1]).removeprefix("srun ").rstrip(" &\n").replace("$SCHEDULER_FILE", str(file))
    argv = [scheduler.scheduler_address if word.startswith("tcp://") else word for word in shlex.split(line)]
    argv += ["--gpus", "sim:1"] if page == "sbatch" else []
    with Client(scheduler) as client:
        client.write_scheduler_file(str(file))
        with ranks.started(argv, **PATH):
            client.wait_for_workers(count, timeout=scaled(60))
            assert len(hpcgpu.bindings(client).workers) == count

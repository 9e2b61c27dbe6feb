"""Ways to a cluster that speaks UCX, what its workers are tied to, and what is installed beside UCX."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import fake_cuda
import pytest
import ranks
from distributed import Client, Worker
from fake_nvml import FakeGpu, compiled
from paths import TOPOLOGIES
from waiting import scaled, until

import hpcgpu
from hpcgpu.deploy import network
from hpcgpu.deploy.doctor import probes

UCX = ("--gpus", "sim:2", "--protocol", "ucx")
SCRIPT = """
    client = Client()
    first, second = sorted(client.scheduler_info()["workers"])
    held = client.submit(bytes, 3_000_000, workers=[first])
    print(client.submit(len, held, workers=[second]).result())
    print(first.partition("://")[0], client.scheduler.address.partition("://")[0])
    print(type(client.scheduler_comm.comm).__name__)
    sys.exit(3)
"""
WORKER = """
    import asyncio, hpcgpu
    async def main():
        ours = dict(gpus="sim:1x16MiB", env={"UCX_NET_DEVICES": "lo"})
        async with hpcgpu.GPUWorker(sys.argv[1], name="ranked", host="127.0.0.1", **ours) as worker:
            await worker.finished()
    asyncio.run(main())
"""


@pytest.mark.parametrize("count", [1, 3], ids=["run", "mpirun"])
def test_a_script_has_its_data_over_ucx(tmp_path: Path, count: int) -> None:
    """After MPI UCX does not work in a process, so that the ranks do not meet by MPI. The client is open at the end."""
    done = ranks.run(ranks.script(tmp_path, SCRIPT), options=UCX, ranks=count)
    assert done.returncode == 3, done.stderr
    assert done.stdout.splitlines() == ["3000000", "ucx ucx", "UcxComm"]  # nor are UCX's own words among it
    assert "protocol ucx of the scheduler is not encrypted" in done.stderr
    assert "2 workers on 1 node ready" in done.stderr
    assert "UCX  WARN" not in done.stderr


@pytest.mark.parametrize("has_ib", [True, False])
def test_workers_have_the_planned_ports(tmp_path: Path, has_ib: bool) -> None:
    """In their environment, and in what UCX itself takes from it. There is no such card: they speak tls meanwhile."""
    # PyPI's UCX has no InfiniBand: with a port that it does not drive no worker would start.
    code = """
        import hpcgpu, json
        def ports():
            import ucxx
            ucxx.init()
            return os.environ.get("UCX_NET_DEVICES"), ucxx.get_config()["NET_DEVICES"]
        with Client() as client:
            bound = hpcgpu.bindings(client)
            planned = {w.spec.name: dict(w.spec.env).get("UCX_NET_DEVICES") for w in bound.workers}
            names = {a: w["name"] for a, w in client.scheduler_info()["workers"].items()}
            why = [reason for w in bound.workers for reason in w.spec.binding.reasons]
            print(json.dumps([planned, {names[a]: p for a, p in client.run(ports).items()}, bound.differences, why]))
    """
    gpus = [FakeGpu(pci, f"GPU-{i}", size_mib=1024) for i, pci in enumerate(("0000:06:00.0", "0000:16:00.0"))]
    (tmp_path / "nvml").mkdir()
    env = compiled(tmp_path / "nvml").environment(gpus) | {"HWLOC_XMLFILE": str(TOPOLOGIES / "turin-4gpu-nvml.xml")}
    if has_ib:
        import libucx

        system = tmp_path / "system"
        shutil.copytree(Path(libucx.__file__).parent / "lib", system, symlinks=True)
        (system / "ucx/libuct_ib.so.0").touch()
        env |= {"RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY": "true", "LD_LIBRARY_PATH": f"{env['LD_LIBRARY_PATH']}:{system}"}
    done = ranks.run(ranks.script(tmp_path, code), options=(), env=env)
    assert done.returncode == 0, done.stderr
    planned, seen, differences, why = json.loads(done.stdout.splitlines()[-1])
    assert differences == {}
    assert [("drives no InfiniBand" in reason) for reason in why if "UCX" in reason] == [True] * (0 if has_ib else 2)
    if has_ib:
        assert sorted(planned.values()) == ["mlx5_4:1", "mlx5_5:1"]
        assert seen == {name: [port, port] for name, port in planned.items()}
    else:
        assert set(planned.values()) == {None}
        assert {tuple(ports) for ports in seen.values()} == {(None, "all")}


def test_a_late_worker_is_said_with_what_was_waited_for(tmp_path: Path) -> None:
    options = (*UCX, "--death-timeout", "5s", "--env", "UCX_NET_DEVICES=mlx5_0:1")
    done = ranks.run(ranks.script(tmp_path, SCRIPT), options=options)
    assert done.returncode != 0
    assert re.search(r"could be started: worker \S+: not registered .*--death-timeout", done.stderr)


def test_workers_for_a_scheduler_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask's own, of one that knows nothing of hpcgpu: ``python -m hpcgpu.worker``, and ``hpcgpu.GPUWorker``."""

    def seen(dask_worker: Worker) -> tuple[str, str, str]:
        import ucxx

        devices = os.environ["UCX_NET_DEVICES"], ucxx.get_config()["NET_DEVICES"]
        return *devices, type(dask_worker.data).__name__

    monkeypatch.setenv("UCX_LOG_FILE", "stderr")  # this process is a client from now on
    file = tmp_path / "scheduler.json"
    dask = [str(ranks.BIN / "dask"), "scheduler", "--protocol", "ucx", "--host", "127.0.0.1", "--port", "0"]
    joined = [sys.executable, "-m", "hpcgpu.worker", "--scheduler-file", str(file), "--gpus", "sim:1x16MiB"]
    named = ["--name", "joined", "--env", "UCX_NET_DEVICES=lo"]
    with ranks.started([*dask, "--no-dashboard", "--scheduler-file", str(file)], tmp_path / "scheduler.log"):
        until(lambda: file.exists() and file.read_text().endswith("}"), "the scheduler")
        address = json.loads(file.read_text())["address"]
        ranked = [sys.executable, str(ranks.script(tmp_path, WORKER)), address]
        network.prepare(address)
        with (
            ranks.started([*joined, *named], tmp_path / "joined.log") as process,
            ranks.started(ranked, tmp_path / "ranked.log"),
            Client(address, timeout=scaled(60)) as client,
        ):
            client.wait_for_workers(2, timeout=scaled(60))
            names = {w["name"]: a for a, w in client.scheduler_info()["workers"].items()}
            held = client.submit(bytes, 3_000_000, workers=[names["joined"]])
            assert client.submit(len, held, workers=[names["ranked"]]).result(timeout=scaled(60)) == 3_000_000
            assert {tuple(facts) for facts in client.run(seen).values()} == {("lo", "lo", "GpuSpillBuffer")}
            assert hpcgpu.bindings(client).differences == {}
            only = client.scatter(list(range(8)), workers=[names["joined"]])
            process.terminate()
            assert process.wait(scaled(60)) == 128 + 15
            assert client.gather(only) == list(range(8))
    assert "handed over the data of 1 of 1 workers" in (tmp_path / "joined.log").read_text()
    assert set(names) == {"joined", "ranked"}
    assert all(a.startswith("ucx://127.0.0.1:") for a in names.values())


def test_ucx_of_the_wheel_tells_its_transports() -> None:
    ucx = probes.ucx()
    assert ucx.version
    assert "tcp" in ucx.transports
    assert (Path(ucx.folder).parent.name, ucx.has_ib) == ("libucx", False)


def test_what_the_store_asks_of_a_driver_of_cuda_12(tmp_path: Path) -> None:
    """CUDA 12's cuda.bindings, on the stand-in."""
    assert fake_cuda.not_passed(tmp_path, ["spill/test_cuda_standin.py"]) == []

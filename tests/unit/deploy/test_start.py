"""Before ranks start: where UCX cannot be, what PBS is asked for, and a srun that does not answer."""

import importlib.util
import os
import re
from datetime import datetime
from pathlib import Path

import fakesys
import pytest
from paths import BATCH
from programs import program
from recordings import records

from hpcgpu import LocalGPUCluster, PBSGPUCluster, SLURMGPUCluster, config
from hpcgpu.batch import pbs
from hpcgpu.cli.commands import hpcgpu
from hpcgpu.deploy import machine, network, settings, start
from hpcgpu.deploy.doctor import node as doctor_node
from hpcgpu.errors import ConfigError, LaunchError
from hpcgpu.host import host_memory, run
from hpcgpu.launch import launchers
from hpcgpu.launch.environment import read_end_s
from hpcgpu.model import Allocation, Command, HostMemory, Result, RunDocument, Settings
from hpcgpu.model.allocation import ALL_OF_THE_NODE, DOCUMENT

UCX = {"protocol": "ucx"}
WHERE = "keyword {name}"
JOB = Allocation(batch="pbs", job_id="0.login01")
ALL = HostMemory(64 << 30, ALL_OF_THE_NODE)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "distributed_ucxx" else find(name))


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "require_ucx", lambda *_: None)


def device(root: Path, interface: str, vendor: str, number: str) -> None:
    folder = root / "sys/class/net" / interface / "device"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "device").write_text(f"{number}\n")


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("cluster", [LocalGPUCluster, SLURMGPUCluster, PBSGPUCluster])
def test_ucx_that_is_not_installed_is_said_by_the_classes(cluster: type) -> None:
    with pytest.raises(ConfigError, match=r"protocol='ucx' \(set by keyword protocol.* pip install '.\[ucx\]'"):
        cluster(**UCX)


@pytest.mark.usefixtures("without")
@pytest.mark.parametrize("command", ["run", "launch --launcher mpirun", "plan --script --batch slurm"])
def test_ucx_that_is_not_installed_is_said_by_the_commands(command: str) -> None:
    with pytest.raises(ConfigError, match=r"pip install '.\[ucx\]' in a clone .*leave protocol out, which gives tls"):
        hpcgpu.main([*command.split(), "--protocol", "ucx", __file__], standalone_mode=False)


@pytest.mark.usefixtures("without")
def test_missing_ucx_is_an_error_at_a_cluster_with_ucx() -> None:
    network.prepare("tls://10.0.0.1:1")
    with pytest.raises(LaunchError, match=r"ucx://10.0.0.1:1 needs distributed-ucxx"):
        network.prepare("ucx://10.0.0.1:1")


@pytest.mark.usefixtures("installed")
def test_ucx_is_refused_on_slingshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in fakesys.environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    device(tmp_path, "eth0", "0x8086", "0x1572")
    assert settings.read(UCX, WHERE).settings.protocol == "ucx"
    device(tmp_path, "hsn1", "0x17db", "0x0501")
    device(tmp_path, "hsn0", "0x17db", "0x0501")
    with pytest.raises(ConfigError, match=r"Slingshot \(hsn0, hsn1\).*leave protocol out, which gives tls"):
        settings.read(UCX, WHERE)
    assert settings.read({"protocol": "tcp"}, WHERE).settings.protocol == "tcp"


@pytest.mark.usefixtures("installed")
def test_ucx_is_refused_on_a_site_whose_network_it_does_not_know() -> None:
    with pytest.raises(ConfigError, match=r"on perlmutter: UCX has no transport .*\(NERSC docs, Dask, .*; leave"):
        settings.read({**UCX, "site": "perlmutter"}, WHERE)
    assert settings.read({**UCX, "site": "vista"}, WHERE).settings.protocol == "ucx"


@pytest.mark.usefixtures("installed")
def test_ranks_that_speak_ucx_meet_by_files() -> None:
    """MPI would bring another UCX into the same process."""
    found = settings.read(UCX, WHERE).settings
    assert (found.rendezvous, found.where("rendezvous")) == ("file", "keyword protocol")
    with pytest.raises(ConfigError, match=r"rendezvous='mpi' .* with protocol='ucx'.*leave rendezvous out"):
        settings.read({**UCX, "rendezvous": "mpi"}, WHERE)
    assert settings.read({}, WHERE).settings.rendezvous == "mpi"


def answer(monkeypatch: pytest.MonkeyPatch, result: Result, granted: HostMemory = ALL) -> list[Command]:
    asked: list[Command] = []

    def run_sync(command: Command) -> Result:
        asked.append(command)
        return result

    monkeypatch.setattr(run, "run_sync", run_sync)
    monkeypatch.setattr(host_memory, "memory_limit", lambda *_: granted)
    return asked


def test_ranks_are_told_what_pbs_has_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    record = next(records(BATCH / "pbs/head/38-memory-granted.txt"))
    asked = answer(monkeypatch, Result((), 0, record.stdout))
    assert start.memory_env(Settings(), JOB) == (("HPCGPU_GRANTED_MEMORY", f"node1={2 << 30},node2={1 << 30}"),)
    assert [command.argv for command in asked] == [("qstat", "-f", "-F", "json", "0.login01")]
    assert start.memory_env(Settings(), Allocation()) == start.memory_env(Settings(), JOB, "member") == ()
    assert len(asked) == 1


def test_ranks_are_told_when_their_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the walltime of the queue: the job of the recording asked for none."""
    runs = next(r for r in records(BATCH / "pbs/run/70-waits-and-limits.txt") if ".cap)" in r.command)
    answer(monkeypatch, Result((), 0, runs.stdout))
    ((name, end),) = start.memory_env(Settings(memory_bytes=1 << 30), JOB, "gang")
    assert int(end) == datetime(2026, 11, 28, 4, 41, 26).timestamp() + 90  # noqa: DTZ001 - as qstat prints it
    assert read_end_s({"PBS_JOBID": "7.login01", name: end}) == int(end)
    assert read_end_s({name: end}) is None
    assert read_end_s({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1795957172"}) == 1795957172  # as of 26.05.5
    waits = runs.stdout.replace('"stime"', '"other"')  # a cache does not know yet that it runs
    assert (pbs.read_end_s(Result((), 0, waits), 1000.0), pbs.read_end_s(Result((), 0), 1000.0)) == (1090, None)


def test_ranks_are_told_the_end_that_slurm_has_no_variable_for(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Allocation(batch="slurm", job_id="7")
    asked = answer(monkeypatch, Result((), 0, "2026-11-28T04:42:56\n"))
    ((name, end),) = start.end_env(job, "gang")
    assert int(end) == datetime(2026, 11, 28, 4, 42, 56).timestamp()  # noqa: DTZ001 - as squeue prints it
    assert read_end_s({"SLURM_JOB_ID": "7", name: end}) == int(end)
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1795957172")
    assert start.end_env(job, "gang") == start.end_env(job, "member") == ()
    assert len(asked) == 1


def test_unanswered_memory_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    late = Result((), 124, "", "qstat: no answer in 10 s; it was killed\n")
    answer(monkeypatch, late)
    assert start.memory_env(Settings(), JOB) == ()
    words = "the job's memory is unknown, so its workers share all memory of their node: qstat did not answer: "
    assert capsys.readouterr().err == f"hpcgpu: {words}qstat: no answer in 10 s; it was killed\n"
    assert start.memory_env(Settings(memory_bytes=1 << 30), JOB) == ()
    answer(monkeypatch, late, HostMemory(1 << 30, "cgroup /pbs_jobs.service/jobid/0.login01"))
    assert start.memory_env(Settings(), JOB) == ()
    assert capsys.readouterr().err == ""


def test_topo_plans_with_it_and_asks_once_for_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    record = next(records(BATCH / "pbs/head/38-memory-granted.txt"))
    asked = answer(monkeypatch, Result((), 0, record.stdout))
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "node1")
    monkeypatch.setenv("PBS_JOBID", "0.login01")
    said = machine.plan_machine({}, "test", gpus="sim:2x64MiB").table.to_text()
    assert said.count("its share of 2.0 GiB, mem= of PBS job 0.login01") == 1  # of both workers
    monkeypatch.setenv("HPCGPU_JOB_NODES", "2")
    machine.plan_machine({}, "test", gpus="sim:2x64MiB")
    assert len(asked) == 1


def test_a_srun_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mpirun, which answers, does not replace it: on a slow login node every job would get another launcher."""
    program(tmp_path / "srun", "exec sleep 60")
    program(tmp_path / "mpirun", "echo 'mpirun (Open MPI) 5.0.11'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(LaunchError, match=r"srun --mpi=list has not answered in 1 s\..* try again"):
        start._find(Settings(), Allocation(batch="slurm", job_id="1"), limit_s=1.0)


def test_ranks_are_told_to_meet_by_file_in_a_slurm_without_pmix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    facts = launchers.LauncherFacts(mpirun="/opt/mpirun", mpi_types=("none", "pmi2"), library="Open MPI v6.0.0rc2")
    monkeypatch.setattr(start, "_find", lambda *_: facts)
    for name, value in (("SLURM_JOB_ID", "1"), ("SLURM_JOB_NUM_NODES", "2")):
        monkeypatch.setenv(name, value)
    _, line = start.launch_line({"gpus": "sim:1"}, WHERE, ("a.py",))
    assert re.search(r"^srun .*--mpi=none .*hpcgpu run --gpus sim:1 --rendezvous file a.py$", line)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(start.launcher_parent, "launch", lambda _, env, *__, **___: started.append(env))
    start.launch_run(RunDocument(settings=Settings(gpus="sim:1"), folder=str(tmp_path)))
    assert [config.read_document(env[DOCUMENT]).settings.rendezvous for env in started] == ["file"]
    assert doctor_node._start_ranks(Settings(gpus="sim:1")).exit_code is None  # it has no MPI to try


def test_pbss_own_mpiexec_is_no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every PBS has one in its bin, which may stand before the site's in PATH."""
    pals, hydra, silent, own = (tmp_path / name for name in ("cray", "mpich", "silent", "pbs"))
    for folder, name, does in (
        (own, "mpiexec", "echo pbs_version = 23.06.06"),
        (silent, "mpirun", "exit 127"),
        (hydra, "mpiexec", "echo HYDRA build details:"),
        (pals, "mpiexec", "echo mpiexec version 1.2.12"),
    ):
        folder.mkdir()
        program(folder / name, does)
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))  # it has no mpirun beside it
    monkeypatch.setenv("PATH", f"{own}:{silent}:{hydra}:{pals}")
    facts = [start._find(Settings(), JOB)]
    for folder in (pals, hydra, silent):
        next(folder.iterdir()).unlink()
        facts.append(start._find(Settings(), JOB))
    mpiexec, mpirun = f"{hydra}/mpiexec", f"{silent}/mpirun"
    assert [each.pals for each in facts] == [f"{pals}/mpiexec", "", "", ""]
    assert [each.mpirun for each in facts] == [mpiexec, mpiexec, mpirun, ""]

"""Clusters whose jobs come and go: who owns them, what their loop says, and what a thousand workers cost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ranks
from crowd import JOB, Crowd, tree_cpu_s, write_slurm
from distributed import Client
from leaks import signal_all
from pbs_replay import Pbs
from waiting import Said, scaled, until

from hpcgpu import PBSGPUCluster, SLURMGPUCluster
from hpcgpu.deploy.cluster.classes import BatchGPUCluster
from hpcgpu.deploy.jobs import fleet
from hpcgpu.errors import JobError
from hpcgpu.supervise import GATHER_S

OPTIONS = {"gpus": "sim:2x16MiB", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
IN_A_JOB = OPTIONS | {"scheduler": "job"}
DIES = """
import sys
from hpcgpu import PBSGPUCluster
cluster = PBSGPUCluster(**eval(sys.argv[1]), job_name="mine")
cluster.scale(4)
cluster.wait_for_workers(4)
print(*(row.id for row in cluster.jobs.rows), flush=True)
sys.stdin.read()
"""
FEW_FILES = """
import resource, sys
from hpcgpu import PBSGPUCluster
from hpcgpu.errors import ConfigError
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))
with PBSGPUCluster(**eval(sys.argv[1])) as cluster:
    for enlarge in (lambda: cluster.scale(n=200), lambda: cluster.scale(jobs=100), lambda: cluster.adapt(maximum=200)):
        try:
            enlarge()
        except ConfigError as error:
            print(error)
    print(len(cluster.jobs), "job")
"""
LARGE = """
import resource
from hpcgpu import SLURMGPUCluster
resource.setrlimit(resource.RLIMIT_NOFILE, (500, 500))
SLURMGPUCluster(gpus="sim:400", nodes=2)
"""
JOBS, PER_JOB = 250, 4
NAMES = [f"{JOB}_{job}-{worker}" for job in range(JOBS) for worker in range(PER_JOB)]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not list((tmp_path / ".hpcgpu" / "runs").iterdir()), "a run has left its folder behind"


def ids(cluster: BatchGPUCluster) -> list[str]:
    return [row.id for row in cluster.jobs.rows if row.has == "workers"]


def kill(pbs: Pbs, job_id: str) -> None:
    signal_all(pbs.processes(job_id), signal.SIGKILL)


def test_wait_for_workers_says_why_the_job_loop_fails(home: Path, pbs: Pbs) -> None:
    pbs.auto(False)
    with PBSGPUCluster(**OPTIONS) as cluster:
        cluster.scale(jobs=1)
        with pytest.raises(TimeoutError, match=r"not 2 workers within 1 s: (SUBMITTED|PENDING|1)"):
            cluster.wait_for_workers(2, timeout=1)
        pbs.auto(True)
        (job,) = ids(cluster)
        pbs.start(job)
        cluster.wait_for_workers(2)
        (written,) = (home / ".hpcgpu" / "runs").glob("*/record")
        written.unlink()
        written.mkdir()  # as a home that is full, or a file server that has lost the handle
        kill(pbs, job)
        until(lambda: not cluster.scheduler_info["workers"], "no worker is known")
        with pytest.raises(JobError, match=r"the loop that looks after this cluster's jobs has failed .* IsADirectory"):
            cluster.wait_for_workers(2, timeout=scaled(60))
        written.rmdir()
        until(lambda: cluster.scheduler_info["workers"], "a worker is known")
        cluster.wait_for_workers(2)
        assert job in written.read_text()  # as gone


def test_size_beyond_the_schedulers_open_files_is_refused(home: Path, pbs: Pbs) -> None:
    argv = [sys.executable, "-c", FEW_FILES, repr(OPTIONS)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=scaled(120))
    assert done.returncode == 0, done.stderr
    *refused, jobs = done.stdout.splitlines()
    assert len(refused) == 3, done.stderr
    for start, text in zip(("scale(): 100 jobs", "scale(): 100 jobs", "adapt: maximum 200"), refused, strict=True):
        assert text.startswith(f"{start}: 200 workers need 517 open files of the scheduler")
        assert "the hard limit (ulimit -Hn) is 500 where the scheduler is, on " in text
    assert jobs == "1 job"  # the scheduler alone


def test_submission_warns_of_limits_that_nodes_may_share(tmp_path: Path) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: Invalid account' >&2; exit 1\n")
    (tmp_path / "sbatch").chmod(0o755)
    environ = ranks.environment(PATH=f"{tmp_path}:{os.environ['PATH']}", HOME=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, env=environ, timeout=scaled(60)
    )
    warning = (
        "800 workers need 1,618 open files of the scheduler; the hard limit (ulimit -Hn) is 500 here; nodes may have"
    )
    assert warning in done.stdout + done.stderr
    assert "SubmitError" in done.stderr  # it was submitted: the limit of this machine forbids no job


def everywhere(clusters: tuple[PBSGPUCluster, ...], workers: int) -> None:
    """Wait until all objects have so many workers, and want no other number."""
    for cluster in clusters:
        cluster.wait_for_workers(workers, timeout=scaled(60))
        until(lambda c=cluster: c.wanted_workers == workers, "the object has read how many workers are wanted")


def test_only_the_owner_scales_and_others_read(home: Path, pbs: Pbs, said: Said) -> None:
    """So does an owner whose run is taken over."""
    with PBSGPUCluster(**IN_A_JOB, job_name="mine") as owner:
        with PBSGPUCluster.attach("mine") as attached:
            owner.scale(4)
            everywhere((owner, attached), 4)
            (member,) = until(lambda: ids(attached), "the other object has read which jobs there are")
            told = (
                rf"{os.getpid()}@\S+ since [-\d]+ [:\d]+ owns it. To take it over: attach\('{owner.job_id}', take_over"
            )
            for refused in (lambda: attached.scale(6), attached.adapt, attached.shutdown, attached.detach):
                with pytest.raises(JobError, match=told):
                    refused()
            assert owner.wanted_workers == 4
            kill(pbs, member)
            until(lambda: attached.jobs.gone, "the other object has read that the job is gone")
            assert [job.id for job in attached.jobs.gone] == [job.id for job in owner.jobs.gone] == [member]
            everywhere((owner, attached), 4)
            until(lambda: set(ids(owner)) == set(ids(attached)), "both know the same jobs")
        (member,) = ids(owner)  # the close of an object that reads has changed nothing
        second = PBSGPUCluster.attach("mine", take_over=True)
        assert second.wanted_workers == 4
        assert ids(second) == [member]
        second.scale(6)
        everywhere((owner, second), 6)
        until(lambda: set(ids(owner)) == set(ids(second)) > {member}, "both know the same jobs")
        assert "another object has taken this cluster over: " in said.text
        with pytest.raises(JobError, match="this object cannot scale the cluster"):
            owner.scale(2)
    assert not pbs.over(member), "the close of an object that owns the run no more has ended its jobs"
    assert f"closed: job {owner.job_id} goes on" in repr(owner)
    second.detach()
    with PBSGPUCluster.attach("mine") as reads, pytest.raises(JobError, match="and has detached it"):
        reads.scale(2)
    with PBSGPUCluster.attach("mine", take_over=True) as third:
        assert third.wanted_workers == 6
        third.scale(4)
        until(lambda: len(ids(third)) == 1, "one job with workers is left")
    until(lambda: pbs.over(member), "the job has ended")


def test_the_run_of_a_dead_owner_is_taken_over_at_once(home: Path, pbs: Pbs) -> None:
    (home / "dies.py").write_text(DIES)
    argv = [sys.executable, str(home / "dies.py"), repr(IN_A_JOB | {"client_grace": scaled(60)})]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        head, member = owner.stdout.readline().split()
        owner.kill()
    with PBSGPUCluster.attach("mine", take_over=True) as cluster, Client(cluster) as client:
        assert (cluster.job_id, ids(cluster), cluster.wanted_workers) == (head, [member], 4)
        assert client.submit(sum, [1, 2]).result() == 3
        kill(pbs, member)
        until(lambda: ids(cluster) not in ([], [member]), "the new owner replaces a dead job")
        cluster.wait_for_workers(4, timeout=scaled(60))
    until(lambda: pbs.over(head), "the job with the scheduler has ended")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write_slurm(tmp_path, JOBS)
    ranks.use_environment(monkeypatch)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert not list((tmp_path / ".hpcgpu" / "runs").iterdir()), "a run has left its folder behind"


def states(cluster: Any) -> set[str]:
    return {row.text for row in cluster.jobs.rows if row.has == "workers"}


def test_a_thousand_workers_join_and_leave_at_little_cost(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    reconcile = fleet.reconcile

    def counted(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return reconcile(*given)

    monkeypatch.setattr(fleet, "reconcile", counted)
    options = {"gpus": f"sim:{PER_JOB}", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
    with SLURMGPUCluster(**options, log_directory=str(slurm), quiet=True) as cluster:
        cluster.scale(jobs=JOBS)
        with Crowd(cluster) as crowd:
            start, own_s, others_s = time.monotonic(), time.process_time(), tree_cpu_s(cluster.job_id)
            crowd.join(NAMES)
            cluster.wait_for_workers(len(NAMES))
            until(lambda: states(cluster) == {f"UP {PER_JOB}/{PER_JOB}"}, "all jobs are up", every_s=0.1)
            crowd.leave()
            lost = f"STARTING 0/{PER_JOB} (lost its workers)"
            until(lambda: states(cluster) == {lost}, "all jobs have lost their workers", every_s=0.1)
            own_s, others_s = time.process_time() - own_s, tree_cpu_s(cluster.job_id) - others_s
            took_s = time.monotonic() - start
        own_ms, others_ms = own_s / len(NAMES) * 1e3, others_s / len(NAMES) * 1e3
        print(f"CPU per worker: {own_ms:.3f} ms here, {others_ms:.3f} in the scheduler; {looks} looks at all jobs")
        assert (slurm / "submitted").read_text() == "x\n", "one sbatch for 250 jobs, and none when all workers left"
        assert looks <= 2 * took_s / GATHER_S + 10, "each burst of workers is one look, not each worker"
        assert own_s < others_s

"""Clusters whose jobs come and go, with real jobs: process groups of this machine, asked for in /proc."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import local_system
import pytest
import ranks
from distributed import Client
from waiting import Said, scaled, until

from hpcgpu import SLURMGPUCluster
from hpcgpu.deploy.cluster.batch import BatchGPUCluster
from hpcgpu.errors import ConfigError, JobError, SubmitError


class LocalJobs(BatchGPUCluster):
    """The machine as a batch system."""

    batch = "local"


OPTIONS = {"gpus": "sim:2x16MiB", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    ranks.use_environment(monkeypatch)
    local_system.use(monkeypatch)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    runs = tmp_path / ".hpcgpu" / "runs"
    assert not list(runs.iterdir()), "a run has left its folder behind"


def ids(cluster: BatchGPUCluster) -> list[str]:
    return [row.id for row in cluster.jobs.rows if row.has == "workers"]


def alive(job_id: str) -> bool:
    """Tell whether a job's process runs: not another one with its pid, and no zombie that nobody has waited for yet."""
    pid, _, started = job_id.partition(".")
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] != "Z" and fields[19] == started


def test_jobs_come_and_go(home: Path, said: Said) -> None:
    options = {**OPTIONS, "device_memory_limit": "1GB"}
    with LocalJobs(**options, log_directory=str(home)) as cluster, Client(cluster) as client:
        assert "READY scheduler here; no workers yet: request them by cluster.scale(n)" in said.text
        assert "0 workers" not in said.text
        cluster.scale(jobs=1)
        cluster.wait_for_workers(2)
        cluster.scale(3)  # workers: two jobs of two
        assert len(ids(cluster)) == 2
        cluster.wait_for_workers(4)
        assert sum(client.gather(client.map(abs, range(20)))) == 190
        assert [row.text for row in cluster.jobs.rows][1:] == ["UP 2/2", "UP 2/2"]
        kept = client.scatter(list(range(4)), broadcast=False)
        cluster.scale(jobs=1)
        until(lambda: len(client.scheduler_info()["workers"]) == 2, "the workers of one job have left")
        assert client.gather(kept) == list(range(4)), "a job that left has taken its data with it"
        assert cluster.jobs.gone == ()  # nobody wanted it any more
        last = ids(cluster)
    assert not any(alive(job_id) for job_id in last)
    assert said.text.count("is lowered to 16.0 MiB") == 1  # of three nodes


def test_a_job_that_died_is_replaced(home: Path) -> None:
    with LocalJobs(**OPTIONS, log_directory=str(home)) as cluster, Client(cluster) as client:
        cluster.scale(jobs=1)
        cluster.wait_for_workers(2)
        (victim,) = ids(cluster)
        os.killpg(int(victim.partition(".")[0]), signal.SIGKILL)
        until(lambda: victim not in ids(cluster), "the dead job is forgotten")
        until(lambda: len(client.scheduler_info()["workers"]) == 2, "the workers of another job")
        assert client.submit(sum, [1, 2]).result() == 3
        assert len(ids(cluster)) == 1
        (gone,) = cluster.jobs.gone
        assert gone.id == victim
        assert str(cluster.jobs).index(ids(cluster)[0]) < str(cluster.jobs).index(victim)


def test_jobs_that_die_before_their_first_worker_stop_the_loop_with_the_log(home: Path) -> None:
    broken = ["echo no such module >&2", "exit 3"]
    with LocalJobs(**OPTIONS, log_directory=str(home), job_script_prologue=broken) as cluster:
        cluster.scale(jobs=1)
        with pytest.raises(JobError, match=r"3 jobs in a row ended before their first worker(.|\n)*no such module"):
            cluster.wait_for_workers(2)
        assert ids(cluster) == []
        seen = [row.text for row in cluster.jobs.gone]
        assert len(seen) == 3
        assert all(re.fullmatch(r"GONE at [\d :-]+ \(exit code 3.*\)", text) for text in seen)
        assert seen[0] in cluster.jobs._repr_html_()


def test_waiting_says_what_the_jobs_do(home: Path) -> None:
    slow = ["sleep 600"]
    with LocalJobs(**OPTIONS, log_directory=str(home), job_script_prologue=slow) as cluster:
        cluster.scale(jobs=1)
        with pytest.raises(TimeoutError, match=r"not 2 workers within 1 s: (SUBMITTED|STARTING 0/2|1)"):
            cluster.wait_for_workers(2, timeout=1)


def test_adapt_follows_the_work(home: Path) -> None:
    def slow(x: int) -> int:
        import time

        time.sleep(0.3)
        return x

    with LocalJobs(**OPTIONS, log_directory=str(home)) as cluster, Client(cluster) as client:
        cluster.adapt(minimum=0, maximum_jobs=2, interval="100ms", wait_count=2)
        assert sum(client.gather(client.map(slow, range(40)))) == sum(range(40))
        assert 1 <= len(ids(cluster)) <= 2
        until(lambda: not client.scheduler_info()["workers"], "all workers have left")


def test_bad_numbers_and_a_fixed_shape_are_refused(home: Path) -> None:
    with LocalJobs(**OPTIONS, log_directory=str(home)) as cluster:
        for args, options, message in (
            ((2,), {"jobs": 1}, "give one of them"),
            (("many",), {}, "n='many'"),
            ((-1,), {}, "0 or"),
        ):
            with pytest.raises(ConfigError, match=message):
                cluster.scale(*args, **options)
        with pytest.raises(ConfigError, match="minimum 5, maximum 2"):
            cluster.adapt(minimum=5, maximum=2)
    with pytest.raises(ConfigError, match="shape"):
        SLURMGPUCluster(gpus="sim:2", shape="eleastic")


def test_a_detached_cluster_is_scaled_by_who_attaches(home: Path) -> None:
    given = {**OPTIONS, "scheduler": "job", "log_directory": str(home), "job_name": "mine"}
    first = LocalJobs(**given)
    first.scale(4)
    first.wait_for_workers(4)
    (member,) = ids(first)
    first.detach()
    with LocalJobs.attach("mine", shutdown_on_close=True) as cluster, Client(cluster) as client:
        assert ids(cluster) == [member]
        assert cluster.wanted_workers == 4
        cluster.scale(6)
        cluster.wait_for_workers(6)
        assert client.submit(sum, [1, 2]).result() == 3
        assert member in ids(cluster)
        assert alive(member)
    assert not alive(member)


def everywhere(clusters: tuple[LocalJobs, ...], workers: int) -> None:
    """All see so many workers, and want no other number."""
    for cluster in clusters:
        cluster.wait_for_workers(workers, timeout=scaled(60))
        assert cluster.wanted_workers == workers


def test_of_several_objects_of_one_cluster_one_steers_and_all_scale(home: Path) -> None:
    given = {**OPTIONS, "scheduler": "job", "log_directory": str(home), "job_name": "mine"}
    with LocalJobs(**given) as owner:
        with LocalJobs.attach("mine") as attached:
            owner.scale(4)
            everywhere((owner, attached), 4)
            (member,) = ids(attached)
            with LocalJobs.attach("mine"):
                pass
            attached.scale(6)
            everywhere((owner, attached), 6)
            assert set(ids(owner)) == set(ids(attached)) > {member}
            assert [row.text for row in owner.jobs.rows] == ["UP 2/2"] * 3
        owner.scale(4)
        owner.detach()
    with LocalJobs.attach("mine") as first, LocalJobs.attach("mine") as second:
        assert first.wanted_workers == second.wanted_workers == 4
        first.close()
        second.scale(6)
        second.wait_for_workers(6, timeout=scaled(60))
        second.shutdown()


def test_all_objects_show_gone_jobs(home: Path) -> None:
    given = {**OPTIONS, "scheduler": "job", "log_directory": str(home), "job_name": "mine"}
    with LocalJobs(**given) as owner:
        owner.scale(jobs=1)
        owner.wait_for_workers(4)
        (victim,) = ids(owner)
        with LocalJobs.attach("mine") as attached:
            os.killpg(int(victim.partition(".")[0]), signal.SIGKILL)
            until(lambda: attached.jobs.gone, "the other object knows that the job is gone")
            assert attached.jobs.gone == owner.jobs.gone
            assert attached.jobs.gone[0].id == victim
        with LocalJobs.attach("mine") as later:
            assert later.jobs.gone == owner.jobs.gone


def test_refusal_goes_to_the_object_that_scaled(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {**OPTIONS, "scheduler": "job", "log_directory": str(home), "job_name": "mine"}
    with LocalJobs(**given) as owner, LocalJobs.attach("mine") as attached:
        monkeypatch.setenv("PATH", str(home))  # jobs of this machine are started by a shell
        with pytest.raises(SubmitError) as caught:
            attached.scale(4)
        assert "sh" in str(caught.value)
        monkeypatch.undo()
        monkeypatch.setenv("HOME", str(home))
        attached.scale(4)
        everywhere((owner, attached), 4)

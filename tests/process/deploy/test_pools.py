"""Pools: jobs of several kinds on one scheduler, which real processes replay as PBS would start them."""

import signal
from collections.abc import Mapping

import pytest
from distributed import Client
from leaks import signal_all
from pbs_replay import Pbs
from recordings import recorded
from waiting import until

from hpcgpu import PBSGPUCluster
from hpcgpu.errors import ConfigError, SubmitError
from hpcgpu.model.worker_names import read_member_name

OPTIONS = {"gpus": "sim:2x16MiB", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
QUICK = {"interval": "100 ms", "wait_count": 2}


def kinds(client: Client) -> Mapping[str, tuple[set[str], int]]:
    """Return the resources and the number of the workers of each job."""
    found: dict[str, tuple[set[str], int]] = {}
    for worker in client.scheduler_info(n_workers=-1)["workers"].values():
        job_id, _, _ = read_member_name(str(worker["name"])) or ("", 0, 0)
        found[job_id] = ({*worker["resources"]}, found.get(job_id, (set(), 0))[1] + 1)
    return found


def queue_of(pbs: Pbs, job_id: str) -> str:
    lines = pbs.get(job_id, "script").splitlines()
    return next((line.split()[-1] for line in lines if line.startswith("#PBS -q")), "")


def test_each_pool_keeps_its_kind_of_jobs(pbs: Pbs) -> None:
    with PBSGPUCluster(**OPTIONS, queue="gpuq") as cluster, Client(cluster) as client:
        pool = cluster.add_pool("cpu", queue="cpuq", cpu_workers=3, nodes=1)
        cluster.scale(jobs=1)
        cluster.wait_for_workers(5)
        (gpu,), (cpu,) = (
            [row.id for row in cluster.jobs.rows if row.has == has] for has in ("workers", "workers of cpu")
        )
        assert kinds(client) == {gpu: (set(), 2), cpu: ({"cpu"}, 3)}
        assert (queue_of(pbs, gpu), queue_of(pbs, cpu)) == ("gpuq", "cpuq")
        assert [job.id for job in pool.jobs.rows] == [cpu]
        plan = str(pool.explain())
        assert "\n  1 rank and 3 workers\n" in plan, "its jobs have no scheduler"
        assert "keyword queue of add_pool" in plan
        assert "keyword launcher of PBSGPUCluster" in plan
        here = client.map(lambda _: __import__("distributed").get_worker().name, range(8), resources={"cpu": 1})
        assert {read_member_name(name)[0] for name in client.gather(here)} == {cpu}
        signal_all(pbs.processes(cpu), signal.SIGKILL)  # its node is gone
        until(lambda: {job.id for job in pool.jobs.rows} - {cpu}, "a job in place of the dead one")
        (other,) = {job.id for job in pool.jobs.rows} - {cpu}
        assert queue_of(pbs, other) == "cpuq"
        cluster.wait_for_workers(5)
        pool.scale(0)
        until(lambda: set(kinds(client)) == {gpu}, "the workers of the pool have left")
    assert all(map(pbs.over, pbs.ids()))


def test_adapt_asks_for_jobs_of_the_kind_that_tasks_name(pbs: Pbs) -> None:
    with PBSGPUCluster(**OPTIONS, queue="gpuq", resources={"GPU": 1}) as cluster, Client(cluster) as client:
        pool = cluster.add_pool("cpu", queue="cpuq", cpu_workers=2)
        cluster.adapt(minimum=0, maximum=4, **QUICK)
        pool.adapt(minimum=0, maximum_jobs=2, **QUICK)
        assert client.submit(abs, -1, resources={"cpu": 1}).result() == 1
        assert [queue_of(pbs, job_id) for job_id in pbs.ids()] == ["cpuq"]
        assert client.submit(abs, -2, resources={"GPU": 1}).result() == 2
        assert sorted(queue_of(pbs, job_id) for job_id in pbs.ids()) == ["cpuq", "gpuq"]
        until(lambda: not kinds(client), "all workers have left: nothing is to do")
        assert client.submit(abs, -3, resources={"cpu": 1}).result() == 3
        assert [queue_of(pbs, job_id) for job_id in pbs.ids()].count("gpuq") == 1
    assert all(map(pbs.over, pbs.ids()))


def test_owner_that_takes_over_has_the_pools(pbs: Pbs) -> None:
    with PBSGPUCluster(**{**OPTIONS, "scheduler": "job"}, queue="gpuq") as cluster:
        cluster.add_pool("cpu", queue="cpuq", cpu_workers=2, nodes=1)
        cluster.wait_for_workers(4)
        cluster.detach()
        with PBSGPUCluster.attach(cluster.job_id, take_over=True) as second, Client(second) as client:
            assert list(second.pools) == ["cpu"]
            (before,) = second.pools["cpu"].jobs.rows
            second.pools["cpu"].scale(jobs=2)
            second.wait_for_workers(6)
            (new,) = {job.id for job in second.pools["cpu"].jobs.rows} - {before.id}
            assert queue_of(pbs, new) == "cpuq"
            assert [kinds(client)[job] for job in (before.id, new)] == [({"cpu"}, 2)] * 2
            with pytest.raises(ConfigError, match="has not started the cluster"):
                second.add_pool("more", cpu_workers=1)
    assert all(map(pbs.over, pbs.ids()))


def test_a_refusal_of_jobs_names_their_pool(pbs: Pbs) -> None:
    with PBSGPUCluster(**OPTIONS) as cluster:
        pool = cluster.add_pool("cpu", queue="nosuch", cpu_workers=1)
        pbs.refuse(recorded("head", "02-qsub-bad-queue", 0))
        with pytest.raises(SubmitError, match=r"^pool cpu: qsub refused the job: qsub: Unknown queue\n.*-q nosuch"):
            pool.scale(jobs=1)
        with pytest.raises(SubmitError, match=r"^pool cpu: qsub refused the job"):
            cluster.wait_for_workers(1)


def test_wrong_pools_are_refused_before_a_job_is(pbs: Pbs) -> None:
    with PBSGPUCluster(**OPTIONS, resources={"mine": 1}) as cluster:
        for name, options, why in (
            ("a b", {"cpu_workers": 1}, "a name of letters"),
            ("mine", {"cpu_workers": 1}, "which is no resource or pool"),
            ("cpu", {"cpu_workers": 1, "protocol": "tcp"}, "protocol of the whole cluster"),
            ("cpu", {"cpu_worker": 1}, "did you mean 'cpu_workers'"),
            ("cpu", {"queue": "other"}, "the number of GPUs of each node is not given"),
            ("cpu", {"gpus_per_node": 0}, "leaves no worker"),
        ):
            with pytest.raises(ConfigError, match=why):
                cluster.add_pool(name, **options)
        assert dict(cluster.pools) == {}
    assert pbs.ids() == []

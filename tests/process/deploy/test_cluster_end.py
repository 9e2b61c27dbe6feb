"""What a cluster object says and does before it is awaited, and when it is closed, detached, or lost."""

import asyncio
import gc
import html
import os
import re
import signal
import sys
from collections.abc import Callable

import pytest
import ranks
from distributed import Client, Future
from distributed.client import ClosedClientError, FutureCancelledError
from distributed.core import Status
from pbs_replay import Pbs
from waiting import Said, aside, scaled, until, when

from hpcgpu import ConfigError, JobError, LocalGPUCluster, PBSGPUCluster
from hpcgpu.deploy.cluster.cluster import GPUCluster

GANG = {"gpus": "sim:2x16MiB", "queue": "gpu", "walltime": "00:10:00", "ranks": "node", "launcher": "fork"}
ELASTIC = {**GANG, "shape": "elastic", "scheduler": "here"}
JOB = "1021.login01"


def has_nothing(cluster: GPUCluster, state: str) -> None:
    """See that nothing looks alive, and that whatever needs a scheduler is an error at once."""
    assert repr(cluster) == f"{type(cluster).__name__}(hpcgpu, {state})"
    assert f"Status: <strong>{html.escape(state)}</strong>" in cluster._repr_html_()
    assert cluster.scheduler_info["workers"] == {}
    assert cluster.plan == cluster.requested == cluster.observed == set()
    assert "Workers: <strong>0</strong>" in cluster._repr_html_()
    assert cluster.scheduler_address == "<Not Connected>"
    assert cluster.dashboard_link == ""
    assert f"this cluster is {state}" in cluster.explain()
    assert not re.search("^dashboard:", cluster.explain(), re.M)  # the end of a log names the job's own
    assert "Scheduler" not in cluster.get_logs()
    calls: list[Callable[[], object]] = [
        *(lambda: cluster.wait_for_workers(1), cluster.memory, cluster.bindings, cluster.trim_memory),
        cluster.detach,
    ]
    if isinstance(cluster, PBSGPUCluster):
        calls += [lambda: cluster.scale(4), lambda: cluster.adapt(maximum=4)]
    for call in calls:
        with pytest.raises(JobError) as caught:
            call()
        assert str(caught.value).startswith(f"this {type(cluster).__name__} is {state}")
    with pytest.raises((JobError, RuntimeError)) as refused:
        Client(cluster)
    assert state in str(refused.value)


def kill_scheduler(cluster: GPUCluster) -> None:
    with Client(cluster) as client:
        os.kill(client.run_on_scheduler(os.getpid), signal.SIGKILL)


def rows(cluster: PBSGPUCluster) -> list[tuple[str, str]]:
    """Return of jobs that may be there, then of those that are gone, id and text."""
    shown = cluster.jobs
    return [(row.id, row.text) for row in (*shown.rows, *shown.gone)]


def test_a_closed_cluster_has_nothing(pbs: Pbs) -> None:
    with PBSGPUCluster(**GANG) as cluster:
        cluster.wait_for_workers(2)
        assert rows(cluster) == [(JOB, "UP 2/2")]
        assert "workers=2" in repr(cluster)
        assert cluster.plan == cluster.requested == cluster.observed
        assert "Status: <strong>running</strong>" in cluster._repr_html_()
    has_nothing(cluster, "closed")
    assert cluster.status == Status.closed
    assert (len(cluster.jobs), len(cluster.jobs.gone)) == (0, 1)
    assert rows(cluster) == [(JOB, "GONE (closed)")]
    cluster.close()
    cluster.shutdown()


def test_a_closed_elastic_cluster_has_no_jobs(pbs: Pbs) -> None:
    with PBSGPUCluster(**ELASTIC) as cluster:
        cluster.scale(jobs=1)
        assert (len(cluster.plan), len(cluster.requested)) == (2, 2)  # on return
        cluster.wait_for_workers(2)
        assert cluster.plan == cluster.requested == cluster.observed
        assert all(name.startswith(JOB.partition(".")[0]) for name in cluster.plan)
        waiting = aside(lambda: cluster.wait_for_workers(9))
    with pytest.raises(JobError, match="this PBSGPUCluster is clos"):
        waiting.result(scaled(30))
    has_nothing(cluster, "closed")
    assert len(cluster.jobs) == 0
    assert (JOB, "GONE (closed)") in rows(cluster)


def test_a_detached_cluster_says_that_its_job_goes_on(pbs: Pbs) -> None:
    cluster = PBSGPUCluster(**GANG)
    cluster.detach()
    takes_up = f"job {JOB} goes on, PBSGPUCluster.attach('{JOB}') takes it up"
    has_nothing(cluster, f"detached: {takes_up}")
    assert cluster.status == Status.closed
    assert rows(cluster) == [(JOB, "UNKNOWN (this object has left it)")]
    with pytest.raises(JobError, match="detached: "):
        cluster.shutdown()
    with PBSGPUCluster.attach(JOB) as attached:
        assert rows(attached) == [(JOB, "UP 2/2")]
    has_nothing(attached, f"closed: {takes_up}")
    PBSGPUCluster.attach(JOB).shutdown()
    until(lambda: pbs.over(JOB), "the job is over")


def test_detach_in_a_function_of_atexit_leaves_the_job(pbs: Pbs) -> None:
    """Python has shut its threads down by then."""
    code = f"import atexit; from hpcgpu import PBSGPUCluster; atexit.register(PBSGPUCluster(**{GANG}).detach)"
    done = ranks.run_command([sys.executable, "-c", code])
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    PBSGPUCluster.attach(JOB).shutdown()
    until(lambda: pbs.over(JOB), "the job is over")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("walltime", "exceeded resource walltime, Exit_status -29: its walltime was over)"),
        ("qdel", "terminated by user1@login01"),
        ("scheduler", ""),
    ],
)
def test_a_lost_cluster_says_why(pbs: Pbs, said: Said, how: str, reason: str) -> None:
    pbs.history(True)
    with PBSGPUCluster(**GANG) as cluster:
        cluster.wait_for_workers(2)
        waiting = aside(lambda: cluster.wait_for_workers(9))
        if how == "walltime":
            pbs.end(JOB, -29, "Job run at Fri Nov 20 at 20:31 on (node0001:ncpus=2) and exceeded resource walltime")
        elif how == "qdel":
            pbs.end(JOB, 271, f"Job run at Fri Nov 20 at 20:19 on (node0001:ncpus=2) and {reason}")
        else:
            kill_scheduler(cluster)
        lost = f"lost: job {JOB} has ended: F (Job run"
        with pytest.raises(JobError, match=re.escape(f"this PBSGPUCluster is {lost}")):
            waiting.result(scaled(60))
        until(lambda: reason in said.text, "the reason is printed", shown=lambda: said.text)
        assert repr(cluster).startswith(f"PBSGPUCluster(hpcgpu, {lost}")
        has_nothing(cluster, repr(cluster).partition("hpcgpu, ")[2][:-1])
        assert cluster.status == Status.failed
        [(job, text)] = rows(cluster)
        assert (job, text[:16], len(cluster.jobs)) == (JOB, "GONE (exit code ", 0)
        after = said.text.partition("the cluster is lost")[2]
        assert not [word for word in ("STARTING", "UP 2/2", "READY") if word in after]
    has_nothing(cluster, repr(cluster).partition("hpcgpu, ")[2][:-1])
    assert repr(cluster).startswith(f"PBSGPUCluster(hpcgpu, closed; it was {lost}")
    assert pbs.calls("qdel") == []


def test_an_elastic_cluster_whose_scheduler_died_here_says_so(pbs: Pbs) -> None:
    with PBSGPUCluster(**ELASTIC) as cluster:
        cluster.scale(jobs=1)
        cluster.wait_for_workers(2)
        os.kill(int(cluster.job_id), signal.SIGKILL)
        until(lambda: cluster.status == Status.failed, "the cluster has failed")
        state = "lost: the ranks ended with exit code -9"
        assert repr(cluster).startswith(f"PBSGPUCluster(hpcgpu, {state}")
        with pytest.raises(JobError, match=state):
            cluster.scale(jobs=2)
        assert rows(cluster)[0] == (JOB, "UNKNOWN (the cluster is lost)")
        assert rows(cluster)[1][1] == "GONE (exit code -9)"
    assert rows(cluster)[0] == (JOB, "GONE (closed)") or pbs.over(JOB)


def test_lost_local_cluster_ends_waiting_calls_and_clients() -> None:
    """Without this a client would look for the scheduler for 30 s, and wait for ever for what it submits then."""
    futures: list[Future] = []

    def is_closed() -> bool:
        try:
            futures.append(client.submit(abs, len(futures)))
        except ClosedClientError:
            return True
        return False

    with LocalGPUCluster(gpus="sim:1") as cluster, Client(cluster) as client:
        assert len(cluster.plan) == 1
        assert cluster.plan == cluster.requested == cluster.observed
        waiting = aside(lambda: cluster.sync(cluster._wait_for_workers, 5))  # the public one refuses it
        kill_scheduler(cluster)
        until(is_closed, "its client is closed", limit_s=20)
        errors = [aside(future.result).exception(scaled(20)) for future in futures]
        with pytest.raises(JobError, match="this LocalGPUCluster is lost: the ranks ended with exit code 70"):
            waiting.result(scaled(60))
        has_nothing(cluster, repr(cluster).partition("hpcgpu, ")[2][:-1])
    assert {type(error) for error in errors} == {FutureCancelledError}
    assert any("the cluster is lost: the ranks ended with exit code 70" in str(error) for error in errors)


def test_cluster_not_awaited_is_an_error_and_submits_nothing(pbs: Pbs) -> None:
    async def use() -> None:
        cluster = PBSGPUCluster(**ELASTIC, asynchronous=True)
        assert repr(cluster) == "PBSGPUCluster(hpcgpu, not started: await it)"
        assert cluster.status.name == "created"
        calls: list[Callable[[], object]] = [
            *(lambda: cluster.scale(2), lambda: cluster.adapt(maximum=2), lambda: cluster.wait_for_workers(1)),
            *(cluster.memory, cluster.bindings, cluster.detach),
            lambda: Client(cluster, asynchronous=True),
        ]
        for call in calls:
            with pytest.raises(ConfigError, match=r"has not started yet: .* write 'cluster = await PBSGPUCluster\("):
                call()

    with pytest.warns(RuntimeWarning, match=r"PBSGPUCluster was never awaited, so it has not started"):
        asyncio.run(use())
        gc.collect()
    assert pbs.calls("qsub") == []


async def test_scale_and_close_need_no_await(pbs: Pbs) -> None:
    """As dask-jobqueue's scale, which is no coroutine."""
    async with PBSGPUCluster(**ELASTIC, asynchronous=True) as cluster, Client(cluster, asynchronous=True) as client:
        cluster.scale(1)
        await cluster.wait_for_workers(2, timeout=scaled(60))
        assert await client.submit(sum, [1, 2]) == 3
        cluster.close()
        async with asyncio.timeout(scaled(60)):
            await when(lambda: cluster.status.name == "closed")
    assert all(map(pbs.over, pbs.ids()))


def test_asynchronous_cluster_without_event_loop_is_an_error() -> None:
    with pytest.raises(ConfigError, match="asynchronous=True outside of an event loop: leave it out, or write"):
        LocalGPUCluster(gpus="sim:1", asynchronous=True)

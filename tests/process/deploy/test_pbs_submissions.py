"""Submissions to PBS that are not answered: no job too many, and none that nobody knows; the jobs are real."""

import asyncio
import subprocess
import sys
from collections.abc import Callable

import pytest
from distributed import Client
from pbs_replay import Pbs
from waiting import Said, until

from hpcgpu import PBSGPUCluster
from hpcgpu.errors import SubmitError

pytestmark = pytest.mark.usefixtures("impatient")
GANG = {"gpus": "sim:2", "nodes": 1, "ranks": "node", "launcher": "fork", "walltime": "00:10:00"}
ELASTIC = {"gpus": "sim:2", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
CLIENT = """
from hpcgpu import PBSGPUCluster
cluster = PBSGPUCluster(**{options})
cluster.scale(jobs=3)
"""


def members(cluster: PBSGPUCluster) -> list[str]:
    return [row.id for row in cluster.jobs.rows if row.has == "workers"]


@pytest.mark.parametrize(("build", "lost"), [("release", "accepted"), ("head", "broken")])
def test_unanswered_array_is_found_by_its_name(pbs: Pbs, said: Said, lost: str) -> None:
    pbs.lose(lost)
    with PBSGPUCluster(**ELASTIC) as cluster, Client(cluster) as client:
        cluster.scale(jobs=2)
        assert members(cluster) == ["1021[0].login01", "1021[1].login01"]
        pbs.lose("")
        cluster.wait_for_workers(4)
        assert client.submit(sum, [1, 2]).result() == 3
    assert len(pbs.calls("qsub")) == 1
    assert ("qsub: no answer in 2 s; it was killed" if lost == "accepted" else "Batch Protocol error") in said.text


def test_unheard_qsub_is_an_error_and_repeated_later(pbs: Pbs) -> None:
    pbs.lose("unheard")
    with pytest.raises(SubmitError, match="qsub: no answer in 2 s; it was killed"):
        PBSGPUCluster(**GANG)
    with PBSGPUCluster(**ELASTIC) as cluster:
        with pytest.raises(SubmitError, match="qsub: no answer in 2 s; it was killed"):
            cluster.scale(jobs=2)
        pbs.lose("")
        cluster.wait_for_workers(4)
        assert members(cluster) == pbs.ids() == ["1021[0].login01", "1021[1].login01"]


def test_nothing_is_submitted_twice_while_qselect_fails(pbs: Pbs, said: Said) -> None:
    pbs.auto(False)
    pbs.lose("accepted")
    pbs.trouble("qselect")
    with PBSGPUCluster(**ELASTIC) as cluster:
        with pytest.raises(SubmitError, match="qsub: no answer in 2 s"):
            cluster.scale(jobs=1)
        pbs.lose("")
        until(lambda: "qselect did not answer: Connection refused" in said.text, "its refusal is said")
        assert len(pbs.calls("qsub")) == 1
        pbs.trouble("")
        until(lambda: members(cluster), "the job is found")
        assert members(cluster) == pbs.ids() == ["1021.login01"]


@pytest.mark.parametrize("options", [GANG, ELASTIC], ids=["gang", "elastic"])
async def test_jobs_of_a_cancelled_submission_are_deleted(pbs: Pbs, options: dict[str, object]) -> None:
    pbs.auto(False)
    pbs.lose("accepted")

    async def submit() -> None:
        async with PBSGPUCluster(**options, asynchronous=True) as cluster:
            await cluster.scale(jobs=2)

    submitting = asyncio.create_task(submit())
    await asyncio.to_thread(until, pbs.ids, "the jobs are there")
    submitting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await submitting
    assert pbs.ids()
    assert all(map(pbs.over, pbs.ids()))


def kill_client(when: Callable[[], object], what: str, **options: object) -> None:
    """Start a client that submits three jobs, and kill it when the condition holds."""
    client = subprocess.Popen([sys.executable, "-c", CLIENT.format(options=options)])
    try:
        until(when, what)
    finally:
        client.kill()
        client.wait()


@pytest.mark.parametrize("options", [GANG, ELASTIC], ids=["gang", "elastic"])
def test_guard_removes_jobs_that_come_after_its_clients_end(pbs: Pbs, options: dict[str, object]) -> None:
    pbs.auto(False)
    pbs.lose("unheard")
    kill_client(lambda: pbs.calls("qsub"), "qsub is called", **options)
    until(lambda: pbs.calls("qselect"), "the guard looks for the jobs for the first time")
    pbs.lose("")
    until(pbs.ids, "the jobs come")
    until(lambda: all(map(pbs.over, pbs.ids())), "all jobs are over")
    until(lambda: not list((pbs.folder.parent / ".hpcgpu/runs").iterdir()), "the run's folder is gone")


def test_guard_removes_jobs_of_an_unanswered_qsub(pbs: Pbs) -> None:
    pbs.auto(False)
    pbs.lose("accepted")
    kill_client(lambda: len(pbs.ids()) == 3, "three jobs are there", **ELASTIC, client_grace=2)
    until(lambda: all(map(pbs.over, pbs.ids())), "all jobs are over")
    pbs.lose("")  # that qsub has outlived its client
    assert pbs.calls("qdel") == [["1021[0-2].login01"]]

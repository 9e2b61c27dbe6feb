"""Submissions to PBS that are not answered: no job too many, and none that nobody knows; the jobs are real."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from distributed import Client
from pbs_replay import Pbs
from waiting import Said, until

from hpcgpu import PBSGPUCluster
from hpcgpu.errors import SubmitError

pytestmark = pytest.mark.usefixtures("impatient")
GANG = {"gpus": "sim:2", "nodes": 1, "ranks": "node", "launcher": "fork", "walltime": "00:10:00"}
ELASTIC = {"gpus": "sim:2", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}


def members(cluster: PBSGPUCluster) -> list[str]:
    return [row.id for row in cluster.jobs.rows if row.has == "workers"]


@pytest.mark.parametrize(("build", "lost"), [("release", "accepted"), ("head", "broken")])
def test_an_array_that_was_accepted_without_an_answer_is_found_by_its_name(pbs: Pbs, said: Said, lost: str) -> None:
    pbs.lose(lost)
    with PBSGPUCluster(**ELASTIC) as cluster, Client(cluster) as client:
        cluster.scale(jobs=2)
        assert members(cluster) == ["1021[0].login01", "1021[1].login01"]
        pbs.lose("")
        cluster.wait_for_workers(4)
        assert client.submit(sum, [1, 2]).result() == 3
    assert len(pbs.calls("qsub")) == 1
    assert ("qsub: no answer in 2 s; it was killed" if lost == "accepted" else "Batch Protocol error") in said.text


def test_a_cluster_whose_qsub_was_not_answered_is_found_by_its_name(pbs: Pbs) -> None:
    pbs.lose("accepted")
    with PBSGPUCluster(**GANG) as cluster, Client(cluster) as client:
        assert cluster.job_id == "1021.login01"
        assert client.submit(sum, [1, 2]).result() == 3
    assert len(pbs.calls("qsub")) == 1


def test_a_qsub_that_nobody_hears_is_an_error_and_its_jobs_are_submitted_later(pbs: Pbs) -> None:
    pbs.lose("unheard")
    with pytest.raises(SubmitError, match="qsub: no answer in 2 s; it was killed"):
        PBSGPUCluster(**GANG)
    with PBSGPUCluster(**ELASTIC) as cluster:
        with pytest.raises(SubmitError, match="qsub: no answer in 2 s; it was killed"):
            cluster.scale(jobs=2)
        pbs.lose("")
        cluster.wait_for_workers(4)
        assert members(cluster) == pbs.ids() == ["1021[0].login01", "1021[1].login01"]


def test_nothing_is_submitted_again_while_nobody_says_whether_it_is_there(pbs: Pbs, said: Said) -> None:
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
def test_what_was_being_submitted_when_its_cluster_is_given_up_goes(pbs: Pbs, options: dict[str, object]) -> None:
    pbs.auto(False)
    pbs.lose("accepted")

    async def submit() -> None:
        async with PBSGPUCluster(**options, asynchronous=True) as cluster:
            await cluster.scale(jobs=2)

    async def give_up() -> None:
        submitting = asyncio.create_task(submit())
        await asyncio.to_thread(until, pbs.ids, "the jobs are there")
        submitting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submitting

    asyncio.run(give_up())
    assert pbs.ids()
    assert all(map(pbs.over, pbs.ids()))


CLIENT = """
from hpcgpu import PBSGPUCluster
cluster = PBSGPUCluster(**{options})
cluster.scale(jobs=3)
"""


@pytest.mark.parametrize("options", [GANG, ELASTIC], ids=["gang", "elastic"])
def test_jobs_of_a_dead_client_go_also_when_they_come_after_its_end(pbs: Pbs, options: dict[str, object]) -> None:
    pbs.auto(False)
    pbs.lose("unheard")
    client = subprocess.Popen([sys.executable, "-c", textwrap.dedent(CLIENT).format(options=options)])
    try:
        until(lambda: pbs.calls("qsub"), "qsub is called")
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
    until(lambda: pbs.calls("qselect"), "the guard looks for the jobs for the first time")
    pbs.lose("")
    until(pbs.ids, "the jobs come")
    until(lambda: all(map(pbs.over, pbs.ids())), "all jobs are over")
    until(lambda: not list((pbs.folder.parent / ".hpcgpu/runs").iterdir()), "the run's folder is gone")


def test_jobs_of_a_dead_client_go_also_when_their_qsub_had_not_been_answered(pbs: Pbs) -> None:
    pbs.auto(False)
    pbs.lose("accepted")
    code = textwrap.dedent(CLIENT).format(options={**ELASTIC, "client_grace": 2})
    client = subprocess.Popen([sys.executable, "-c", code])
    try:
        until(lambda: len(pbs.ids()) == 3, "three jobs are there")
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
    until(lambda: all(map(pbs.over, pbs.ids())), "all jobs are over")
    pbs.lose("")  # that qsub has outlived its client
    assert pbs.calls("qdel") == [["1021[0-2].login01"]]

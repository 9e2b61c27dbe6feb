"""Jobs of PBS that come and go: arrays, their elements, and what is said of them; the jobs themselves are real."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import ranks
from distributed import Client
from leaks import signal_all
from pbs_replay import Pbs
from streams import STREAM
from waiting import Said, aside, scaled, until

from hpcgpu import PBSGPUCluster
from hpcgpu.errors import JobError

OPTIONS = {"gpus": "sim:2x16MiB", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}


def members(cluster: PBSGPUCluster) -> list[str]:
    return [row.id for row in cluster.jobs.rows if row.has == "workers"]


def arrays(pbs: Pbs) -> list[str]:
    """Return for each submission the elements that it asks for; empty for a single job."""
    found = sorted(path for path in pbs.jobs.glob("[!.]*") if "[]" in path.name or "[" not in path.name)
    lines = [pbs.get(path.name, "script").splitlines() for path in found]
    return [next((line.split()[-1] for line in script if line.startswith("#PBS -J")), "") for script in lines]


def kill(pbs: Pbs, job_id: str) -> None:
    """Let a job's node fail: all of its processes are gone at once."""
    signal_all(pbs.processes(job_id), signal.SIGKILL)


@pytest.mark.parametrize("build", ["head"])
def test_array_is_one_qsub_and_dead_elements_are_replaced(pbs: Pbs, said: Said) -> None:
    with PBSGPUCluster(**OPTIONS, device_memory_limit="1GB") as cluster, Client(cluster) as client:
        assert "READY scheduler here; no workers yet: request them by cluster.scale(n)" in said.text
        assert "0 workers" not in said.text
        cluster.scale(5)  # workers: three jobs of two
        assert arrays(pbs) == ["0-2"]
        cluster.wait_for_workers(6)
        assert members(cluster) == [f"1021[{i}].login01" for i in range(3)]
        assert {row.text for row in cluster.jobs.rows[1:]} == {"UP 2/2"}
        kill(pbs, "1021[1].login01")
        until(lambda: len(arrays(pbs)) == 2, "a second submission")
        assert arrays(pbs) == ["0-2", ""]
        until(lambda: "1022.login01" in members(cluster), "the new job is known")
        client.wait_for_workers(6, timeout=scaled(60))
        assert "1021[1].login01" not in members(cluster)
        assert [job.id for job in cluster.jobs.gone] == ["1021[1].login01"]
        assert sum(client.gather(client.map(abs, range(20)))) == 190
    assert said.text.count("is lowered to 16.0 MiB") == 1, "what nodes say of themselves is said once"
    assert all(map(pbs.over, pbs.ids()))


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGKILL])
def test_bytes_within_a_node_are_right_when_a_job_ends(pbs: Pbs, tmp_path: Path, sig: signal.Signals) -> None:
    """All processes get the signal while they copy from each other's memory; SIGKILL comes 10 s after SIGTERM."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    exec(STREAM, scope)
    with PBSGPUCluster(**OPTIONS | {"gpus": "sim:2x64MiB"}) as cluster, Client(cluster) as client:
        cluster.scale(jobs=2)
        cluster.wait_for_workers(4)
        addresses, ended = sorted(client.nthreads()), members(cluster)[0]
        story = aside(lambda: scope["stream"](client, addresses, scaled(100)))
        rounds = tmp_path / "rounds"
        until(lambda: rounds.exists() and rounds.read_text() > "1", "values are under way", story)
        pbs.end(ended, 265, sig=sig)
        until(lambda: pbs.over(ended), "the job has ended", story)
        before = int(rounds.read_text() or 0)
        until(lambda: int(rounds.read_text() or 0) > before + 1, "the others go on", story)
        (tmp_path / "stop").touch()
        of = story.result(scaled(100))
        assert (of["wrong"], of["errors"]) == ([], [])
        assert of["moved"][1] > 0, "values were copied"


def test_commands_show_ranges_of_elements_and_missing_logs(pbs: Pbs) -> None:
    pbs.auto(False)
    with PBSGPUCluster(**OPTIONS) as cluster:
        cluster.scale(jobs=3)
        assert " 1021[0-2].login01 " in ranks.in_process("ps", HOME=os.environ["HOME"]).stdout
        logs = ranks.in_process("logs", "1021", HOME=os.environ["HOME"])
        assert ".o1021.0 is not there; job 1021[0].login01: PENDING" in logs.stderr


def test_elements_that_wait_are_deleted_by_one_qdel_for_a_range(pbs: Pbs) -> None:
    pbs.auto(False)
    with PBSGPUCluster(**OPTIONS) as cluster:
        cluster.scale(jobs=5)
        cluster.scale(jobs=2)
        assert pbs.calls("qdel") == [["1021[2-4].login01"]]
        pbs.start("1021[1].login01")
        cluster.wait_for_workers(2)
        assert sorted(members(cluster))[:2] == ["1021[0].login01", "1021[1].login01"]
        cluster.scale(jobs=1)
        assert pbs.calls("qdel")[1:] == [["1021[0].login01"]]
        until(lambda: members(cluster) == ["1021[1].login01"], "only the job that runs is left")


@pytest.mark.parametrize("history", [True, False])
def test_ended_array_is_replaced_with_or_without_history(pbs: Pbs, said: Said, history: bool) -> None:
    pbs.history(history)
    with PBSGPUCluster(**OPTIONS) as cluster:
        cluster.scale(jobs=2)
        cluster.wait_for_workers(4)
        for index in range(2):
            kill(pbs, f"1021[{index}].login01")
        until(lambda: not [i for i in members(cluster) if "1021[" in i], "the elements are forgotten")
        cluster.wait_for_workers(4)
        until(lambda: "job 1021[0].login01: " in said.text, "the end of the first is said")
        reason = "(node0001:ncpus=2) and failed" if history else "Unknown Job Id 1021[].login01"
        assert reason in said.text


@pytest.mark.usefixtures("impatient")
def test_jobs_that_can_never_run_stop_the_loop(pbs: Pbs) -> None:
    pbs.auto(False)
    never = "Can Never Run: Insufficient amount of resource: ngpus (R: 64 A: 16 T: 16)"
    with PBSGPUCluster(**OPTIONS) as cluster:
        cluster.scale(jobs=1)

        def refuse() -> bool:
            for job_id in pbs.ids():
                if pbs.get(job_id, "state") == "Q":
                    pbs.say(job_id, "Q", never)
            return waiting.done()

        waiting = aside(lambda: cluster.wait_for_workers(2))
        until(refuse, "a submission is refused")
        with pytest.raises(JobError) as caught:
            waiting.result()
    assert "3 jobs in a row ended before their first worker" in str(caught.value)
    assert never in str(caught.value)
    assert len(pbs.calls("qsub")) == 3


@pytest.mark.usefixtures("impatient")
def test_elastic_jobs_survive_a_server_that_is_down(pbs: Pbs, said: Said) -> None:
    """A requeued element joins again under another name."""
    with PBSGPUCluster(**OPTIONS) as cluster, Client(cluster) as client:
        cluster.scale(jobs=2)
        cluster.wait_for_workers(4)
        pbs.trouble("down")
        asked = len(pbs.calls("qstat"))
        kill(pbs, "1021[0].login01")
        until(lambda: len(pbs.calls("qstat")) > asked, "qstat is asked")
        assert client.submit(sum, [1, 2]).result() == 3
        until(lambda: "qstat did not answer: Connection refused" in said.text, "its refusal is said")
        assert len(pbs.calls("qsub")) == 1
        pbs.trouble("")
        until(lambda: len(members(cluster)) == 2 and "1021[0].login01" not in members(cluster), "it is replaced")
        cluster.wait_for_workers(4)
        assert len(pbs.calls("qsub")) == 2
        job_id = "1021[1].login01"
        pbs.requeue(job_id)
        until(lambda: pbs.get(job_id, "state") == "Q", "the job is in the queue again")
        pbs.start(job_id)

        def names() -> set[str]:
            return {facts["name"] for facts in client.scheduler_info()["workers"].values()}

        until(lambda: {f"{job_id}-0r1", f"{job_id}-1r1"} <= names(), "workers of its next life")
        until(lambda: len(names()) == 4, "four workers, none of its last life")
        assert job_id in members(cluster)
        kept = client.scatter(list(range(8)), broadcast=False)
        cluster.scale(jobs=1)
        until(lambda: sum(map(pbs.over, pbs.ids())) == 2 and len(members(cluster)) == 1, "one job is left")
        assert client.gather(kept) == list(range(8))  # a job that leaves hands over its data, and needs no qdel
        assert [job.id for job in cluster.jobs.gone] == ["1021[0].login01"]  # nobody wanted the other any more
        assert pbs.calls("qdel") == []


def test_a_job_is_followed_by_another_before_its_time_is_over(pbs: Pbs) -> None:
    with PBSGPUCluster(**OPTIONS, walltime="00:00:24") as cluster, Client(cluster) as client:
        cluster.scale(jobs=1)
        cluster.wait_for_workers(2)
        kept = client.scatter(list(range(4)), broadcast=False)
        until(lambda: pbs.over("1021.login01"), "the first job is over")
        assert client.gather(kept) == list(range(4))
        assert pbs.get("1021.login01", "exit") == "0"
        assert "1022.login01" in pbs.ids()


def test_an_elastic_cluster_says_that_it_ends_with_its_first_job(pbs: Pbs, said: Said) -> None:
    """Before it does, and in the error of what is lost."""
    with PBSGPUCluster(**OPTIONS | {"scheduler": "job", "walltime": "00:00:04"}) as cluster, Client(cluster) as client:
        over_s = time.monotonic() + 4
        assert "the cluster ends with job 1021.login01, its first, 00:00:04 after that began; with " in said.text
        lost, ended = client.submit(time.sleep, 600), client.submit(os.getpid)
        os.kill(worker := ended.result(), signal.SIGSTOP)  # so the next gather waits
        errors = [aside(lost.result), aside(ended.result)]
        gathers = lambda dask_scheduler: "gather" in dask_scheduler._comms.values()  # noqa: E731 - by value
        until(lambda: client.run_on_scheduler(gathers), "the scheduler waits for the value")
        until(lambda: time.monotonic() > over_s, "its time is over")
        pbs.end("1021.login01", -29, "Job run at Fri Nov 20 at 20:31 and exceeded resource walltime")
        for error in errors:
            with pytest.raises(JobError, match="it got SIGTERM: its walltime is over; with scheduler='here' a cluster"):
                error.result(scaled(60))
        os.kill(worker, signal.SIGCONT)

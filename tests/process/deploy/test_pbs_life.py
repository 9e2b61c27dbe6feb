"""The life of a PBSGPUCluster's job, in the words of both builds of OpenPBS: what a person sees, and what is done."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
from distributed import Client
from leaks import signal_all
from pages import blocks
from pbs_replay import Pbs
from recordings import quirks, recorded
from waiting import Said, aside, scaled, until

from hpcgpu import PBSGPUCluster
from hpcgpu.deploy.jobs import home as runs_home
from hpcgpu.errors import JobError, SubmitError
from hpcgpu.model import Patience

OPTIONS = {"gpus": "sim:2", "nodes": 1, "queue": "gpu", "walltime": "00:10:00", "ranks": "node", "launcher": "fork"}
JOB = "1021.login01"
FULL = "Not Running: Insufficient amount of resource: ncpus (R: 32 A: 28 T: 32)"
NEVER = "Can Never Run: Insufficient amount of resource: ngpus (R: 64 A: 16 T: 16)"
HELD = "job held, too many failed attempts to run"
PLAIN = {"gpus": "sim:2", "nodes": 1, "queue": "gpu", "account": "a-b", "walltime": "00:10:00"}
SCRIPT = f"""
from distributed import Client
from hpcgpu import PBSGPUCluster
from hpcgpu.deploy.jobs import home as runs_home

with PBSGPUCluster(**{OPTIONS!r}) as cluster, Client(cluster) as client:
    print(client.submit(sum, [1, 2]).result())
"""


def test_a_cluster_from_start_to_end(pbs: Pbs, tmp_path: Path) -> None:
    """Beside a malformed job of another user."""
    pbs.history(True)
    pbs.write("others", ",\n".join(quirks()))
    folder = tmp_path / "new" / "logs"
    with PBSGPUCluster(**PLAIN, log_directory="~/new/logs") as cluster, Client(cluster) as client:
        assert cluster.job_id == JOB
        assert client.submit(sum, [1, 2]).result() == 3
        assert len(client.scheduler_info()["workers"]) == 2
        script = cluster.job_script()
        assert folder.is_dir()
    assert pbs.get(JOB, "script") == script
    assert {"#PBS -q gpu", "#PBS -l select=1:ncpus=2:mpiprocs=2", f"#PBS -o {folder}/"} <= set(script.splitlines())
    command = next(line for line in script.splitlines() if "--document" in line)
    document, argv = (shlex.split(part) for part in command.rpartition(" >&")[0].split(" exec "))
    assert json.loads(document[0].removeprefix("HPCGPU_DOCUMENT="))["settings"]["account"] == "a-b"
    assert argv[-2:] == ["launch", "--document"]
    assert pbs.processes(JOB) == []


@pytest.mark.parametrize("build", ["release", "head"])
def test_a_refusal_reaches_the_caller_in_qsubs_words(pbs: Pbs, build: str) -> None:
    pbs.refuse(recorded(build, "02-qsub-bad-queue", 0))
    with pytest.raises(SubmitError, match="qsub refused the job: qsub: Unknown queue") as caught:
        PBSGPUCluster(**PLAIN)
    assert f" -q {PLAIN['queue']} -A " in str(caught.value).splitlines()[-1]


def test_the_example_of_the_page_for_users_of_dask_jobqueue_runs(pbs: Pbs, said: Said) -> None:
    [example] = blocks("dask-jobqueue", "python")
    exec(example, {})
    assert pbs.get(JOB, "exit") == "0"
    assert "#PBS -q gpu\n" in said.text
    assert said.text.splitlines().count("6") == 1


def test_the_launcher_of_a_site_starts_the_ranks(pbs: Pbs, tmp_path: Path) -> None:
    start = tmp_path / "start"
    start.write_text(f'#!/bin/sh\necho "$1" > {tmp_path}/started\nshift\nexec "$@"\n')
    start.chmod(0o755)
    site = tmp_path / "here.yaml"
    site.write_text(f'version: 2\nname: here\nbatch: pbs\nlauncher:\n  command: [{start}, "of the site"]\n')
    logs = f"{tmp_path}/%u/logs"  # the batch system's pattern, not a name
    options = {**PLAIN, "site": str(site), "ranks": "node", "log_directory": logs}
    with PBSGPUCluster(**options) as cluster, Client(cluster) as client:
        assert not (tmp_path / "%u").exists()
        client.wait_for_workers(2)
        assert client.submit(sum, [1, 2]).result() == 3
        assert "site here, " in cluster.job_script()
    assert (tmp_path / "started").read_text() == "of the site\n"


def ask_again(pbs: Pbs, times: int, while_: Future | None = None) -> None:
    """Wait until qstat has been called so many times more."""
    asked = len(pbs.calls("qstat"))
    until(lambda: len(pbs.calls("qstat")) >= asked + times, "qstat is asked", while_)


def starting(pbs: Pbs, **options: object) -> Future:
    """Start a cluster whose job waits until the test has it start."""
    pbs.auto(False)
    made = aside(lambda: PBSGPUCluster(**OPTIONS | options))
    until(lambda: pbs.get(JOB, "state"), "the job is submitted", made)
    return made


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("build", ["head"])
def test_a_server_that_is_down_for_a_while_costs_no_cluster(pbs: Pbs, said: Said) -> None:
    """Nor does a job that waits, or is held."""
    made = starting(pbs)
    pbs.say(JOB, "Q", FULL)
    until(lambda: f"PENDING ({FULL})" in said.text, "it is said that the job waits", made)
    pbs.say(JOB, "H")  # by its owner
    ask_again(pbs, 2, made)
    pbs.trouble("down")
    ask_again(pbs, 3, made)
    assert said.text.count("qstat did not answer: Connection refused") == 1  # of three questions
    pbs.trouble("")
    pbs.start(JOB)
    with made.result() as cluster, Client(cluster) as client:
        assert client.submit(sum, [1, 2]).result() == 3
        assert "#PBS -l place=scatter\n" in cluster.job_script()
        pbs.trouble("down")
        assert client.submit(sum, [1, 3]).result() == 4
        pbs.trouble("")
    assert "cannot connect to server login01" in said.text
    assert f"job {JOB}: UNKNOWN (the batch system does not answer)" in said.text
    assert (pbs.get(JOB, "state"), pbs.get(JOB, "exit")) == ("F", "0")
    assert pbs.calls("qdel") == []


def guards() -> list[psutil.Process]:
    """Return those of this process that live: a killed one has no command line."""
    every = psutil.process_iter(["ppid", "cmdline"])
    return [p for p in every if p.info["ppid"] == os.getpid() and "hpcgpu.deploy.guard" in (p.info["cmdline"] or ())]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("build", ["head"])
def test_killed_guard_of_jobs_that_wait_is_started_anew(pbs: Pbs) -> None:
    with PBSGPUCluster(**OPTIONS, shape="elastic", scheduler="here") as cluster:
        pbs.auto(False)
        cluster.scale(jobs=1)
        (before,) = guards()
        before.kill()
        until(lambda: [guard for guard in guards() if guard.pid != before.pid], "another guard")
    assert guards() == []


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("build", ["head"])
def test_guard_of_a_cluster_closed_in_silence_stays(pbs: Pbs, said: Said) -> None:
    """A server that has not heard of the job's end may start it again."""
    with PBSGPUCluster(**OPTIONS) as cluster:
        (before,) = guards()
        pbs.trouble("down")
        (folder,) = runs_home().iterdir()
    # a qstat that takes long to say so, as on a busy machine, is not waited for: the script has left its exit code
    assert re.search("qstat did not answer|its script has ended .*; the batch system does not answer", said.text)
    assert not before.is_running()
    (guard,) = guards()
    assert folder.exists()
    pbs.trouble("")
    until(lambda: not folder.exists(), "its guard has heard that no job is left")
    guard.wait(scaled(30))
    assert cluster.status.name == "closed"


@pytest.mark.parametrize("build", ["head"])
def test_nodes_of_a_job_are_asked_for_at_its_start(pbs: Pbs, said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later nobody names those of a job that has lost one of them and is to start again."""
    monkeypatch.setattr(PBSGPUCluster, "patience", Patience(ask_s=3600, news_s=0.1))
    made = starting(pbs)
    until(lambda: f"job {JOB}: PENDING" in said.text, "PBS has been asked about the job", made)
    before = len(pbs.calls("pbsnodes"))
    pbs.start(JOB)
    with made.result():
        until(lambda: len(pbs.calls("pbsnodes")) > before, "PBS is asked about the job's nodes", made)


def test_progress_is_there_at_once_and_not_among_the_results(pbs: Pbs, tmp_path: Path) -> None:
    """Both are files, as under nohup or in a job: python holds back what it prints, and lines replace nothing."""
    pbs.auto(False)
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as results, err.open("w") as log:
        script = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=results, stderr=log)
    made = aside(script.wait)
    until(lambda: pbs.get(JOB, "state"), "the job is submitted", made)
    pbs.say(JOB, "Q", FULL)
    waits = f"hpcgpu: job {JOB}: PENDING ({FULL})"  # " [2 s]" follows on a slow machine
    until(lambda: waits in err.read_text(), "it is written that the job waits", made)
    pbs.start(JOB)
    assert made.result() == 0, err.read_text()
    assert out.read_text() == "3\n"
    assert err.read_text().count(waits) == 1
    assert {line[:8] for line in err.read_text().splitlines()} == {"hpcgpu: "}


@pytest.mark.parametrize(("build", "state", "comment"), [("release", "Q", NEVER), ("head", "H", HELD)])
def test_a_job_that_will_never_start_is_an_error_and_goes(pbs: Pbs, state: str, comment: str) -> None:
    made = starting(pbs)
    pbs.say(JOB, state, comment)
    with pytest.raises(JobError) as caught:
        made.result()
    assert str(caught.value).startswith(f"job {JOB} will not start: {state} ({comment}). ")
    assert ("Request resources that exist" if "Never" in comment else "refused it") in str(caught.value)
    assert pbs.calls("qdel") == [[JOB]]


@pytest.mark.parametrize(("build", "history"), [("release", True), ("release", False), ("head", True)])
def test_failed_job_gives_its_exit_code_with_or_without_history(pbs: Pbs, history: bool) -> None:
    pbs.history(history)
    with pytest.raises(JobError) as caught:
        PBSGPUCluster(**OPTIONS, memory_limit="900TB")
    kept = "F (Job run at Fri Nov 20 at 20:19 on (node0001:ncpus=2) and failed)"
    assert (kept if history else f"gone (qstat: Unknown Job Id {JOB})") in str(caught.value)
    assert ", exit code 1; the end of its log" in str(caught.value)
    assert "900" in str(caught.value).splitlines()[-1]


def test_a_job_that_waits_is_cancelled_when_the_server_is_back(pbs: Pbs, said: Said) -> None:
    made = starting(pbs)
    pbs.trouble("qdel")
    pbs.say(JOB, "Q", NEVER)
    until(lambda: len(pbs.calls("qdel")) > 1, "qdel is called again", made)
    pbs.trouble("")
    with pytest.raises(JobError, match="will not start"):
        made.result()
    assert pbs.get(JOB, "state") == "F"
    assert said.text.count("qdel failed: Connection refused") == 1


def test_malformed_job_of_another_user_hides_none_of_ours(pbs: Pbs) -> None:
    """Without history; ``test_a_cluster_from_start_to_end`` has it."""
    pbs.history(False)
    pbs.write("others", ",\n".join(quirks()))
    with PBSGPUCluster(**OPTIONS) as cluster, Client(cluster) as client:
        assert client.submit(sum, [1, 2]).result() == 3


def test_requeued_job_is_found_again(pbs: Pbs, said: Said) -> None:
    """It is said to wait while its old scheduler is still tried."""
    with PBSGPUCluster(**OPTIONS, client_grace=2) as cluster:
        asked = len(pbs.calls("qstat"))
        signal_all(pbs.processes(JOB), signal.SIGSTOP)  # as on a node that is lost: nothing refuses a connection
        until(lambda: "lost its workers" in str(cluster.jobs), "the table says that the job has lost its workers")
        until(lambda: len(pbs.calls("qstat")) > asked, "qstat is asked")
        pbs.requeue(JOB)
        until(lambda: "PENDING" in said.text, "it is said that the job waits")
        assert "PENDING" in str(cluster.jobs)
        assert "could not be reached" not in said.text
        made = aside(lambda: Client(cluster, timeout=scaled(10)))  # waits for the job, which has another certificate
        pbs.start(JOB)
        until(lambda: "the cluster is back" in said.text, "the return is said")
        assert f"job {JOB} was requeued; its results are lost" in said.text
        with made.result() as client:
            client.wait_for_workers(2)
            assert client.submit(sum, [1, 2]).result() == 3

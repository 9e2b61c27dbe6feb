"""Jobs that end in the middle and start again: what a checkpoint has is not computed a second time."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime

import pytest
from faults import container, fault
from lab import CHECKOUT, ENDED, PATIENCE_S, Lab
from requeues import BEGUN, CHUNKS, OUTSIDE
from waiting import scaled, until

RESUME = f"{CHECKOUT}/examples/resume.py"
SMALL = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=1", "--open-mode=append")
# Values that take long to pickle: the writers are far behind when all are finished.
SLOW = """
import time, dask
from distributed import Client, wait
from hpcgpu import Checkpoint

class Slow:
    def __reduce__(self):
        time.sleep(0.4)
        return Slow, ()

if __name__ == "__main__":
    client, checkpoint = Client(), Checkpoint("run")
    values = [dask.delayed(Slow)(dask_key_name=f"value-{i}") for i in range(24)]
    wait(checkpoint.persist(values, name="values"))
    print("finished", flush=True)
    time.sleep(600)
"""
OPTIONS = 'nodes=2, gpus="sim:1", walltime="2m", requeue=True, dashboard=False'


class Resumed:
    """``examples/resume.py`` in a folder of its own, and the chunks that it has computed, in their order."""

    def __init__(self, lab: Lab, name: str, seconds: float) -> None:
        self._lab, self._name = lab, f"requeue/{name}"
        self._words = ("--chunks", str(CHUNKS), "--seconds", f"{seconds:g}", "--folder", "run", "--ran", "ran")
        self.ends: list[int] = []  # how many chunks had been computed at the end of each start but the last
        lab.exec(lab.login, ["sh", "-c", f"rm -rf {self._name}; mkdir -p {self._name}"], check=True)

    def submit(self, *options: str, launch: Sequence[str] = (), script: str = RESUME) -> str:
        template = f"{CHECKOUT}/jobscripts/slurm.sbatch"
        line = ["sbatch", "--parsable", f"--chdir={self._name}", "--output=log", *SMALL, *options, template]
        argv = [*line, "--gpus", "sim:1", "--no-dashboard", *launch, script, *self._words]
        return self._lab.exec(self._lab.login, argv, check=True).stdout.strip()

    def read(self, file: str) -> str:
        return self._lab.exec(self._lab.login, ["sh", "-c", f"cat {self._name}/{file} 2> /dev/null"]).stdout

    @property
    def ran(self) -> list[str]:
        return self.read("ran").split()

    def wait_for(self, more: int) -> None:
        """Wait until so many more chunks have been computed."""
        enough = len(self.ran) + more
        until(lambda: len(self.ran) >= enough, f"{enough} chunks are computed", limit_s=PATIENCE_S, every_s=0.5)

    def again(self, job: str) -> None:
        """Let a job that was requeued start now: Slurm waits two minutes."""
        self._lab.wait_job(job, {"PENDING"})
        self.ends.append(len(self.ran))
        self._lab.root("scontrol", "update", f"JobId={job}", "StartTime=now")
        self._lab.wait_job(job, {"RUNNING"})

    def check(self, starts: int) -> None:
        """Assert that the result is right, that each start found more, and that no start computed what was there."""
        log = self.read("log")
        before = [int(count) for count in BEGUN.findall(log)]
        assert len(before) == starts, log
        assert before == sorted(set(before)), log  # each one more than the one before it
        assert "the sum is right" in log
        ran = self.ran
        for begin, count in zip((0, *self.ends), before, strict=True):
            assert len(set(ran[begin:])) == CHUNKS - count, (self.ends, before, ran)
        print(f"there at each start: {before}; computed before: {[0, *self.ends]}; in all: {len(ran)}")


@pytest.mark.timeout(2 * PATIENCE_S)
def test_job_requeued_twice_computes_no_chunk_twice(slurm_lab: Lab) -> None:
    run = Resumed(slurm_lab, "twice", 1)
    job = run.submit("--requeue")
    for _ in range(2):
        run.wait_for(6)
        slurm_lab.exec(slurm_lab.login, ["scontrol", "requeue", job], check=True)
        run.again(job)
    assert slurm_lab.wait_job(job)["ExitCode"] == "0:0", run.read("log")
    run.check(starts=3)


@pytest.fixture
def grace_s(slurm_lab: Lab, request: pytest.FixtureRequest) -> Iterator[int]:
    """The GraceTime of the partition whose jobs are preempted."""
    slurm_lab.root("scontrol", "update", "PartitionName=low", f"GraceTime={request.param}")
    yield request.param
    slurm_lab.root("scontrol", "update", "PartitionName=low", "GraceTime=0")


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("grace_s", [0, 600], indirect=True)
def test_preempted_job_goes_on_where_it_was(slurm_lab: Lab, grace_s: int) -> None:
    """Slurm sends SIGTERM, and SIGKILL 5 s later; with a GraceTime so long after the SIGTERM."""
    run = Resumed(slurm_lab, f"preempted-{grace_s}", 1)
    job = run.submit("--requeue", "--partition=low", launch=["--requeue"] if grace_s else [])
    run.wait_for(6)
    nodes = slurm_lab.job(job)["NodeList"]
    slurm_lab.submit("#!/bin/bash\nsleep 5\n", "-phigh", f"-w{nodes}", "--exclusive", "-N2")
    run.again(job)
    assert slurm_lab.job(job)["Restarts"] == "1"
    assert slurm_lab.wait_job(job)["ExitCode"] == "0:0", run.read("log")
    run.check(starts=2)


def behind(lab: Lab, name: str, *options: str) -> tuple[Resumed, str]:
    """Return a job on two nodes whose chunks are all finished, and few are written."""
    run = Resumed(lab, name, 0)
    lab.write(f"requeue/{name}/slow.py", SLOW)
    job = run.submit(*options, script="slow.py")
    until(lambda: "finished" in run.read("log"), "all chunks are finished", limit_s=PATIENCE_S, every_s=0.5)
    return run, job


def check_saved(lab: Lab, run: Resumed, name: str) -> None:
    """Assert that a job that got SIGTERM ends in order, with all chunks written."""
    text = "the run ends: it got SIGTERM (cancelled, preempted"
    until(lambda: text in run.read("log"), "it has ended", limit_s=PATIENCE_S, shown=lambda: run.read("log"))
    done = lab.exec(lab.login, ["hpcgpu", "checkpoint", f"requeue/{name}/run", "--json"], check=True)
    assert json.loads(done.stdout)["names"][0]["done"] == 24, run.read("log")
    assert "not in" not in run.read("log")


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("grace_s", [60], indirect=True)
def test_preempted_job_saves_within_its_grace(slurm_lab: Lab, grace_s: int) -> None:
    """It takes the time that it needs, ends before the GraceTime does, and on both nodes; 24.11.5 would requeue it."""
    run, job = behind(slurm_lab, "grace", "--partition=low", "--no-requeue")
    nodes = slurm_lab.job(job)["NodeList"]
    slurm_lab.submit("#!/bin/bash\nsleep 5\n", "-phigh", f"-w{nodes}", "--exclusive", "-N2")
    facts = slurm_lab.wait_job(job)
    check_saved(slurm_lab, run, "grace")
    preempted, ended = (datetime.fromisoformat(facts[name]) for name in ("PreemptTime", "EndTime"))
    assert (ended - preempted).total_seconds() < grace_s, facts


@contextmanager
def kill_wait(lab: Lab, seconds: int) -> Iterator[None]:
    """Let Slurm wait so long between SIGTERM and SIGKILL."""

    def let_wait(seconds: int) -> None:
        for machine in (lab.login, *lab.nodes):
            edit = ["sed", "-i", f"s/^KillWait=.*/KillWait={seconds}/", "/etc/slurm/slurm.conf"]
            lab.root(*edit, container=machine)
        lab.root("scontrol", "reconfigure")

    let_wait(seconds)
    try:
        yield
    finally:
        let_wait(5)


@pytest.mark.timeout(2 * PATIENCE_S)
def test_cancelled_job_saves_until_slurm_would_kill_it(slurm_lab: Lab) -> None:
    with kill_wait(slurm_lab, 60):
        run, job = behind(slurm_lab, "wait")
        slurm_lab.exec(slurm_lab.login, ["scancel", job], check=True)
        check_saved(slurm_lab, run, "wait")


@pytest.mark.timeout(2 * PATIENCE_S)
@pytest.mark.parametrize("which", [0, 1], ids=["first", "another"])
def test_job_that_lost_a_node_goes_on_where_it_was(slurm_lab: Lab, which: int) -> None:
    """The first node has the script and the scheduler; the other one is not through before Slurm gives it up."""
    run = Resumed(slurm_lab, f"lost-{which}", 3)
    job = run.submit("--requeue")
    run.wait_for(6)
    nodes = slurm_lab.root("scontrol", "show", "hostnames", slurm_lab.job(job)["NodeList"]).split()
    lost = container(nodes[which])
    with fault(slurm_lab, ("kill", lost), ("start", lost)):
        run.again(job)
        assert slurm_lab.wait_job(job)["ExitCode"] == "0:0", run.read("log")
    run.check(starts=2)


@pytest.mark.timeout(2 * PATIENCE_S)
def test_job_submitted_after_a_cancelled_one_goes_on(slurm_lab: Lab) -> None:
    run = Resumed(slurm_lab, "cancelled", 1)
    job = run.submit("--requeue", launch=["--requeue"])
    run.wait_for(6)
    slurm_lab.exec(slurm_lab.login, ["scancel", job], check=True)
    assert slurm_lab.wait_job(job)["JobState"] == "CANCELLED"
    run.ends.append(len(run.ran))
    follower = run.submit()
    assert slurm_lab.wait_job(follower)["ExitCode"] == "0:0", run.read("log")
    run.check(starts=2)


@pytest.mark.timeout(3 * PATIENCE_S)
def test_job_asks_for_its_requeue_before_its_time_limit(slurm_lab: Lab) -> None:
    minutes = math.ceil(scaled(1))  # where ranks take a minute to start, a job of one has no time for a chunk
    run = Resumed(slurm_lab, "limit", 4 * minutes)
    job = run.submit("--requeue", f"--time={minutes}", launch=["--requeue"])

    def has_ended() -> bool:
        if (state := slurm_lab.job(job)["JobState"]) == "PENDING" and run.read("log"):
            run.again(job)
        return state in ENDED

    until(has_ended, "it has ended", limit_s=2 * PATIENCE_S, every_s=1)
    assert f"job {job} is requeued" in run.read("log")
    assert slurm_lab.job(job)["ExitCode"] == "0:0", run.read("log")
    run.check(starts=len(run.ends) + 1)
    assert run.ends


@pytest.mark.timeout(2 * PATIENCE_S)
def test_job_that_slurm_ends_at_its_limit_is_requeued(slurm_lab: Lab) -> None:
    """As on a node so busy that it has not asked before; here the limit comes when the job does not expect it."""
    run = Resumed(slurm_lab, "over", 10)  # more than a minute in all, where nothing else runs
    with kill_wait(slurm_lab, 30):  # Slurm's default
        job = run.submit("--requeue", launch=["--requeue"])
        run.wait_for(6)
        slurm_lab.root("scontrol", "update", f"JobId={job}", "TimeLimit=1")
        slurm_lab.wait_job(job, {"PENDING"})
    slurm_lab.root("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    run.again(job)
    assert slurm_lab.wait_job(job)["ExitCode"] == "0:0", run.read("log")
    run.check(starts=2)


@pytest.mark.timeout(3 * PATIENCE_S)
def test_script_outside_its_job_goes_on_after_the_requeue(slurm_lab: Lab) -> None:
    slurm_lab.exec(slurm_lab.login, ["sh", "-c", "rm -rf requeue/outside*; mkdir -p requeue"], check=True)
    with slurm_lab.client(timeout=3 * PATIENCE_S) as client:
        client(f"{OUTSIDE}cluster = SLURMGPUCluster({OPTIONS})")
        job = client("cluster.job_id")
        client.send("run()")

        def is_through() -> bool:
            if slurm_lab.job(job)["JobState"] == "PENDING":  # Slurm waits two minutes
                slurm_lab.root("scontrol", "update", f"JobId={job}", "StartTime=now")
            return slurm_lab.exec(slurm_lab.login, ["test", "-e", "requeue/outside.through"]).returncode == 0

        until(is_through, "the script is through", limit_s=2 * PATIENCE_S, every_s=2)
        assert client.answer(2 * PATIENCE_S) == 2.0 * sum(range(24))
        assert client("errors")
        numbers = slurm_lab.read("requeue/outside.ran").split()
        assert len(set(numbers)) == 24
        print(len(numbers), client("errors"))
        client("checkpoint.close(); cluster.close()")

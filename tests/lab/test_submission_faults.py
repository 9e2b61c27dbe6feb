"""Submissions that go wrong on a real Slurm: refused, answered late or not at all, too many, of jobs that die."""

import json
import re
import textwrap
from typing import Any

import ailing
import pytest
from lab import NETWORK, Lab
from waiting import scaled

pytestmark = pytest.mark.timeout(400)

# Programs that stand before Slurm's: each call is a line of its arguments in a file, and then it is Slurm's turn.
COUNTED = '#!/bin/sh\necho "$@" >> ~/front/{name}.calls\n{before}\nexec /usr/bin/{name} "$@"\n'
PRELUDE = """
import json, os, resource, subprocess, sys, time
from pathlib import Path
from distributed import Client
from hpcgpu import SLURMGPUCluster
from hpcgpu.deploy.cluster.cluster import GPUCluster
from hpcgpu.errors import HpcGpuError, JobError, SubmitError
from hpcgpu.model import Patience

OPTIONS = dict(gpus="sim:1", shape="elastic", scheduler="here", ranks="node", launcher="fork", dashboard=False,
               walltime="01:00:00", client_grace=5)

def queue():
    return subprocess.run(["squeue", "-h", "-r", "-o", "%i"], capture_output=True, text=True, check=True).stdout.split()

def calls(program):
    file = Path.home() / "front" / f"{program}.calls"
    return file.read_text().splitlines() if file.exists() else []

def members(cluster):
    return [row.id for row in cluster.jobs.rows if row.has == "workers"]

def until(condition):
    end = time.monotonic() + 100
    while not (value := condition()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return value

def refusal(call):
    try:
        call()
    except HpcGpuError as e:
        return f"{type(e).__name__}: {e}"

"""
TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
FIRST = "[ $(wc -l < ~/front/sbatch.calls) -gt 1 ]"
TWICE = f"[ $(wc -l < ~/front/sbatch.calls) -gt 2 ] || {{ echo '{TIMED_OUT}' >&2; exit 1; }}"
ACCEPTED = f"""{FIRST} || {{ /usr/bin/sbatch "$@" > /dev/null; echo '{TIMED_OUT}' >&2; exit 1; }}"""
# accepted only when it has been looked for in vain, and submitted again
LATE = f"""{FIRST} || {{
  cp /dev/stdin ~/front/late
  (until [ $(wc -l < ~/front/sbatch.calls) -gt 1 ]; do sleep 0.1; done; /usr/bin/sbatch "$@" ~/front/late
   touch ~/front/late.there) > /dev/null 2>&1 &
  echo '{TIMED_OUT}' >&2; exit 1
}}
"""
ONE = """
    late, accepted = Path.home() / "front" / "late", Path.home() / "front" / "late.there"
    with SLURMGPUCluster(**OPTIONS) as cluster, Client(cluster) as client:
        refusal(lambda: cluster.scale(jobs=2))
        cluster.wait_for_workers(2, timeout=100)
        until(lambda: accepted.exists() or not late.exists())
        until(lambda: sorted(queue()) == sorted(members(cluster)) and len(members(cluster)) == 2)
        facts = dict(calls=len(calls("sbatch")), sum=client.submit(sum, [1, 2]).result())
    facts |= dict(left=queue())
"""
HANGS = '/usr/bin/sbatch "$@" > /dev/null; sleep 600'
CODE = """
from hpcgpu import HpcGpuError, SLURMGPUCluster
ELASTIC = {"gpus": "sim:1", "shape": "elastic", "scheduler": "here"}
for options in ({"gpus": "sim:1", "nodes": 5}, {"gpus_per_node": 5}, {"gpus": "sim:1", "queue": "low", "nodes": 3}):
    try:
        SLURMGPUCluster(**options)
    except HpcGpuError as e:
        print(type(e).__name__, str(e).replace(chr(10), " "))
with SLURMGPUCluster(**ELASTIC, queue="low", walltime="2h") as cluster:
    cluster.scale(jobs=3)
    try:
        cluster.wait_for_workers(3)
    except HpcGpuError as e:
        print(type(e).__name__, str(e).replace(chr(10), " "))
"""


def prepare(lab: Lab, code: str, **before: str) -> dict[str, str]:
    """Write a client to the login node, shell text of ours before Slurm's programs; return its environment."""
    lab.exec(lab.login, ["rm", "-rf", "front"], check=True)
    for name in ("sbatch", "scancel"):
        lab.write(f"front/{name}", COUNTED.format(name=name, before=before.get(name, "")))
    lab.exec(lab.login, ["chmod", "+x", "front/sbatch", "front/scancel"], check=True)
    lab.write("script.py", f'{PRELUDE}{textwrap.dedent(code)}\nprint("FACTS", json.dumps(facts))\n')
    path = lab.exec(lab.login, ["printenv", "PATH"], check=True).stdout.strip()
    return {"PATH": f"/home/hpc/front:{path}"}


def client(lab: Lab, code: str, returncode: int = 0, **before: str) -> tuple[dict[str, Any], str]:
    """Run a client; return its facts and its other output."""
    done = lab.exec(lab.login, ["python", "script.py"], env=prepare(lab, code, **before))
    print(done.stdout, done.stderr)
    assert done.returncode == returncode
    text, facts = done.stdout.split("FACTS")
    return json.loads(facts), text + done.stderr


def test_a_refusal_is_raised_by_its_call_and_leaves_nothing(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, queue="no-such-queue") as cluster:
        refused = refusal(lambda: cluster.scale(jobs=8))
        waiting = refusal(lambda: cluster.wait_for_workers(8))
        facts = dict(refused=refused, waiting=waiting, members=members(cluster), queue=queue(), calls=calls("sbatch"))
    """
    facts, _ = client(slurm_lab, code)
    words = "sbatch refused the job: sbatch: error: invalid partition specified: no-such-queue"
    for error in (facts["refused"], facts["waiting"]):
        assert error.startswith(f"SubmitError: {words}")
        assert " --partition=no-such-queue " in error.splitlines()[-1]
    assert (facts["members"], facts["queue"]) == ([], [])
    assert len(facts["calls"]) == 1


def test_a_thousand_jobs_are_one_sbatch_and_one_scancel(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, job_extra_directives=["--begin=now+1hour", "--output=/dev/null"]) as cluster:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))  # of this process alone, which submits
        cluster.scale(jobs=1000)
        queued = queue()
        facts = dict(lost=sorted(set(queued) ^ set(members(cluster))), queued=len(queued), calls=calls("sbatch"))
    facts |= dict(left=queue(), cancels=calls("scancel"))
    """
    facts, _ = client(slurm_lab, code)
    assert (facts["queued"], facts["lost"]) == (1000, [])
    assert len(facts["calls"]) == len(facts["cancels"]) == 1
    assert facts["left"] == []


def test_bursts_of_work_throw_no_place_in_the_queue_away(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, job_extra_directives=["--begin=now+1hour"]) as cluster, Client(cluster) as client:
        cluster.adapt(minimum=0, maximum=20, interval="100ms", wait_count=2, target_duration="1s")
        for burst in range(5):
            futures = client.map(lambda x: time.sleep(60), range(40), pure=False)
            until(lambda: cluster.wanted_workers == 20)
            client.cancel(futures)
            until(lambda: cluster.wanted_workers == 0)
        facts = dict(submitted=len(calls("sbatch")), cancelled=len(calls("scancel")), queued=len(queue()))
    facts |= dict(left=queue())
    """
    facts, _ = client(slurm_lab, code)
    assert facts == {"submitted": 1, "cancelled": 0, "queued": 20, "left": []}


def test_three_jobs_that_die_at_once_are_an_error_with_their_log(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, job_script_prologue=["echo no such module >&2", "exit 3"]) as cluster:
        cluster.scale(jobs=1)
        error = refusal(lambda: cluster.wait_for_workers(1))
        facts = dict(error=error, members=members(cluster), calls=len(calls("sbatch")))
    """
    facts, _ = client(slurm_lab, code)
    assert facts["error"].startswith("JobError: 3 jobs in a row ended before their first worker")
    assert "exit code 3" in facts["error"]
    assert "no such module" in facts["error"]
    assert (facts["members"], facts["calls"]) == ([], 3)


def test_jobs_without_a_way_to_the_scheduler_end_with_addresses(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, death_timeout=4) as cluster:
        cluster.scale(jobs=1)
        error = refusal(lambda: cluster.wait_for_workers(1))
        facts = dict(error=error, members=members(cluster), calls=len(calls("sbatch")), left=queue())
    """
    with slurm_lab.dropped(slurm_lab.login, f"INPUT --syn -s {NETWORK}.8/29 ! --dport 6817"):  # slurmctld's
        facts, _ = client(slurm_lab, code)
    assert facts["error"].startswith("JobError: 3 jobs in a row ended before their first worker")
    assert f"tls://{NETWORK}.2:" in facts["error"], "the log's end says which addresses were tried"
    assert (facts["members"], facts["left"], facts["calls"]) == ([], [], 3)


def limit(lab: Lab, jobs: int) -> None:
    """Let a user have so many jobs submitted. A new limit of slurmdbd's is in slurmctld when sacctmgr returns."""
    lab.root("sacctmgr", "-i", "modify", "qos", "normal", "set", f"MaxSubmitJobsPerUser={jobs}")


def test_jobs_beyond_a_limit_are_submitted_later(accounting_lab: Lab) -> None:
    """And the doctor names a wrong account: a lab with accounts, which takes half a minute, is up for one test."""
    for account, verdict, *words in (
        ("nobody", "failed", "Invalid account", "--account NAME", "sacctmgr show associations"),
        ("project", "ok", "slurm would take the job"),
    ):
        argv = ["python", "-m", "hpcgpu", "doctor", "--json", "--gpus-per-node", "1", "--account", account]
        done = accounting_lab.exec(accounting_lab.login, argv)
        ailing.check(ailing.read(done.stdout), "job request", verdict, *words)
    limit(accounting_lab, 5)
    env = prepare(accounting_lab, "")
    with accounting_lab.client(**env) as client:
        client(f"{PRELUDE}GPUCluster.patience = Patience(refused_s=2.0)")  # 30 s are a long time for a test
        client("cluster = SLURMGPUCluster(**OPTIONS, cores_per_gpu=2); client = Client(cluster)")
        refused = client("refusal(lambda: cluster.scale(jobs=8))")
        accepted, calls = client("members(cluster), len(calls('sbatch'))")
        client("cluster.wait_for_workers(5, timeout=100)")
        limit(accounting_lab, 100)
        client("cluster.wait_for_workers(8, timeout=100)")
        members, queued = client("members(cluster), queue()")
        client("client.close(); cluster.close()")
        assert "QOSMaxSubmitJobPerUserLimit" in client.said
    assert "SubmitError: sbatch refused the job: sbatch: error: QOSMaxSubmitJobPerUserLimit" in refused
    assert (len(accepted), calls) == (5, 4), "8 are too many, 4 are not, then 2, 1"
    assert set(accepted) <= set(members)
    assert len(members) == 8
    assert set(members) == set(queued), "the cluster does not count a job"


@pytest.mark.parametrize(
    ("before", "calls", "words"),
    [(TWICE, 3, TIMED_OUT), (ACCEPTED, 1, TIMED_OUT), (LATE, 2, TIMED_OUT), (HANGS, 1, "no answer in 3 s")],
    ids=["twice", "accepted", "late", "hangs"],
)
def test_a_submission_without_an_answer_makes_no_job_too_many(
    slurm_lab: Lab, before: str, calls: int, words: str
) -> None:
    submission_s = 3.0 if before == HANGS else 60.0
    begin = f"    GPUCluster.patience = Patience({submission_s=}, refused_s=2.0, unlisted_s=5.0)"
    facts, text = client(slurm_lab, begin + ONE, sbatch=before)
    assert facts == {"calls": calls, "sum": 3, "left": []}
    assert words in text


def test_a_dead_clients_jobs_without_an_answer_are_cancelled(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, job_extra_directives=["--begin=now+1hour"]) as cluster:
        cluster.scale(jobs=5)
        import threading
        threading.Thread(target=cluster.scale, kwargs=dict(jobs=8), daemon=True).start()
        facts = dict(queued=until(lambda: queue()[7:]))
        print("FACTS", json.dumps(facts), flush=True)
        os.kill(os.getpid(), 9)
    """
    # the second sbatch has submitted its jobs, and does not come back in time to say so
    hangs = '[ $(wc -l < ~/front/sbatch.calls) -lt 2 ] || { /usr/bin/sbatch "$@" > /dev/null; exec sleep 20; }'
    facts, _ = client(slurm_lab, code, returncode=137, sbatch=hangs)
    assert len(facts["queued"]) == 1
    assert slurm_lab.wait_idle(timeout=scaled(60)) == []


def test_shells_requests_for_each_task_do_not_reach_sbatch(slurm_lab: Lab) -> None:
    """sbatch would refuse the job: 22.05.8 for the cores of a GPU, 24.11.5 and 26.05.5 for --tres-per-task."""
    shell = {"SBATCH_TRES_PER_TASK": "gres/gpu:3", "SBATCH_GPUS_PER_TASK": "3", "SBATCH_CPUS_PER_GPU": "2"}
    argv = ["python", "-m", "hpcgpu", "doctor", "--json", "--gpus-per-node", "1", "--cores-per-gpu", "1"]
    done = slurm_lab.exec(slurm_lab.login, argv, env=shell)
    ailing.check(ailing.read(done.stdout), "job request", "ok", "slurm would take the job")


def test_jobs_that_can_never_run_are_errors_with_the_keyword(slurm_lab: Lab) -> None:
    limits = ["scontrol", "update", "partitionname=low"]
    slurm_lab.root(*limits, "MaxTime=90", "MaxNodes=2")
    try:
        done = slurm_lab.python(CODE)
    finally:
        slurm_lab.root(*limits, "MaxTime=UNLIMITED", "MaxNodes=UNLIMITED")
    more, refused, limited, long = done.stdout.splitlines()
    # PartitionNodeLimit, or PartitionConfig when Slurm has looked at it once (22.05.8); of the time limit likewise
    pending = r"JobError job .* will not start: PENDING \(Partition\w+: nodes=5, but queue main has 4\)"
    refused_at_once = "SubmitError sbatch refused the job: .* nodes=5, but queue main has 4$"  # by 24.11.5
    assert re.match(f"{pending}|{refused_at_once}", more)
    assert refused.startswith("SubmitError sbatch refused the job: ")
    assert refused.endswith("gpus_per_node=5, but the nodes of queue main have 4 at most")
    assert "nodes=3, but queue low gives a job 2 at most" in limited
    assert long.startswith("JobError 3 jobs in a row ended before their first worker; the last was job ")
    assert "PENDING, Partition" in long
    assert ": walltime='02:00:00', but queue low has a limit of 01:30:00" in long

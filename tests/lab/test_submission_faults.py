"""Submissions that go wrong on a real Slurm: refused, answered late or not at all, too many, of jobs that die."""

from __future__ import annotations

import json
import textwrap
from itertools import takewhile
from typing import Any

import pytest
from lab import NETWORK, PATIENCE_S, Lab
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

def until(what):
    end = time.monotonic() + 100
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.1)
    return found

def refusal(what):
    start = time.monotonic()
    try:
        what()
    except HpcGpuError as e:
        return dict(kind=type(e).__name__, words=str(e), after_s=time.monotonic() - start)
    return None

"""


def prepare(lab: Lab, code: str, **before: str) -> dict[str, str]:
    """Write a client to the login node, shell text of ours before Slurm's programs; return its environment."""
    lab.exec(lab.login, ["rm", "-rf", "front"], check=True)
    for name in ("sbatch", "scancel"):
        lab.write(f"front/{name}", COUNTED.format(name=name, before=before.get(name, "")))
    lab.exec(lab.login, ["chmod", "+x", "front/sbatch", "front/scancel"], check=True)
    lab.write("client.py", f'{PRELUDE}{textwrap.dedent(code)}\nprint("FACTS", json.dumps(facts))\n')
    path = lab.exec(lab.login, ["printenv", "PATH"], check=True).stdout.strip()
    return {"PATH": f"/home/hpc/front:{path}"}


def read(stdout: str, stderr: str) -> tuple[dict[str, Any], str]:
    """Return the client's facts and its words."""
    print(stdout, stderr)
    said, facts = stdout.split("FACTS")
    return json.loads(facts), said + stderr


def client(lab: Lab, code: str, returncode: int = 0, **before: str) -> tuple[dict[str, Any], str]:
    env = prepare(lab, code, **before)
    done = lab.exec(lab.login, ["python", "client.py"], env=env)
    assert done.returncode == returncode, done.stdout + done.stderr
    return read(done.stdout, done.stderr)


def test_a_refusal_is_raised_by_the_call_that_caused_it_and_leaves_nothing(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, queue="no-such-queue") as cluster:
        refused = refusal(lambda: cluster.scale(jobs=8))
        waiting = refusal(lambda: cluster.wait_for_workers(8))
        facts = dict(refused=refused, waiting=waiting, members=members(cluster), queue=queue(), calls=calls("sbatch"))
    """
    facts, _ = client(slurm_lab, code)
    words = "sbatch refused the job: sbatch: error: invalid partition specified: no-such-queue"
    for error in (facts["refused"], facts["waiting"]):
        assert error["kind"] == "SubmitError"
        assert words in error["words"]
        assert " --partition=no-such-queue " in error["words"].splitlines()[-1]
    assert (facts["members"], facts["queue"]) == ([], [])
    assert len(facts["calls"]) == 1


def test_a_thousand_jobs_are_one_sbatch_and_one_scancel_with_256_open_files(slurm_lab: Lab) -> None:
    code = """
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with SLURMGPUCluster(**OPTIONS, job_extra_directives=["--begin=now+1hour", "--output=/dev/null"]) as cluster:
        cpu_s, start = time.process_time(), time.monotonic()
        cluster.scale(jobs=1000)
        own = dict(cpu_s=time.process_time() - cpu_s, wall_s=time.monotonic() - start)
        there = sorted(queue())
        facts = dict(own=own, lost=sorted(set(there) ^ set(members(cluster))), queued=len(there), calls=calls("sbatch"))
    facts |= dict(left=queue(), cancels=calls("scancel"))
    """
    facts, _ = client(slurm_lab, code)
    print(f"scale(jobs=1000): {facts['own']['cpu_s'] * 1e3:.0f} ms of own CPU time, lost: {facts['lost'] or 'nothing'}")
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


def test_jobs_that_die_at_once_are_three_and_then_an_error_with_their_log(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, job_script_prologue=["echo no such module >&2", "exit 3"]) as cluster:
        cluster.scale(jobs=1)
        error = refusal(lambda: cluster.wait_for_workers(1))
        facts = dict(error=error, members=members(cluster), calls=len(calls("sbatch")))
    """
    facts, _ = client(slurm_lab, code)
    assert facts["error"]["kind"] == "JobError"
    assert "3 jobs in a row ended before their first worker" in facts["error"]["words"]
    assert "exit code 3" in facts["error"]["words"]
    assert "no such module" in facts["error"]["words"]
    assert (facts["members"], facts["calls"]) == ([], 3)


def test_jobs_that_cannot_reach_the_scheduler_say_where_they_looked_and_end(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, death_timeout=4) as cluster:
        cluster.scale(jobs=1)
        error = refusal(lambda: cluster.wait_for_workers(1))
        facts = dict(error=error, members=members(cluster), calls=len(calls("sbatch")), left=queue())
    """
    # only slurmctld's port may be reached from the compute nodes
    closed = ["INPUT", "-p", "tcp", "--syn", "-s", f"{NETWORK}.8/29", "!", "--dport", "6817", "-j", "DROP"]
    slurm_lab.exec(slurm_lab.login, ["iptables", "-A", *closed], user="root", check=True)
    try:
        facts, _ = client(slurm_lab, code)
    finally:
        slurm_lab.exec(slurm_lab.login, ["iptables", "-D", *closed], user="root", check=True)
    error = facts["error"]
    assert error["kind"] == "JobError"
    assert "3 jobs in a row ended before their first worker" in error["words"]
    assert f"tls://{NETWORK}.2:" in error["words"], "the log's end says which addresses were tried"
    assert (facts["members"], facts["left"], facts["calls"]) == ([], [], 3)


def limit(lab: Lab, jobs: int) -> None:
    """Let a user have so many jobs submitted. A new limit of slurmdbd's is in slurmctld when sacctmgr returns."""
    argv = ["sacctmgr", "-i", "modify", "qos", "normal", "set", f"MaxSubmitJobsPerUser={jobs}"]
    lab.exec(lab.login, argv, user="root", check=True)


def test_of_jobs_beyond_a_limit_as_many_are_submitted_as_it_takes_and_the_others_later(accounting_lab: Lab) -> None:
    code = """
    GPUCluster.patience = Patience(refused_s=2.0)  # 30 s are a long time for a test
    with SLURMGPUCluster(**OPTIONS, cores_per_gpu=2) as cluster, Client(cluster) as client:
        refused = refusal(lambda: cluster.scale(jobs=8))
        accepted, asked = members(cluster), len(calls("sbatch"))
        cluster.wait_for_workers(5, timeout=100)
        print("LIMIT", flush=True)
        cluster.wait_for_workers(8, timeout=100)
        facts = dict(refused=refused, accepted=accepted, asked=asked, members=members(cluster), there=queue())
    """
    limit(accounting_lab, 5)
    env = prepare(accounting_lab, code)
    process = accounting_lab.start(accounting_lab.login, ["python", "client.py"], env=env)
    assert process.stdout
    before = list(takewhile(lambda line: line != "LIMIT\n", iter(process.stdout.readline, "")))
    limit(accounting_lab, 100)
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, "".join(before) + stdout + stderr
    facts, said = read("".join(before) + stdout, stderr)
    assert facts["refused"]["kind"] == "SubmitError"
    assert "sbatch refused the job: sbatch: error: QOSMaxSubmitJobPerUserLimit" in facts["refused"]["words"]
    assert (len(facts["accepted"]), facts["asked"]) == (5, 4), "8 are too many, 4 are not, then 2, 1"
    assert set(facts["accepted"]) <= set(facts["members"])
    assert len(facts["members"]) == 8
    assert set(facts["members"]) == set(facts["there"]), "a job that nobody counts"
    assert "QOSMaxSubmitJobPerUserLimit" in said


TIMED_OUT = "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"
TWICE = f"""
[ $(wc -l < ~/front/sbatch.calls) -gt 2 ] || {{ echo '{TIMED_OUT}' >&2; exit 1; }}
"""
ACCEPTED = f"""
[ $(wc -l < ~/front/sbatch.calls) -gt 1 ] || {{ /usr/bin/sbatch "$@" > /dev/null; echo '{TIMED_OUT}' >&2; exit 1; }}
"""
# accepted only when somebody has looked for it already and submitted again
LATE = f"""
[ $(wc -l < ~/front/sbatch.calls) -gt 1 ] || {{
  cp /dev/stdin ~/front/late
  (until [ $(wc -l < ~/front/sbatch.calls) -gt 1 ]; do sleep 0.1; done; /usr/bin/sbatch "$@" ~/front/late
   touch ~/front/late.there) > /dev/null 2>&1 &
  echo '{TIMED_OUT}' >&2; exit 1
}}
"""
ONE = """
    late, there = Path.home() / "front" / "late", Path.home() / "front" / "late.there"
    with SLURMGPUCluster(**OPTIONS) as cluster, Client(cluster) as client:
        cluster.scale(jobs=2)
        cluster.wait_for_workers(2, timeout=100)
        until(lambda: there.exists() or not late.exists())
        until(lambda: sorted(queue()) == sorted(members(cluster)) and len(members(cluster)) == 2)
        facts = dict(calls=len(calls("sbatch")), sum=client.submit(sum, [1, 2]).result())
    facts |= dict(left=queue())
"""


@pytest.mark.parametrize(("before", "calls"), [(TWICE, 3), (ACCEPTED, 1), (LATE, 2)], ids=["twice", "accepted", "late"])
def test_a_submission_whose_answer_timed_out_makes_no_job_too_many(slurm_lab: Lab, before: str, calls: int) -> None:
    facts, said = client(slurm_lab, ONE, sbatch=before)
    assert facts == {"calls": calls, "sum": 3, "left": []}
    assert "Socket timed out on send/recv operation" in said


def test_an_sbatch_that_hangs_is_ended_and_its_job_is_found(slurm_lab: Lab) -> None:
    code = """
    GPUCluster.patience = Patience(submission_s=3.0)  # 60 s are long for a test
    """
    facts, said = client(slurm_lab, code + ONE, sbatch='/usr/bin/sbatch "$@" > /dev/null; sleep 600')
    assert facts == {"calls": 1, "sum": 3, "left": []}
    assert "sbatch: no answer in 3 s; it was killed" in said


def test_a_dead_clients_pending_jobs_are_cancelled_also_those_it_was_not_told_of(slurm_lab: Lab) -> None:
    code = """
    with SLURMGPUCluster(**OPTIONS, job_extra_directives=["--begin=now+1hour"]) as cluster:
        cluster.scale(jobs=5)
        import threading
        threading.Thread(target=cluster.scale, kwargs=dict(jobs=8), daemon=True).start()
        facts = dict(there=until(lambda: queue()[7:]))
        print("FACTS", json.dumps(facts), flush=True)
        os.kill(os.getpid(), 9)
    """
    # the second sbatch has submitted its jobs, and does not come back in time to say so
    hangs = '[ $(wc -l < ~/front/sbatch.calls) -lt 2 ] || { /usr/bin/sbatch "$@" > /dev/null; exec sleep 20; }'
    facts, _ = client(slurm_lab, code, returncode=137, sbatch=hangs)
    assert len(facts["there"]) == 1
    assert slurm_lab.wait_idle(timeout=scaled(60)) == []

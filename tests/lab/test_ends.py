"""The exit codes of jobs are those of their scripts, and no success where something was killed."""

import pytest
from lab import CHECKOUT, Lab
from waiting import scaled, until

SCRIPT = """
import os, signal, sys, time
from distributed import Client
with Client() as client:
    assert client.submit(sum, [1, 2]).result() == 3
if sys.argv[1] == "wait":
    open("up", "w").close()
    time.sleep(600)
end = int(sys.argv[1])
os.kill(os.getpid(), -end) if end < 0 else sys.exit(end)
"""
ELASTIC = """
import time
from concurrent.futures import ThreadPoolExecutor
from distributed import as_completed, wait

class Held:
    def __reduce__(self):
        time.sleep(600)

def feature(i):
    time.sleep(1)

cluster = SLURMGPUCluster(gpus="sim:2", shape="elastic", walltime="00:01:00", dashboard=False)
client, pool = Client(cluster), ThreadPoolExecutor()
one, other = client.nthreads()
held, features = client.submit(Held, workers=[one]), client.map(feature, range(240), workers=[other])
wait(held)
calls = (lambda: [f.result() for f in as_completed(features)], held.result, lambda: client.gather([*features, held]))
waits = [pool.submit(call) for call in calls]
"""


def test_templates_without_output_end_as_their_script(slurm_lab: Lab) -> None:
    slurm_lab.write("ends/script.py", SCRIPT)
    template = f"{CHECKOUT}/jobscripts/slurm.sbatch"
    codes = {"0": "0:0", "3": "3:0", "-9": "137:0"}
    sbatch = ["sbatch", "--parsable", "--chdir=ends", "--output=/dev/full", "-N1", "--ntasks-per-node=1"]
    argv = [*sbatch, "--gpus-per-node=1", template, "--gpus", "sim:1", "script.py"]
    jobs = {code: slurm_lab.exec(slurm_lab.login, [*argv, code], check=True).stdout.strip() for code in codes}
    ended = {code: slurm_lab.wait_job(job)["ExitCode"] for code, job in jobs.items()}
    assert ended == codes


def test_a_killed_daemon_is_no_success(slurm_lab: Lab) -> None:
    """The launcher is on the login node, rank 0 on another: what both share is the home."""
    slurm_lab.write("ends/script.py", SCRIPT)
    job = ["salloc", "--quiet", "--chdir=ends", "-N2", "-w", "node1,node2", "--ntasks-per-node=1", "--gpus-per-node=1"]
    job += ["hpcgpu", "launch", "--gpus", "sim:1", "script.py"]
    slurm_lab.exec(slurm_lab.login, ["rm", "-f", "ends/up"])
    assert slurm_lab.exec(slurm_lab.login, [*job, "3"]).returncode == 3

    def folders() -> set[str]:
        return set(slurm_lab.exec(slurm_lab.login, ["ls", "-A", ".hpcgpu/launches"], check=True).stdout.split())

    def runs() -> bool:
        return slurm_lab.exec(slurm_lab.login, ["test", "-e", "ends/up"]).returncode == 0

    before = folders()  # of launches that other tests have killed
    launch = slurm_lab.start(slurm_lab.login, [*job, "wait"], timeout=scaled(150))
    until(runs, "the script runs", limit_s=120, every_s=0.5)
    slurm_lab.root("pkill", "-KILL", "slurmstepd", container="node1")
    _, err = launch.communicate(timeout=scaled(150))
    assert launch.returncode not in (0, 124), err
    # salloc does not wait for what it has started
    until(lambda: folders() <= before, f"its folder is gone, as it was before: {before}", limit_s=60)


def test_a_killed_scheduler_is_no_success_of_its_job(slurm_lab: Lab) -> None:
    with slurm_lab.client() as client:
        client("import contextlib")
        places = {}
        for shape in ("gang", "elastic"):
            client(f"{shape} = SLURMGPUCluster(gpus='sim:1', shape={shape!r}, dashboard=False)")
            client(f"client = Client({shape})")
            place = client("client.run_on_scheduler(lambda: (os.uname().nodename, os.getpid()))")
            places[client(f"{shape}.job_id")] = place
            client("client.close()")
        for node, pid in places.values():
            slurm_lab.exec(node, ["kill", "-KILL", str(pid)], check=True)
        assert {job: slurm_lab.wait_job(job)["ExitCode"] for job in places} == dict.fromkeys(places, "70:0")
        for shape in ("gang", "elastic"):
            client(f"with contextlib.suppress(Exception): {shape}.close()")


@pytest.mark.timeout(300)
def test_first_job_ends_waits_with_the_word_of_its_walltime(slurm_lab: Lab) -> None:
    """A client waits for tasks, for a value that a worker does not give any more, and for both."""
    with slurm_lab.client() as client:
        client(ELASTIC)
        job = client("cluster.job_id")
        assert f"the cluster ends with job {job}, its first, 00:01:00 after that began" in client.said
        over = "JobError: the job ended: it got SIGTERM: its walltime is over; with scheduler='here' a cluster outlives"
        errors = client("[f'{type(e).__name__}: {e}' for each in waits for e in [each.exception()]]")
        assert [error[: len(over)] for error in errors] == [over] * 3
        assert slurm_lab.wait_job(job)["JobState"] == "TIMEOUT"
        client("client.close(); cluster.close()")

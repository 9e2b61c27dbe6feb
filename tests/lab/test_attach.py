"""Clusters that outlive their client: detached, attached, listed, stopped; requeued, suspended, cut off."""

from __future__ import annotations

import subprocess
import textwrap
from collections.abc import Iterator

import pytest
from lab import NETWORK, PATIENCE_S, Lab

START = "import os, sys, time\nfrom distributed import Client\nfrom hpcgpu import SLURMGPUCluster\n"


def python(lab: Lab, code: str, container: str = Lab.login, check: bool = True) -> str:
    """Run a script, on the login node or another one, and return all that it printed."""
    lab.write("script.py", START + textwrap.dedent(code))
    done = lab.exec(container, ["python", "-u", "script.py"])
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def hpcgpu(lab: Lab, *words: str, check: bool = True) -> str:
    done = lab.exec(lab.login, ["python", "-m", "hpcgpu", *words])
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def folders(lab: Lab) -> list[str]:
    return lab.exec(lab.login, ["ls", ".hpcgpu/runs"], check=True).stdout.split()


@pytest.fixture(autouse=True)
def no_runs(slurm_lab: Lab) -> None:
    """A test that failed may have left a folder: its guard was killed with everything else."""
    slurm_lab.exec(slurm_lab.login, ["sh", "-c", "rm -rf .hpcgpu/runs; mkdir -m 700 -p .hpcgpu/runs"], check=True)


class Background:
    """A script that runs on and is told to go on by a line on its stdin; all that it says comes on its stdout."""

    def __init__(self, lab: Lab, code: str) -> None:
        lab.write("background.py", f"{START}sys.stderr = sys.stdout\n{textwrap.dedent(code)}")
        self.process: subprocess.Popen[str] = lab.start(lab.login, ["python", "-u", "background.py"], PATIENCE_S)
        self.said = ""

    def until(self, word: str) -> str:
        """Return the line with the word."""
        assert self.process.stdout
        for line in self.process.stdout:
            self.said += line
            if word in line:
                return line
        raise AssertionError(f"no {word!r} in {self.said}{self.process.communicate()[1]}")

    def go_on(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> str:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        assert self.process.returncode == 0, self.said + out + err
        return self.said + out + err


DETACH = """
    cluster = SLURMGPUCluster(nodes=1, gpus="sim:2", client_grace=3, job_name="mine", dashboard=False)
    with Client(cluster) as client:
        client.publish_dataset(kept=client.submit(sum, [1, 2], key="kept"))
        client.datasets["kept"].result()
    cluster.detach()
    print("JOB", cluster.job_id, cluster.status.name)
"""


@pytest.fixture
def detached(slurm_lab: Lab) -> Iterator[str]:
    """The id of a job whose client is gone for good."""
    said = python(slurm_lab, DETACH)
    job = said.split("JOB ")[1].split()[0]
    yield job
    if folders(slurm_lab):
        hpcgpu(slurm_lab, "stop", job, check=False)  # its guard may be quicker


def outlives_the_grace(lab: Lab, job: str) -> None:
    """Wait longer than a job without a lease would live, and see that it runs."""
    ran = "scontrol show job -o " + job + " | grep -o 'RunTime=[0-9:]*'"
    before = lab.exec(lab.login, ["sh", "-c", ran]).stdout
    lab.exec(lab.login, ["sleep", "12"])
    assert lab.job(job)["JobState"] == "RUNNING", before


def test_a_detached_cluster_is_there_for_another_node(slurm_lab: Lab, detached: str) -> None:
    outlives_the_grace(slurm_lab, detached)
    code = """
    with SLURMGPUCluster.attach("mine") as cluster, Client(cluster) as client:
        print("KEPT", client.datasets["kept"].result(), cluster.job_id, len(client.scheduler_info()["workers"]))
        print("SETTINGS", cluster.settings.job_name, cluster.settings.client_grace_s)
    """
    said = python(slurm_lab, code, container="node4")
    assert f"KEPT 3 {detached} 2" in said
    assert "SETTINGS mine 3.0" in said
    outlives_the_grace(slurm_lab, detached)  # closing it has left it as it was
    seen = hpcgpu(slurm_lab, "ps")
    assert [w for w in ("mine", "gang", detached, "UP 2/2", "detached") if w not in seen] == []
    assert "2 workers on 1 node ready" in hpcgpu(slurm_lab, "logs", "mine", "--lines", "5")
    assert f"mine has ended (jobs {detached})" in hpcgpu(slurm_lab, "stop", "mine")
    assert slurm_lab.job(detached)["JobState"] == "COMPLETED"  # by a goodbye, not by scancel
    assert folders(slurm_lab) == []


TAKE = "SLURMGPUCluster.attach('mine', shutdown_on_close=True)"
USE = "with Client(cluster) as client:\n    print('SUM', client.submit(sum, [1, 2]).result())\n"
DIE = "os.kill(os.getpid(), 9)\n"


@pytest.mark.parametrize(
    ("code", "dies"),
    [
        (f"cluster = {TAKE}\n{USE}cluster.close()", False),
        (f"cluster = {TAKE}\n{DIE}", True),
        ("SLURMGPUCluster.attach('mine').shutdown()", False),
    ],
    ids=["taken over and closed", "taken over and killed", "shut down"],
)
def test_attached_object_ends_the_job(slurm_lab: Lab, detached: str, code: str, dies: bool) -> None:
    python(slurm_lab, code, check=not dies)
    if dies:
        slurm_lab.wait_job(detached)
        return
    assert slurm_lab.job(detached)["JobState"] == "COMPLETED"
    assert folders(slurm_lab) == []


def test_attached_object_that_dies_leaves_the_job(slurm_lab: Lab, detached: str) -> None:
    python(slurm_lab, f"cluster = SLURMGPUCluster.attach({detached!r})\n{DIE}", check=False)
    outlives_the_grace(slurm_lab, detached)


def test_asynchronous(slurm_lab: Lab) -> None:
    code = """
    import asyncio
    async def main():
        async with SLURMGPUCluster(gpus="sim:1", asynchronous=True, dashboard=False) as cluster:
            await cluster.detach()
        async with SLURMGPUCluster.attach("hpcgpu", asynchronous=True, shutdown_on_close=True) as cluster:
            async with Client(cluster, asynchronous=True) as client:
                print("SUM", await client.submit(sum, [1, 2]))
    asyncio.run(main())
    """
    assert "SUM 3" in python(slurm_lab, code)
    assert folders(slurm_lab) == []


def test_pending_jobs_are_detached_and_attached(slurm_lab: Lab) -> None:
    later = slurm_lab.submit("#!/bin/bash\nsleep 600\n", "-N4", "--exclusive")
    slurm_lab.wait_job(later, {"RUNNING"})
    code = """
    import asyncio
    from hpcgpu.errors import JobError
    async def main():
        cluster = SLURMGPUCluster(gpus="sim:1", job_name="late", client_grace=3, asynchronous=True)
        async def start():
            await cluster
        starting = asyncio.create_task(start())
        async with asyncio.timeout(60):
            while not cluster.job_id and not starting.done():
                await asyncio.sleep(0.05)
        await cluster.detach()
        try:
            await starting
        except JobError as e:
            print("SAID", e)
    asyncio.run(main())
    """
    assert "was detached before its workers were there" in python(slurm_lab, code)
    waiting = Background(
        slurm_lab,
        """
        with SLURMGPUCluster.attach("late", shutdown_on_close=True) as cluster, Client(cluster) as client:
            print("SUM", client.submit(sum, [1, 2]).result())
        """,
    )
    waiting.until("PENDING")
    slurm_lab.exec(slurm_lab.login, ["scancel", later], check=True)
    waiting.until("SUM 3")
    waiting.end()


def test_errors_for_people(slurm_lab: Lab, detached: str) -> None:
    assert f"there is no run 'other'; there are: mine (job {detached}," in hpcgpu(
        slurm_lab, "stop", "other", check=False
    )
    code = f"""
    from hpcgpu import PBSGPUCluster
    from hpcgpu.errors import HpcGpuError
    for attach in (PBSGPUCluster.attach, SLURMGPUCluster.attach):
        try:
            attach("mine")
        except HpcGpuError as e:
            print(type(e).__name__, e)
        os.system("scancel {detached}")
        end = time.monotonic() + 60
        while "JobState=CANCELLED" not in os.popen("scontrol show job {detached}").read():
            assert time.monotonic() < end
            time.sleep(0.1)
    """
    said = python(slurm_lab, code)
    assert "ConfigError mine is a run of slurm; PBSGPUCluster is for pbs" in said
    assert f"JobError job {detached} has ended: CANCELLED" in said
    cleaned = hpcgpu(slurm_lab, "ps")
    assert "run mine has ended and its client is gone" in cleaned
    assert "no clusters" in cleaned
    assert folders(slurm_lab) == []


TAMPER = """
    import json, pathlib
    from hpcgpu.deploy.network.tls import Certificate
    from hpcgpu.errors import TrustError
    path, = pathlib.Path(".hpcgpu/runs").glob("*/scheduler")
    right = json.loads(path.read_text())
    wrong = Certificate.make()
    cases = {"other": {"cert": wrong.cert_pem, "key": wrong.key_pem}, "mixed": {"key": wrong.key_pem},
             "nonce": {"nonce": "of another run"}, "cut": None}
    for case, change in cases.items():
        path.write_text(json.dumps(right | change) if change else json.dumps(right)[:40])
        try:
            SLURMGPUCluster.attach("mine")
        except TrustError as e:
            print("CASE", case, e)
            assert not any(key.splitlines()[1] in str(e) for key in (right["key"], wrong.key_pem))
    path.write_text(json.dumps(right))
    with SLURMGPUCluster.attach("mine") as cluster, Client(cluster) as client:
        print("KEPT", client.datasets["kept"].result())
"""


def test_who_attaches_with_a_wrong_certificate_hears_why_at_once(slurm_lab: Lab, detached: str) -> None:
    """And no other way to the scheduler is tried, which would take srun and seconds; the cluster lives on."""
    said = python(slurm_lab, TAMPER)
    cases = dict(line.removeprefix("CASE ").split(maxsplit=1) for line in said.splitlines() if line.startswith("CASE"))
    assert "the certificates do not belong together" in cases["other"]
    assert "nor through" not in cases["other"]
    assert "cannot be used: [X509: KEY_VALUES_MISMATCH]" in cases["mixed"]
    assert "its nonce is another one" in cases["nonce"]
    assert "scheduler is damaged" in cases["cut"]
    assert "KEPT 3" in said


OWN = """
    with SLURMGPUCluster(nodes=1, gpus="sim:2", client_grace=GRACE) as cluster:
        client = Client(cluster)
        print("JOB", cluster.job_id, client.submit(sum, [1, 2]).result())
        sys.stdin.readline()
        if client.status != "running":
            client = Client(cluster)
        print("AGAIN", client.submit(sum, [3, 4]).result(), len(client.scheduler_info()["workers"]))
        client.close()
"""


def test_a_client_that_lost_its_network_for_20_s_finds_its_cluster_again(slurm_lab: Lab) -> None:
    mine = Background(slurm_lab, OWN.replace("GRACE", "30"))
    job = mine.until("JOB").split()[1]
    node = slurm_lab.job(job)["NodeList"]
    cut = ["OUTPUT", "-d", f"{NETWORK}.1{node.removeprefix('node')}", "-p", "tcp", "!", "--dport", "6818", "-j", "DROP"]
    slurm_lab.exec(slurm_lab.login, ["iptables", "-A", *cut], user="root", check=True)
    slurm_lab.exec(slurm_lab.login, ["sleep", "20"])
    counted = slurm_lab.exec(slurm_lab.login, ["iptables", "-nvxL", "OUTPUT"], user="root", check=True).stdout
    assert int(counted.splitlines()[2].split()[0]) > 0  # packets that did not come through
    slurm_lab.exec(slurm_lab.login, ["iptables", "-D", *cut], user="root", check=True)
    mine.go_on()
    assert "AGAIN 7 2" in mine.until("AGAIN")
    mine.end()


def test_a_requeued_job_gives_the_cluster_back(slurm_lab: Lab) -> None:
    mine = Background(slurm_lab, textwrap.dedent(OWN).replace("GRACE", "30"))
    job = mine.until("JOB").split()[1]
    slurm_lab.exec(slurm_lab.login, ["scontrol", "requeue", job], user="root", check=True)
    slurm_lab.wait_job(job, {"PENDING"})
    slurm_lab.exec(slurm_lab.login, ["scontrol", "update", f"JobId={job}", "StartTime=now"], user="root", check=True)
    line = mine.until("was requeued")
    assert f"job {job} was requeued; its results are lost, the cluster is back" in line
    mine.until("dashboard: cat ")  # its secret is another one
    mine.go_on()
    assert "AGAIN 7 2" in mine.until("AGAIN")
    mine.end()


def test_a_suspended_job_is_said_and_not_lost(slurm_lab: Lab) -> None:
    mine = Background(slurm_lab, textwrap.dedent(OWN).replace("GRACE", "4"))
    job = mine.until("JOB").split()[1]
    slurm_lab.exec(slurm_lab.login, ["scontrol", "suspend", job], user="root", check=True)
    mine.until("SUSPENDED")
    slurm_lab.exec(slurm_lab.login, ["scontrol", "resume", job], user="root", check=True)
    mine.until("the cluster is back")
    mine.go_on()
    assert "AGAIN 7 2" in mine.until("AGAIN "), mine.end()
    assert "lost" not in mine.end()


def test_logs_are_followed_until_the_job_ends(slurm_lab: Lab, detached: str) -> None:
    following = slurm_lab.start(slurm_lab.login, ["python", "-m", "hpcgpu", "logs", "-f", "mine"])
    assert following.stdout
    assert any("2 workers on 1 node ready" in line for line in following.stdout)
    hpcgpu(slurm_lab, "stop", detached)
    rest, _ = following.communicate(timeout=PATIENCE_S)
    assert "the job ends: the client said goodbye" in rest
    assert following.returncode == 0
    assert folders(slurm_lab) == []

"""Clusters that outlive their client: detached, attached, listed, stopped; requeued, suspended, cut off."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from clients import Client
from lab import NETWORK, PATIENCE_S, Lab
from waiting import until

START = "import os, sys, time\nfrom distributed import Client\nfrom hpcgpu import SLURMGPUCluster\n"
DETACH = """
    cluster = SLURMGPUCluster(nodes=1, gpus="sim:2", client_grace=3, job_name="mine", dashboard=False)
    with Client(cluster) as client:
        client.publish_dataset(kept=client.submit(sum, [1, 2], key="kept"))
        client.datasets["kept"].result()
    cluster.detach()
    print("JOB", cluster.job_id, cluster.status.name)
"""
TAMPER = """
    import json, pathlib
    from hpcgpu.deploy.network.scheduler_file import Certificate
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
    cluster = SLURMGPUCluster.attach("mine")
    with Client(cluster) as client:
        print("KEPT", client.datasets["kept"].result())
    cluster.shutdown()
"""


def python(lab: Lab, code: str, **options: object) -> str:
    """Run a script, and return all that it printed."""
    done = lab.python(START + textwrap.dedent(code), **options)
    return done.stdout + done.stderr


def hpcgpu(lab: Lab, *words: str, check: bool = True) -> str:
    done = lab.exec(lab.login, ["python", "-m", "hpcgpu", *words], check=check)
    return done.stdout + done.stderr


@pytest.fixture(autouse=True)
def no_runs(slurm_lab: Lab) -> None:
    slurm_lab.forget_runs()


@pytest.fixture
def detached(slurm_lab: Lab) -> Iterator[str]:
    """The id of a job whose client is gone for good."""
    job = python(slurm_lab, DETACH).split("JOB ")[1].split()[0]
    yield job
    if slurm_lab.runs():
        hpcgpu(slurm_lab, "stop", job, check=False)  # its guard may be quicker


def outlives_the_grace(lab: Lab, job: str) -> None:
    """Wait longer than a job without a lease would live, and see that it runs."""
    lab.exec(lab.login, ["sleep", "12"])
    assert lab.job(job)["JobState"] == "RUNNING"


def test_a_detached_cluster_is_there_for_another_node(slurm_lab: Lab, detached: str) -> None:
    """Also after an attached object was killed. Its log is followed until ``stop`` ends it."""
    python(slurm_lab, f"SLURMGPUCluster.attach({detached!r})\nos.kill(os.getpid(), 9)", check=False)
    outlives_the_grace(slurm_lab, detached)
    code = """
    with SLURMGPUCluster.attach("mine") as cluster, Client(cluster) as client:
        print("KEPT", client.datasets["kept"].result(), cluster.job_id, len(client.scheduler_info()["workers"]))
        print("SETTINGS", cluster.settings.job_name, cluster.settings.client_grace_s)
    """
    text = python(slurm_lab, code, container="node4")
    assert f"KEPT 3 {detached} 2" in text
    assert "SETTINGS mine 3.0" in text
    outlives_the_grace(slurm_lab, detached)  # closing it has left it as it was
    table = hpcgpu(slurm_lab, "ps")
    assert [w for w in ("mine", "gang", detached, "UP 2/2", "detached") if w not in table] == []
    following = slurm_lab.start(slurm_lab.login, ["python", "-m", "hpcgpu", "logs", "-f", "mine"])
    assert any("2 workers on 1 node ready" in line for line in following.stdout)
    assert f"mine has ended (jobs {detached})" in hpcgpu(slurm_lab, "stop", "mine")
    assert "the job ends: the client said goodbye" in following.communicate(timeout=PATIENCE_S)[0]
    assert following.returncode == 0
    assert slurm_lab.job(detached)["JobState"] == "COMPLETED"  # by a goodbye, not by scancel
    assert slurm_lab.runs() == []


def test_a_killed_object_that_took_a_cluster_over_ends_it(slurm_lab: Lab, detached: str) -> None:
    code = f"SLURMGPUCluster.attach({detached!r}, take_over=True)\nos.kill(os.getpid(), 9)"
    python(slurm_lab, code, check=False)
    slurm_lab.wait_job(detached)


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
            print("ERROR", e)
    asyncio.run(main())
    """
    assert "was detached before its workers were there" in python(slurm_lab, code)
    code = """
    import asyncio
    async def main():
        async with SLURMGPUCluster.attach("late", asynchronous=True, take_over=True) as cluster:
            async with Client(cluster, asynchronous=True) as client:
                print("SUM", await client.submit(sum, [1, 2]))
    asyncio.run(main())
    """
    with slurm_lab.client() as client:
        client.send(code)
        until(lambda: "PENDING" in client.said, "it is said that the job waits", limit_s=240)
        slurm_lab.exec(slurm_lab.login, ["scancel", later], check=True)
        client.answer()
        assert "SUM 3" in client.said
    assert slurm_lab.runs() == []


def test_attach_to_an_ended_or_foreign_run_is_an_error(slurm_lab: Lab, detached: str) -> None:
    names = hpcgpu(slurm_lab, "stop", "other", check=False)
    assert f"there is no run 'other'; there are: mine (job {detached}," in names
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
    text = python(slurm_lab, code)
    assert "ConfigError mine is a run of slurm; PBSGPUCluster is for pbs" in text
    assert f"JobError job {detached} has ended: CANCELLED" in text
    cleaned = hpcgpu(slurm_lab, "ps")
    assert "run mine has ended and its owner is gone" in cleaned
    assert "no clusters" in cleaned
    assert slurm_lab.runs() == []


def test_who_attaches_with_a_wrong_certificate_hears_why_at_once(slurm_lab: Lab, detached: str) -> None:
    """No other way to the scheduler, by srun and seconds, is tried; the cluster lives on until ``shutdown``."""
    text = python(slurm_lab, TAMPER)
    cases = dict(line.removeprefix("CASE ").split(maxsplit=1) for line in text.splitlines() if line.startswith("CASE"))
    assert "the certificates do not belong together" in cases["other"]
    assert "nor through" not in cases["other"]
    assert "cannot be used: [X509: KEY_VALUES_MISMATCH]" in cases["mixed"]
    assert "its nonce is another one" in cases["nonce"]
    assert "scheduler is damaged" in cases["cut"]
    assert "KEPT 3" in text
    assert slurm_lab.job(detached)["JobState"] == "COMPLETED"
    assert slurm_lab.runs() == []


@contextmanager
def owner(lab: Lab, grace_s: int = 30) -> Iterator[tuple[Client, str]]:
    """A client with a cluster, and the id of its job; at the end both are as they were."""
    with lab.client() as client:
        client(f'cluster = SLURMGPUCluster(nodes=1, gpus="sim:2", client_grace={grace_s}); client = Client(cluster)')
        assert client("client.submit(sum, [1, 2]).result()") == 3
        yield client, client("cluster.job_id")
        assert_works(client)
        client("client.close(); cluster.close()")


def assert_works(client: Client) -> None:
    client("client = client if client.status == 'running' else Client(cluster)")
    assert client("client.submit(sum, [3, 4], pure=False).result()") == 7
    assert client('len(client.scheduler_info()["workers"])') == 2


def test_a_network_or_job_that_is_back_gives_the_cluster_back(slurm_lab: Lab) -> None:
    """After 20 s without a network, and then a requeue, which makes another certificate."""
    back = "was requeued; its results are lost, the cluster is back"
    certificate = "cluster.security.get_tls_config_for_role('client')['cert']"
    with owner(slurm_lab) as (client, job):
        node = slurm_lab.job(job)["NodeList"]
        with slurm_lab.dropped(slurm_lab.login, f"OUTPUT -d {NETWORK}.1{node.removeprefix('node')} ! --dport 6818"):
            slurm_lab.exec(slurm_lab.login, ["sleep", "20"])
            rules = slurm_lab.root("iptables", "-nvxL", "OUTPUT").splitlines()
            assert int(rules[2].split()[0]) > 0  # packets that did not come through
        assert_works(client)
        before = client(certificate)
        slurm_lab.root("scontrol", "requeue", job)
        slurm_lab.wait_job(job, {"PENDING"})
        slurm_lab.root("scontrol", "update", f"JobId={job}", "StartTime=now")
        until(lambda: f"job {job} {back}" in client.said, "it is said", limit_s=240)
        again = lambda: "dashboard: its address is in " in client.said.partition(back)[2]  # noqa: E731 - its secret is another one
        until(again, "the new dashboard is said", limit_s=240)
        assert "BEGIN CERTIFICATE" in before
        assert client(certificate) not in ("", before)


def test_a_suspended_job_is_said_and_not_lost(slurm_lab: Lab) -> None:
    with owner(slurm_lab, grace_s=4) as (client, job):
        slurm_lab.root("scontrol", "suspend", job)
        until(lambda: "SUSPENDED" in client.said, "it is said that the job is suspended", limit_s=240)
        slurm_lab.root("scontrol", "resume", job)
        until(lambda: "the cluster is back" in client.said, "the return is said", limit_s=240)
        assert "lost" not in client.said

"""The doctor's short job: two nodes of this machine that meet, and a whole job without a batch system."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import fake_nvml
import msgspec
import psutil
import pytest
import ranks
from click.testing import CliRunner
from distributed import Client
from pbs_replay import Pbs
from waiting import scaled, until

from hpcgpu import PBSGPUCluster
from hpcgpu.cli.commands import hpcgpu
from hpcgpu.deploy.doctor import login_facts, trial
from hpcgpu.deploy.doctor.node import CONNECTED, NODE, connect_all, read_all, read_listening, write_order, write_value
from hpcgpu.deploy.doctor.probes import interfaces
from hpcgpu.host import private
from hpcgpu.model import Settings
from hpcgpu.plan.doctor.facts import NodeFacts
from hpcgpu.plan.doctor.findings import Verdict

NAMED = ["unshare", "--uts", "--map-root-user", "bash", "-c", 'hostname "$0" && exec "$@"']
WAITING = """
from hpcgpu.deploy.doctor import login_facts, trial
given = {"gpus": "sim:1", "nodes": "1", "job_script_prologue": ["exec sleep 600"]}
trial.run(login_facts.read(given, "keyword {name}", "pbs", must=True)[0], lambda text: print(text, flush=True))
"""
CHECKS = (
    "import sys, msgspec; from hpcgpu.deploy.doctor.node import gather_facts; "
    "from hpcgpu.model import Settings; sys.stdout.buffer.write(msgspec.json.encode(gather_facts(Settings())))"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ranks.unshared("--uts")
    return private.make_folder(tmp_path / "trial")


def test_two_nodes_and_a_login_node_reach_each_other(folder: Path) -> None:
    token = write_order(folder, Settings(nodes=2))
    doctor = (sys.executable, "-m", "hpcgpu", "doctor", "--on-node", str(folder))
    there = [  # this machine under other names
        subprocess.Popen([*NAMED, name, *doctor], env=ranks.environment(), stderr=subprocess.PIPE, text=True)
        for name in ("n1", "n2")
    ]
    try:
        until(lambda: len(read_listening(folder)) == 2, "two nodes listen")
        listening = read_listening(folder)
        links = [link for place in listening.items() for link in connect_all(*place, token)]
        write_value(folder, CONNECTED, True)
        assert [(p.communicate(timeout=scaled(60))[1], p.returncode) for p in there] == [("", 0)] * 2
    finally:
        for process in there:
            process.kill()
    seen = [*read_all(folder, NODE, NodeFacts).values()]
    assert [facts.host for facts in seen] == ["n1", "n2"]
    assert {link.target for link in links} == {"n1", "n2"}
    for facts, other in zip(seen, ("n2", "n1"), strict=True):
        assert {(link.source, link.target) for link in facts.links} == {(facts.host, other)}
        assert facts.python.broken == ""
        assert facts.scratch
        assert facts.scratch.bytes_per_s > 0
    still = {address for _, address in interfaces()}  # networks of other tests' containers come and go
    assert [link for link in (*links, *seen[0].links, *seen[1].links) if link.error and link.address in still] == []
    assert still & {link.address for link in links}


@pytest.mark.usefixtures("pbs")
def test_a_whole_job(tmp_path: Path) -> None:
    """The way from the submission to the findings, on a node that is this machine."""
    said: list[str] = []
    job, _ = login_facts.read({"gpus": "sim:1", "nodes": "1"}, "keyword {name}", "pbs", must=True)
    findings = {finding.name: finding for finding in trial.run(job, said.append)[0]}
    host = os.uname().nodename
    assert findings["job"].verdict is Verdict.OK
    assert findings["job"].seen.endswith(f" ran on {host}")
    assert findings["node to node"].seen == "one node only"
    assert " connections from here to the nodes work" in findings["here to nodes"].seen
    assert findings["versions"].verdict is Verdict.OK
    assert findings["GPUs"].verdict is Verdict.NOT_LOOKED_AT
    assert findings["launcher and MPI"].verdict is Verdict.OK
    assert any("RUNNING" in line for line in said)
    assert list((tmp_path / ".hpcgpu" / "runs").iterdir()) == []


def start(home: Path) -> subprocess.Popen[str]:
    """Start a doctor whose job does not answer."""
    home.mkdir(exist_ok=True)
    argv = [sys.executable, "-c", WAITING]
    return subprocess.Popen(argv, env=ranks.environment(HOME=str(home)), stdout=subprocess.PIPE, text=True)


def waiting(home: Path) -> tuple[subprocess.Popen[str], str]:
    """Start a doctor whose job runs and does not answer; return it with the job."""
    client = start(home)
    job, _, phase = client.stdout.readline().strip().removeprefix("job ").partition(": ")
    assert phase.startswith("RUNNING")
    return client, job


def trials(home: Path) -> list[Path]:
    return list((home / ".hpcgpu" / "runs").iterdir())


def test_a_doctor_that_is_killed_leaves_nothing(pbs: Pbs, tmp_path: Path) -> None:
    started = {sig: waiting(tmp_path / sig.name) for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)}
    for sig, (client, _) in started.items():
        client.send_signal(sig)
    for sig, (client, job) in started.items():
        client.communicate(timeout=scaled(60))
        assert client.returncode != 0
        until(lambda sig=sig: not trials(tmp_path / sig.name), f"what {sig.name} left is removed", limit_s=90)
        assert pbs.over(job)


def test_guard_ends_the_lost_job_of_an_interrupted_doctor(pbs: Pbs, tmp_path: Path) -> None:
    pbs.auto(False)
    pbs.lose("accepted")
    pbs.trouble("qselect")
    client = start(tmp_path)
    until(pbs.ids, "a job that qsub has not told of")
    client.send_signal(signal.SIGINT)
    client.communicate(timeout=scaled(60))
    assert len(trials(tmp_path)) == 1
    pbs.lose("")
    pbs.trouble("")
    until(lambda: not trials(tmp_path), "the guard is done", limit_s=90)
    assert [pbs.over(job) for job in pbs.ids()] == [True]


def test_stop_ends_the_job_of_a_doctor_killed_with_its_guard(pbs: Pbs, tmp_path: Path) -> None:
    client, job = waiting(tmp_path)
    (left,) = trials(tmp_path)
    guards = {str(left), "hpcgpu.deploy.guard"}
    next(p for p in psutil.process_iter(["cmdline"]) if guards <= set(p.info["cmdline"] or [])).kill()
    client.kill()
    client.communicate(timeout=scaled(60))
    os.utime(left / "lease", (0, 0))
    listed = CliRunner().invoke(hpcgpu, ["ps", "--json"], standalone_mode=False)
    assert [(run["name"], run["owner"]["state"]) for run in json.loads(listed.stdout)] == [("hpcgpu-doctor", "dead")]
    done = CliRunner().invoke(hpcgpu, ["stop", job], standalone_mode=False)
    assert done.stdout == f"hpcgpu-doctor has ended (jobs {job})\n"
    assert trials(tmp_path) == []
    assert pbs.over(job)


def test_a_job_that_starts_after_its_doctor_has_ended_ends(folder: Path) -> None:
    """Killed with its guard, while the job was pending."""
    write_order(folder, Settings(nodes=2))
    (folder / "lease").touch()
    os.utime(folder / "lease", (0, 0))
    done = ranks.run_command([sys.executable, "-m", "hpcgpu", "doctor", "--on-nodes", str(folder)])
    assert done.returncode == 1
    assert "has given no sign of life for 30 s" in done.stderr


def test_a_node_with_a_gpu(tmp_path: Path) -> None:
    """NVML is a stand-in, which knows one GPU; what asks it is real."""
    env = fake_nvml.compiled(tmp_path).environment([fake_nvml.FakeGpu("0000:06:00.0", "GPU-0", name="H100")])
    done = subprocess.run([sys.executable, "-c", CHECKS], env=env, capture_output=True, timeout=scaled(60))
    assert done.returncode == 0, done.stderr
    facts = msgspec.json.decode(done.stdout, type=NodeFacts)
    assert (facts.gpus, facts.driver) == (("H100",), "570.86.15")
    assert 1 <= facts.cpus <= facts.cores


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="workers share the only PU")
def test_workers_that_were_bound_again_are_named(pbs: Pbs) -> None:
    """By the command, which asks a cluster of another process."""
    options = {"gpus": "sim:2x16MiB", "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
    with PBSGPUCluster(**options) as cluster, Client(cluster) as client:
        cluster.scale(2)
        cluster.wait_for_workers(2)
        command = (sys.executable, "-m", "hpcgpu", "doctor", "--cluster", cluster.name, "--json")

        def findings() -> list[tuple[str, str]]:
            done = subprocess.run(command, capture_output=True, text=True, env=ranks.environment(), timeout=scaled(60))
            assert done.returncode == 0, done.stderr
            return [(f["name"], f["verdict"]) for f in json.loads(done.stdout)["findings"]]

        assert findings() == [("workers", "ok")]
        first = min(client.scheduler_info()["workers"])
        client.run(os.sched_setaffinity, 0, os.sched_getaffinity(0), workers=[first])
        name = str(client.scheduler_info()["workers"][first]["name"])
        assert findings() == [(name, "warning"), ("workers", "ok")]
    refused = subprocess.run(command, capture_output=True, text=True, env=ranks.environment(), timeout=scaled(60))
    assert "there is no run" in refused.stderr

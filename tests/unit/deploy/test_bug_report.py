"""The folder for a bug report: it can be read by hpcgpu's own parsers, and holds nothing of whose machine it is."""

from __future__ import annotations

import getpass
import json
import os
import shlex
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paths import BATCH, DATA, TOPOLOGIES
from recordings import records

from hpcgpu import config
from hpcgpu.batch import get
from hpcgpu.deploy import bug_report
from hpcgpu.deploy.jobs import Run
from hpcgpu.deploy.jobs import home as home_of_runs
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.deploy.preview import Selection, plan_machine
from hpcgpu.errors import ConfigError
from hpcgpu.model import Result, RunDocument, Settings
from hpcgpu.plan.jobs import Job

KEY = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMG\n-----END PRIVATE KEY-----\n"
LOG = f"""hpcgpu: gpunode07: no port for 2 workers
hpcgpu: 2 workers on 1 node ready; scheduler tls://10.9.8.7:40123, nonce NONCE
connection from gpunode07 (3c:ec:ef:01:02:03) of GPU-3b2f9a10-1111-2222-3333-444455556666 by ada@site.example.edu
HF_TOKEN=hf_abcdef {KEY}
worker gpunode07-0 in /home/HOST/HOME
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run named mine; returns what must not be in its report."""
    home = tmp_path / "ada-lovelace"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    folder = scheduler_file.make_folder(home_of_runs())
    nonce = (folder / "nonce").read_text()
    log = tmp_path / "ada-lovelace" / "slurm-12.out"
    log.write_text(LOG.replace("NONCE", nonce).replace("HOME", str(home)))
    settings = Settings(account="proj4711", job_name="mine", env={"API_TOKEN": "t0ps3cret"})
    mine = Run.begin(RunDocument(settings=settings, shape="gang", folder=str(folder)), "slurm", None)
    mine.owner = replace(mine.owner, host="login17")
    mine.add([Job(id="12", log=str(log))], 0.0)
    mine.save()
    addresses = ["10.9.8.7", "3c:ec:ef:01:02:03", "3b2f9a10-1111-2222-3333-444455556666", "ada@site"]
    secrets = [nonce, "MIGHAgEAMBMG", "PRIVATE KEY", "hf_abcdef", "t0ps3cret"]
    return [str(home), "proj4711", "login17", "gpunode07", *addresses, *secrets]


def test_a_report_of_a_run(run: list[str], tmp_path: Path) -> None:
    folder = bug_report.write("mine", str(tmp_path / "report"))
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert {"README.md", "versions.json", "plan.txt", "record.json", "batch.txt", "job-0.log"} <= set(texts)
    whole = "\n".join(texts.values())
    common = {"root", "user", "localhost"}
    mine = {getpass.getuser(), socket.gethostname()} - common
    values = {v for name in ("SLURM_JOB_ACCOUNT", "PBS_ACCOUNT") if (v := os.environ.get(name))}
    assert not [word for word in (*run, *values) if word in whole]
    assert not [word for word in mine if len(word) > 3 and word in whole]
    assert json.loads(texts["record.json"])["document"]["settings"]
    first, *_, last = texts["job-0.log"].splitlines()
    node = first.split(": ")[1]
    assert last.startswith(f"worker {node}-0 in ")  # one name has one neutral word


ANSWERS = list(records(BATCH / "slurm" / "22.05.8" / "05-alive.txt"))[:2]
REPORTS = sorted(DATA.glob("reports/*/README.md"))


def of_machine(plan: dict[str, Any]) -> dict[str, Any]:
    """The part of a plan that follows from a topology: not what NVML, a cgroup and addresses say of the day."""
    names = ("name", "cpuset", "shared_cores", "nics")
    return {
        "workers": [{**{n: w[n] for n in names}, "gpu": w["gpu"] and w["gpu"]["pci"]} for w in plan["workers"]],
        "nics": plan["nics"],
        "numa_nodes": plan["machine"]["numa_nodes"],
        "idle": plan["idle_cpuset"],
    }


def check_whole(folder: Path) -> None:
    """Read all of a report that hpcgpu has parsers for, and compare it with what the report says of it."""
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    if "topology.xml" in texts:
        said = json.loads(texts["plan.json"])
        selection = Selection(file=str(folder / "topology.xml"), cpuset=said["allowed_cpuset"])
        assert of_machine(plan_machine(selection, {}, "here").described()) == of_machine(said)
    if "record.json" in texts:
        run = json.loads(texts["record.json"])
        config.read(json.dumps(run["document"]))
        answers = [
            Result(tuple(shlex.split(r.command)), r.returncode, r.stdout, r.stderr)
            for r in records(folder / "batch.txt")
        ]
        ids = [job["id"] for job in run["jobs"]]
        system = get(run["batch"], **run["dialect"])
        assert {job for answer in answers for job in system.read_status(answer, ids)} >= set(ids if answers else ())
        assert {f"job-{i}.log" for i in range(len(ids))} <= texts.keys()


@pytest.fixture
def whole(run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The report of a run on a recorded machine, in a batch system that gives recorded answers."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for answer in ANSWERS:
        name = answer.command.split()[0]
        (programs / f"{name}.txt").write_text(answer.stdout)
        (programs / name).write_text(f"#!/bin/sh\ncat {programs / name}.txt\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setenv("HWLOC_XMLFILE", str(TOPOLOGIES / "drm-4gpu.xml"))
    return bug_report.write("mine", str(tmp_path / "report"))


@pytest.mark.parametrize("report", [None, *REPORTS], ids=lambda path: path.parent.name if path else "made here")
def test_a_whole_report_is_read_by_our_own_parsers(whole: Path, report: Path | None) -> None:
    """``hpcgpu report`` of a machine or run that went wrong is put into tests/data/reports as it is."""
    check_whole(report.parent if report else whole)


def test_report_has_the_batch_systems_answers_about_jobs(whole: Path) -> None:
    answers = (whole / "batch.txt").read_text()
    assert "12|PENDING|0|N/A||Resources|" in answers
    assert "node[1-4]" not in answers


def test_its_topology_is_read_by_topo(tmp_path: Path) -> None:
    from hpcgpu.deploy.preview import read_machine

    folder = bug_report.write(None, str(tmp_path / "report"))
    if (folder / "topology.xml").exists():
        assert read_machine(str(folder / "topology.xml")).cores
    else:
        assert "libhwloc" in (folder / "topology.txt").read_text()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made: File exists; give one that is not there yet"):
        bug_report.write(None, str(tmp_path))

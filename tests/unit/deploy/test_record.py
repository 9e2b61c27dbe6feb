"""The record and the owner of a run, how a run is read again, and the folder for a bug report."""

import asyncio
import getpass
import json
import os
import re
import shlex
import socket
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import BATCH, DATA, TOPOLOGIES
from programs import program
from recordings import records

from hpcgpu import config
from hpcgpu.batch import get
from hpcgpu.deploy import bug_report
from hpcgpu.deploy.jobs import Pool, Run, runs, sweep
from hpcgpu.deploy.jobs import home as home_of_runs
from hpcgpu.deploy.jobs import run as run_files
from hpcgpu.deploy.jobs.run import Owner, Record
from hpcgpu.deploy.machine import plan_machine
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.errors import ConfigError, JobError, ParseError
from hpcgpu.host import private
from hpcgpu.model import Result, RunDocument, Settings
from hpcgpu.plan.jobs.job import Job

SETTINGS = Settings(nodes=2, gpus="sim:4", job_name="mine")
FACTS = Record(
    batch="slurm",
    dialect={"gpus": "gres"},
    document=config.render_document(RunDocument(settings=SETTINGS, shape="gang", folder="/home/me/runs/1")),
    created=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    jobs=(Job(id="12", log="/home/me/slurm-12.out"),),
)

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
jobs = st.builds(Job, id=texts, log=texts, exit_file=texts, pool=texts, role=st.sampled_from(["head", "member"]))
gone = st.builds(Job.gone, jobs, texts, st.datetimes(timezones=st.just(UTC)))
facts = st.builds(
    Record,
    batch=st.just("pbs"),
    dialect=st.dictionaries(texts, st.one_of(texts, st.booleans(), st.lists(texts).map(tuple))),
    document=texts,
    target=st.integers(0, 10**6),
    pools=st.dictionaries(texts, st.builds(Pool, document=texts, workers=st.integers(0, 9), target=st.integers(0, 9))),
    created=st.datetimes(timezones=st.just(UTC)),
    jobs=st.lists(jobs, max_size=3).map(tuple),
    gone=st.lists(gone, max_size=3).map(tuple),
    submitting=st.booleans(),
)


OWNER = Owner("login1", 4711, 99, "ada", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "0a1b")
DOCUMENT = RunDocument(settings=SETTINGS, shape="gang", folder="/home/me/runs/1")
KEY = "-----BEGIN PRIVATE KEY-----\nMIGHAgEAMBMG\n-----END PRIVATE KEY-----\n"
LOG = f"""hpcgpu: gpunode07: no port for 2 workers
hpcgpu: 2 workers on 1 node ready; scheduler tls://10.9.8.7:40123, nonce NONCE
connection from gpunode07 (3c:ec:ef:01:02:03) of GPU-3b2f9a10-1111-2222-3333-444455556666 by ada@site.example.edu
HF_TOKEN=hf_abcdef opened postgres://u:hunter2@db/x {KEY}
2026-11-28 - INFO - spill story of process 7: [["cut",3000],["tick"]]
worker gpunode07-0 in /home/HOST/HOME
"""
ANSWERS = list(records(BATCH / "slurm" / "22.05.8" / "05-alive.txt"))[:2]
REPORTS = sorted(DATA.glob("reports/*/README.md"))


def folder_of(home: Path, record: Record = FACTS) -> Path:
    """Write a record, and an owner that is another object, as :meth:`Run.save` does."""
    folder = scheduler_file.make_folder(home)
    private.write(folder / "owner", run_files._render(OWNER))
    private.write(folder / "record", run_files._render(record))
    return folder


def begun_in(home: Path) -> Run:
    return Run.begin(replace(DOCUMENT, folder=str(scheduler_file.make_folder(home))), "slurm", None)


@given(facts)
def test_record_is_read_as_written(tmp_path_factory: pytest.TempPathFactory, record: Record) -> None:
    path = tmp_path_factory.mktemp("run") / "record"
    private.write(path, run_files._render(record))
    assert run_files._read(path, Record) == record


def test_run_is_read_as_it_was_saved(tmp_path: Path) -> None:
    begun = begun_in(tmp_path)
    begun.add([Job(id="12", role="head", log="a"), Job(id="13", log="b"), Job(id="14")])
    begun.ended("14", "exit code 1", datetime.now(UTC))
    begun.target, begun.submitting = 3, False
    begun.save()
    read = Run.open(begun.folder)
    jobs = [(job.id, job.role, job.log, job.nodes, job.expected) for job in read.jobs.values()]
    assert jobs == [("12", "head", "a", 2, 8), ("13", "member", "b", 1, 4)]
    assert [(job.id, job.why) for job in read.gone] == [("14", "exit code 1")]
    assert (read.target, read.submitting, read.owner, read.is_mine) == (3, False, begun.owner, False)
    assert read.owner.pid == os.getpid()
    with pytest.raises(JobError, match=r"this object cannot change the cluster: .* owns it. To take it over: attach"):
        read.save()


def test_run_is_saved_after_a_write_that_failed(tmp_path: Path) -> None:
    begun = begun_in(tmp_path)
    (begun.folder / "record").mkdir()  # as a file server that has lost the handle
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            begun.save()
    (begun.folder / "record").rmdir()
    begun.save()
    assert Run.open(begun.folder).owner == begun.owner


def test_run_that_is_taken_over_is_saved_by_its_new_owner_alone(tmp_path: Path) -> None:
    first = begun_in(tmp_path)
    first.add([Job(id="12", role="head")])
    first.target = 2
    first.save()
    second = Run.open(first.folder)
    second.take_over()
    try:
        assert (second.is_mine, second.target, list(second.jobs)) == (True, 2, ["12"])
        second.add([Job(id="13")])
        second.save()
        with pytest.raises(JobError, match="this object cannot change the cluster"):
            first.save()
        assert first.is_taken_over
        first.reload()
        assert list(first.jobs) == ["12", "13"]
    finally:
        second.end_guard()


def test_record_is_private_and_comes_back(tmp_path: Path) -> None:
    """With bytes that are no UTF-8 in a log's path, and the mapping of a site file; without the secret."""
    dialect = MappingProxyType({"array_limit": 10, "gpus": "gres", "launcher": ("mpiexec", "-x"), "memory": False})
    written = replace(FACTS, dialect=dialect, jobs=(Job(id="12", log="/home/m\udce9/log"),))
    folder = folder_of(tmp_path, written)
    assert (folder / "record").stat().st_mode & 0o777 == 0o600
    assert (folder / "nonce").read_text() not in (folder / "record").read_text()
    read = Run.open(folder)
    assert read.record == written
    assert read.document.settings == SETTINGS
    assert "gres" in repr(Run.open(folder_of(tmp_path)).system)


@pytest.mark.parametrize("text", ["", "{}", "[]", json.dumps({"name": "x", "batch": "slurm"})])
def test_what_is_no_record_is_said_and_skipped(tmp_path: Path, text: str) -> None:
    good, bad = folder_of(tmp_path), folder_of(tmp_path)
    (bad / "record").write_text(text)
    (tmp_path / "local").mkdir()  # a local cluster's folder has none
    with pytest.raises(ParseError, match="no record of a run"):
        Run.open(bad)
    said: list[str] = []
    assert [run.folder for run in Run.all(tmp_path, said.append)] == [good]
    assert len(said) == 1
    assert str(bad) in said[0]


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"jobs": [{"log": "x"}]}, "$.jobs[0]"),
        ({"jobs": [{"id": 12, "log": "x"}]}, "$.jobs[0].id"),
        ({"target": "3"}, "$.target"),
        ({"created": "yesterday"}, "$.created"),
        ({"submitting": None}, "$.submitting"),
        ({"tomorrow": 1}, "$.tomorrow"),
        ({"jobs": [{"id": "12", "kind": "head"}]}, "$.jobs"),
    ],
)
def test_the_error_names_the_path_of_what_is_wrong(tmp_path: Path, changes: dict[str, object], path: str) -> None:
    folder = folder_of(tmp_path)
    text = json.dumps(json.loads((folder / "record").read_text()) | changes)
    (folder / "record").write_text(text)
    with pytest.raises(ParseError, match=re.escape(f"at `{path}`")) as caught:
        Run.open(folder)
    assert caught.value.evidence == text
    assert (folder / "record").read_text() == text


def test_a_run_of_another_version_is_said_and_skipped(tmp_path: Path) -> None:
    other = json.loads(FACTS.document) | {"version": 1}
    folder = folder_of(tmp_path, replace(FACTS, document=json.dumps(other)))
    ours = folder_of(tmp_path)
    said: list[str] = []
    assert [run.folder for run in Run.all(tmp_path, said.append)] == [ours]
    (line,) = said
    assert line.startswith(f"{folder}: run document of version 1, but this hpcgpu reads version")


def test_the_document_of_a_run_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder_of(tmp_path, replace(FACTS, jobs=()))
    parsed: list[str] = []
    read = config.read_document
    monkeypatch.setattr(config, "read_document", lambda text: parsed.append(text) or read(text))
    (seen,) = Run.all(tmp_path, pytest.fail)
    asyncio.run(runs.refresh([seen]))
    assert runs.jobs_of(seen) == ()
    assert seen.document.settings == SETTINGS
    assert parsed == [FACTS.document]


@pytest.mark.parametrize("job_id", ["12", "1021.login01", "7_3"])
def test_find_run_by_name_folder_and_job_id(tmp_path: Path, job_id: str) -> None:
    """The id of a PBS job also without its server, of an element also that of its array."""
    written = replace(FACTS, jobs=(Job(id=job_id),))
    folder = folder_of(tmp_path, written)
    for name in ("mine", folder.name, job_id, job_id.partition(".")[0].partition("_")[0]):
        assert Run.find(tmp_path, name).folder == folder


def test_ambiguous_or_unknown_run_name_lists_the_runs(tmp_path: Path) -> None:
    assert Run.all(tmp_path / "none", pytest.fail) == ()
    with pytest.raises(ConfigError, match=r"there is no run 'mine'; there are: none \(searched in"):
        Run.find(tmp_path, "mine")
    folder_of(tmp_path)
    later = FACTS.created + timedelta(hours=1)
    folder_of(tmp_path, replace(FACTS, created=later, jobs=(Job(id="13", log="x"),)))
    with pytest.raises(ConfigError, match=r"2 runs have the name 'mine'.*mine \(job 12, .*mine \(job 13"):
        Run.find(tmp_path, "mine")
    with pytest.raises(ConfigError, match=r"there is no run 'other'; there are: mine \(job 12"):
        Run.find(tmp_path, "other")
    assert list(Run.find(tmp_path, "13").jobs) == ["13"]


def test_sweep_removes_old_runs_without_a_record(tmp_path: Path) -> None:
    written, (unwritten, young) = folder_of(tmp_path), (scheduler_file.make_folder(tmp_path) for _ in range(2))
    for folder in (written, unwritten):
        for path in (*folder.iterdir(), folder):
            os.utime(path, (0, 0))
    sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([written, young])
    sweep(tmp_path / "not there")


# --- it can be read by hpcgpu's own parsers, and has nothing of whose machine it is


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
    env = {"API_TOKEN": "t0ps3cret", "DB_URL": "postgres://u:hunter2@db/x"}
    prologue = ("module load x", "export WANDB='hunter4 x' B=hunter5", "[ -f a ] && C=hunter6 run")
    settings = Settings(account="proj4711", job_name="mine", env=env, job_script_prologue=prologue)
    mine = Run.begin(RunDocument(settings=settings, shape="gang", folder=str(folder)), "slurm", None)
    mine.owner = replace(mine.owner, host="login17")
    mine.add([Job(id="12", log=str(log))])
    mine.save()
    addresses = ["10.9.8.7", "3c:ec:ef:01:02:03", "3b2f9a10-1111-2222-3333-444455556666", "ada@site"]
    secrets = [nonce, "MIGHAgEAMBMG", "PRIVATE KEY", "hf_abcdef", "t0ps3cret", "hunter"]
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
    assert "spill story" not in texts["job-0.log"]
    first, *_, last = texts["job-0.log"].splitlines()
    node = first.split(": ")[1]
    assert texts["job-0-spill.log"] == '2026-11-28 - INFO - spill story of process 7: [["cut",3000],["tick"]]\n'
    assert last.startswith(f"worker {node}-0 in ")  # one name has one neutral word


def test_a_report_of_a_user_whom_no_list_has(run: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getgroups", lambda: [0, 54_321])
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError("getpwuid(): uid not found: 12345")))
    texts = [path.read_text() for path in bug_report.write("mine", str(tmp_path / "report")).iterdir()]
    assert not [word for word in run if word in "\n".join(texts)]


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
        gpus = dict.fromkeys(w["gpu"]["pci"] for w in said["workers"] if w["gpu"])  # those that were granted
        part = {"file": str(folder / "topology.xml"), "cpuset": said["allowed_cpuset"], "gpus": ",".join(gpus) or None}
        assert of_machine(plan_machine({}, "here", **part).described()) == of_machine(said)
    if "record.json" in texts:
        run = json.loads(texts["record.json"])
        config.read_document(json.dumps(run["document"]))
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
        program(programs / name, f"cat {programs / name}.txt")
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
    from hpcgpu.deploy.machine import read_machine

    folder = bug_report.write(None, str(tmp_path / "report"))
    if (folder / "topology.xml").exists():
        assert read_machine(str(folder / "topology.xml")).cores
    else:
        assert "libhwloc" in (folder / "topology.txt").read_text()


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be made: File exists; give one that is not there yet"):
        bug_report.write(None, str(tmp_path))

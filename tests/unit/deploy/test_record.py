"""The record and the owner of a run, and how a run is read again."""

from __future__ import annotations

import asyncio
import json
import os
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcgpu import config
from hpcgpu.deploy import jobs as run_files
from hpcgpu.deploy.jobs import Owner, Record, Run, runs
from hpcgpu.deploy.network import scheduler_file
from hpcgpu.errors import ConfigError, JobError, ParseError
from hpcgpu.host import private
from hpcgpu.model import RunDocument, Settings
from hpcgpu.plan.jobs import Job

SETTINGS = Settings(nodes=2, gpus="sim:4", job_name="mine")
FACTS = Record(
    batch="slurm",
    dialect={"gpus": "gres"},
    document=config.render(RunDocument(settings=SETTINGS, shape="gang", folder="/home/me/runs/1")),
    created=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    jobs=(Job(id="12", log="/home/me/slurm-12.out"),),
)

texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
jobs = st.builds(Job, id=texts, log=texts, exit_file=texts, role=st.sampled_from(["head", "member"]))
gone = st.builds(Job.gone, jobs, texts, st.datetimes(timezones=st.just(UTC)))
facts = st.builds(
    Record,
    batch=st.just("pbs"),
    dialect=st.dictionaries(texts, st.one_of(texts, st.booleans(), st.lists(texts).map(tuple))),
    document=texts,
    target=st.integers(0, 10**6),
    created=st.datetimes(timezones=st.just(UTC)),
    jobs=st.lists(jobs, max_size=3).map(tuple),
    gone=st.lists(gone, max_size=3).map(tuple),
    submitting=st.booleans(),
)


OWNER = Owner("login1", 4711, 99, "ada", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), "0a1b")
DOCUMENT = RunDocument(settings=SETTINGS, shape="gang", folder="/home/me/runs/1")


def folder_of(home: Path, record: Record = FACTS) -> Path:
    """Write a record, and an owner that is another object, as :meth:`Run.save` does."""
    folder = scheduler_file.make_folder(home)
    private.write(folder / "owner", run_files._render(OWNER))
    private.write(folder / "record", run_files._render(record))
    return folder


@given(facts)
def test_record_is_read_as_written(tmp_path_factory: pytest.TempPathFactory, record: Record) -> None:
    path = tmp_path_factory.mktemp("run") / "record"
    private.write(path, run_files._render(record))
    assert run_files._read(path, Record) == record


def test_run_is_read_as_it_was_saved(tmp_path: Path) -> None:
    folder = scheduler_file.make_folder(tmp_path)
    begun = Run.begin(replace(DOCUMENT, folder=str(folder)), "slurm", None)
    begun.add([Job(id="12", role="head", log="a"), Job(id="13", log="b"), Job(id="14")], 1.0)
    begun.ended("14", "exit code 1", run_files.now())
    begun.target, begun.submitting = 3, False
    begun.save()
    read = Run.open(folder)
    assert [(job.id, job.role, job.log, job.nodes, job.expected) for job in read.jobs.values()] == [
        ("12", "head", "a", 2, 8),
        ("13", "member", "b", 1, 4),
    ]
    assert [(job.id, job.why) for job in read.gone] == [("14", "exit code 1")]
    assert (read.target, read.submitting, read.owner, read.is_mine) == (3, False, begun.owner, False)
    assert read.owner.pid == os.getpid()
    with pytest.raises(JobError, match=r"this object cannot change the cluster: .* owns it. To take it over: attach"):
        read.save()


def test_run_is_saved_after_a_write_that_failed(tmp_path: Path) -> None:
    folder = scheduler_file.make_folder(tmp_path)
    begun = Run.begin(replace(DOCUMENT, folder=str(folder)), "slurm", None)
    (folder / "record").mkdir()  # as a file server that has lost the handle
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            begun.save()
    (folder / "record").rmdir()
    begun.save()
    assert Run.open(folder).owner == begun.owner


def test_run_that_is_taken_over_is_saved_by_its_new_owner_alone(tmp_path: Path) -> None:
    folder = scheduler_file.make_folder(tmp_path)
    first = Run.begin(replace(DOCUMENT, folder=str(folder)), "slurm", None)
    first.add([Job(id="12", role="head")], 1.0)
    first.target = 2
    first.save()
    second = Run.open(folder)
    second.take_over()
    try:
        assert (second.is_mine, second.target, list(second.jobs)) == (True, 2, ["12"])
        second.add([Job(id="13")], 1.0)
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
    read = config.read
    monkeypatch.setattr(config, "read", lambda text: parsed.append(text) or read(text))
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
    written, unwritten, young = (
        folder_of(tmp_path),
        scheduler_file.make_folder(tmp_path),
        scheduler_file.make_folder(tmp_path),
    )
    for folder in (written, unwritten):
        for path in (*folder.iterdir(), folder):
            os.utime(path, (0, 0))
    run_files.sweep(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([written, young])
    run_files.sweep(tmp_path / "not there")

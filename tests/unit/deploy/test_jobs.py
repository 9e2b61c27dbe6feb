"""The jobs of a run: submitted, asked about in one loop, scaled, on nodes that die, and ended."""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fleets import make_fleet, make_run
from paths import BATCH
from programs import program
from recordings import records
from waiting import scaled, until, when

from hpcgpu.batch import Pbs, Slurm
from hpcgpu.deploy.cluster.classes import bounds, check_scale, workers_with
from hpcgpu.deploy.jobs import Run, batch_client, ending
from hpcgpu.deploy.jobs.batch_client import on_lost_nodes, proven, submit
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.deploy.jobs.runs import Jobs
from hpcgpu.errors import ConfigError, JobError, SubmitError
from hpcgpu.model import Command, JobSpec, JobState, JobStatus, Patience, Result, Settings
from hpcgpu.model.settings import Limit
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.job_text import describe
from hpcgpu.plan.jobs.reconcile import Policy

FOR_NOW, LOST, UNNAMED = {"transient": True}, {"transient": True, "unsure": True}, {"unsure": True}
REFUSALS: dict[str, tuple[Any, int, list[Any], str, int]] = {
    # kind, return code, answers of the search for its jobs; the job or the error; submissions
    "no such program": ({}, 127, [], "login node of a cluster", 1),
    "a limit of this user": ({"over_limit": True, "transient": True}, 1, [], "^no\n", 1),
    "for good": ({}, 1, [], "The request was", 1),
    "for now": (FOR_NOW, 1, [], "8", 2),
    "for now, again and again": (FOR_NOW, 1, [], "^no\n", 3),
    "no answer, but the job exists": (LOST, 1, [("7",)], "7", 1),
    "no answer, and no job: it may be in no list yet": (LOST, 1, [(), ()], "^no\n", 1),
    "too late, and no job: it may still come": (LOST, 124, [(), ()], "^no\n", 1),
    "no answer to the search at first": (LOST, 124, [SubmitError("?"), ("7",)], "7", 1),
    "a sentence without an id, and the job exists": (UNNAMED, 0, [("7",)], "7", 1),
    "a sentence without an id, and no job": (UNNAMED, 0, [(), ()], "^no\n", 1),
    "no answer to any search": (LOST, 1, [SubmitError("?")] * 2, "^no\n", 1),
}
OFFERS = {record.command: record for record in records(BATCH / "slurm" / "22.05.8" / "19-offers.txt")}
SINFO = next(record.stdout for command, record in OFFERS.items() if "--partition=low" in command)
LOW = JobSpec(name="a", argv=("true",), queue="low", nodes=3, walltime_s=7200)
WAITS = JobStatus(JobState.PENDING, "PENDING", "PartitionNodeLimit", advice="fewer nodes=, or another queue=")
HEAD_ID, MEMBER = "41", "42"
QUIET = Policy(patience=Patience(ask_s=3600, news_s=3600))  # asks when it is told to
LISTED = next(r.stdout for r in records(BATCH / "slurm/22.05.8/17-node-died.txt") if r.command.startswith("squeue "))
RECORDED = list(records(BATCH / "slurm" / "22.05.8" / "17-node-died.txt"))
# Nothing is noticed yet; node4 does not answer; it has been given up.
UNNOTICED, SILENT, DOWN = range(3)
AGAIN, ONE, TWO = "41", "42", "43"
SHOWN = {
    UNNOTICED: "STARTING 0/1",
    SILENT: "STARTING 0/1 (node4 does not answer Slurm)",
    DOWN: "PENDING (BeginTime, node4 is down: Not responding), starts about 2026-11-22 15:50",
}
Turn = Callable[[int], None]
GIB = 2**30
# eight cores and 16 GiB for each of four GPUs
NODE = Settings(gpus_per_node=4, cores_per_gpu=8, memory_bytes=64 * GIB)


@pytest.mark.parametrize(("kind", "code", "answers", "end", "count"), REFUSALS.values(), ids=REFUSALS)
def test_submit_after_a_refusal(
    kind: Any, code: int, answers: list[Any], end: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions: list[Command] = []
    left = iter(answers)

    async def run(command: Command) -> Result:
        submissions.append(command)
        return Result(command.argv, code, "", "")

    async def look(*_: object) -> tuple[str, ...]:
        if isinstance(answer := next(left), SubmitError):
            raise answer
        return answer

    def read_submit(_: Result) -> str:
        if len(submissions) == 1 or "^" in end:
            raise SubmitError("no", **kind)
        return "8"

    monkeypatch.setattr(batch_client, "run", run)
    monkeypatch.setattr(batch_client, "search", look)
    command = Command(("sbatch",))
    system: Any = SimpleNamespace(submit=lambda *_: command, read_submit=read_submit, offers=lambda _: None)
    system.elements = lambda i, _: (i,)
    submitting = batch_client.submit(system, JobSpec(name="a", argv=("b",)), "", print, Patience(retries_s=(0, 0)))
    if end.isdigit():
        assert asyncio.run(submitting) == (end,)
    else:
        with pytest.raises(SubmitError, match=end):
            asyncio.run(submitting)
    assert len(submissions) == count
    assert not list(left)


# --- jobs that wait for what there is not


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """A Slurm whose sinfo answers as it was recorded, and whose sbatch refuses."""
    program(tmp_path / "sinfo", f'echo "$@" >> {tmp_path}/asked\ncat << END\n{SINFO}END')
    program(tmp_path / "sbatch", "echo 'Requested node configuration is not available' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return Slurm()


async def test_a_job_that_can_never_run_is_stuck_with_what_to_change(slurm: Slurm, tmp_path: Path) -> None:
    others = {"2": replace(WAITS, state=JobState.RUNNING), "3": JobStatus(JobState.PENDING, "PENDING", "Priority")}
    found = await proven(slurm, LOW, {"1": WAITS, **others})
    assert {job_id: found[job_id] for job_id in others} == others
    assert found["1"].state is JobState.STUCK
    assert found["1"].reason == (
        "PartitionNodeLimit: walltime='02:00:00', but queue low has a limit of 01:30:00; "
        "nodes=3, but queue low gives a job 2 at most"
    )
    assert (tmp_path / "asked").read_text().count("\n") == 1  # however many jobs


async def test_without_proof_it_waits_on(slurm: Slurm, tmp_path: Path) -> None:
    could = replace(LOW, nodes=2, walltime_s=60)  # a limit of another kind, such as a QOS's
    assert await proven(slurm, could, {"1": WAITS}) == {"1": WAITS}
    priority = {"1": JobStatus(JobState.PENDING, "PENDING", "Priority")}
    (tmp_path / "asked").unlink()
    assert await proven(slurm, LOW, priority) == priority
    for own in ("--nodes=2", "-p other", "--qos=big", "--gpus-per-task=1"):  # nobody knows what is asked for
        assert await proven(slurm, replace(LOW, extra_directives=(own,)), {"1": WAITS}) == {"1": WAITS}
    assert not (tmp_path / "asked").exists()
    (tmp_path / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    assert await proven(slurm, LOW, {"1": WAITS}) == {"1": WAITS}


async def test_a_refusal_says_what_there_is_not(slurm: Slurm) -> None:
    asked = replace(LOW, nodes=1, walltime_s=60, gpus_per_node=5)
    with pytest.raises(SubmitError, match="not available") as caught:
        await submit(slurm, asked, slurm.script(asked), print, Patience())
    assert str(caught.value).splitlines()[-1] == "gpus_per_node=5, but the nodes of queue low have 4 at most"


@pytest.mark.parametrize(
    "dialect", [Slurm(gpus="none"), Slurm(cpus=False), Slurm(memory="none"), Slurm(gpu_type="v100")]
)
def test_what_a_sites_jobs_do_not_ask_for_is_not_compared(dialect: Slurm) -> None:
    command = dialect.offers(LOW)
    assert isinstance(command, Command)
    result = next(record for line, record in OFFERS.items() if "--partition=low" in line)
    [offer] = dialect.read_offers(Result(command.argv, 0, result.stdout, ""))
    assert (offer.gpus is None) == (dialect.gpus == "none")
    assert (offer.cpus is None) == (not dialect.cpus)
    assert (offer.memory_bytes is None) == (dialect.memory == "none")
    assert offer.gpus in ((0,) if dialect.gpu_type else (None, 4))


# --- one question for all jobs


@pytest.fixture
def questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A squeue that knows both jobs, and what it was asked; where there is a file "down", it does not answer."""
    (tmp_path / "listed").write_text(LISTED)
    down = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"
    for name, answer in (("squeue", f"cat {tmp_path}/listed"), ("sinfo", "true")):
        fails = f'[ ! -e {tmp_path}/down ] || {{ echo "{down}" >&2; exit 1; }}'
        program(tmp_path / name, f'echo "$0 $@" >> {tmp_path}/asked\n{fails}\n{answer}')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def asked() -> list[str]:
        there = (tmp_path / "asked").read_text().splitlines() if (tmp_path / "asked").exists() else []
        return [line for line in there if "/squeue " in line]

    return asked


def recorded(job_id: str, folder: Path) -> Job:
    files = {"log": str(folder / "log"), "exit_file": str(folder / f"exit-{job_id}")}
    return Job(id=job_id, role="head", submitted_s=time.monotonic(), expected=1, **files)


def looked_after(tmp_path: Path, policy: Policy = QUIET, job_id: str = HEAD_ID, **calls: Any) -> Fleet:
    """Return the fleet of a run with a head job."""
    fleet = make_fleet(make_run(tmp_path / "run", Slurm()), policy, **calls)
    fleet.run.add([recorded(job_id, tmp_path)])
    fleet.start()
    return fleet


async def test_all_jobs_are_one_question(questions: Callable[[], list[str]], tmp_path: Path) -> None:
    jobs = make_run(tmp_path / "run", Slurm())
    jobs.add([recorded(HEAD_ID, tmp_path), replace(recorded(MEMBER, tmp_path), role="member")])
    jobs.save()
    read = Run.open(jobs.folder)
    read.system = Slurm()
    fleet = make_fleet(read, QUIET, JobSpec(name="x", argv=("true",)))
    known = await fleet.news()
    assert known.state is JobState.RUNNING
    assert [job.state for job in read.members] == [JobState.RUNNING]
    fleet.stop()
    with pytest.raises(JobError, match="has closed"):
        await fleet.news()
    (question,) = questions()
    assert HEAD_ID in question
    assert MEMBER in question


async def test_job_is_unknown_without_an_answer(questions: Callable[[], list[str]], tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "down").touch()
    jobs = looked_after(tmp_path, say=said.append)
    for _ in range(2):
        text = describe(await jobs.news(), date(2026, 11, 23)).text
        assert text == "UNKNOWN (the batch system does not answer)"
    (tmp_path / "down").unlink()
    assert describe(await jobs.news(), date(2026, 11, 23)).text == "STARTING 0/1"
    jobs.stop()
    assert len(said) == 1
    assert "Unable to contact slurm controller" in said[0]


async def test_job_with_an_exit_code_is_polled(questions: Callable[[], list[str]], tmp_path: Path) -> None:
    policy = Policy(patience=Patience(ask_s=3600, news_s=0.05))
    jobs = looked_after(tmp_path, policy)
    head = recorded(HEAD_ID, tmp_path)
    await when(lambda: len(questions()) == 2)  # a moment after its submission, and once more since it runs
    await jobs.news()
    asked = len(questions())  # from here on once an hour
    Path(head.exit_file).write_text("0\n")
    await jobs.check()
    await when(lambda: len(questions()) > asked)
    jobs.stop()


async def test_a_refusal_reaches_the_caller_of_scale(
    questions: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the loop acts while scale() writes the new number of jobs."""
    program(tmp_path / "sbatch", "echo sbatch: error: QOSMaxSubmitJobPerUserLimit >&2; exit 1")
    fleet = make_fleet(make_run(tmp_path / "run", Slurm()), QUIET, JobSpec(name="x", argv=("true",)))
    fleet.run.add([recorded(HEAD_ID, tmp_path)])
    fleet.start()
    fleet.start()
    write = fleet.write

    async def slow_write() -> None:
        fleet.alarm.ring()
        await asyncio.sleep(0.2)
        await write()

    monkeypatch.setattr(fleet, "write", slow_write)
    with pytest.raises(SubmitError, match="QOSMaxSubmitJobPerUserLimit"):
        await fleet.scale(8)
    fleet.stop()


def test_run_keeps_the_last_64_jobs_that_ended_unasked(tmp_path: Path) -> None:
    jobs = make_run(tmp_path / "run", Slurm())
    jobs.add([Job(id=str(i)) for i in range(68)])
    jobs.cancelled(["66"], 1.0)
    jobs.retired("67", 1.0)
    for job_id in tuple(jobs.jobs):
        jobs.ended(job_id, f"exit code {job_id}", datetime(2026, 11, 21, 14, 5, tzinfo=UTC))
    assert [(job.id, job.why) for job in jobs.gone] == [(str(i), f"exit code {i}") for i in range(65, 1, -1)]
    assert jobs.jobs == {}


@pytest.mark.parametrize("notebook", [False, True])
def test_jobs_print_as_a_table(
    notebook: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A Console of rich writes to the notebook instead of the file (15.0)."""
    monkeypatch.setattr("rich.console._is_jupyter", lambda: notebook)
    jobs = Jobs((Job(id="12", text="UP 2/2", log="/home/me/slurm-12.out"),))
    header, row = str(jobs).splitlines()
    assert header.split() == ["job", "state", "has", "nodes", "log"]
    assert row.split() == ["12", "UP", "2/2", "workers", "1", "/home/me/slurm-12.out"]
    assert jobs._repr_html_().count("UP 2/2") == 1
    assert capsys.readouterr().out == ""


# --- Slurm answers as it did when one of its nodes was powered off


@pytest.fixture
def turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Turn:
    """Slurm's programs, and what brings them from one of these moments to another."""
    for name in ("squeue", "sinfo"):
        answers = [record.stdout for record in RECORDED if record.command.startswith(f"{name} ")]
        assert len(answers) == 3
        for moment, answer in enumerate(answers):
            (tmp_path / f"{name}.{moment}").write_text(answer)
        program(tmp_path / name, f'read -r moment < {tmp_path}/moment; cat "$0.$moment"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def to(moment: int) -> None:
        (tmp_path / "next").write_text(f"{moment}\n")
        (tmp_path / "next").rename(tmp_path / "moment")

    to(UNNOTICED)
    return to


async def test_head_job_shows_its_lost_node(turn: Turn, tmp_path: Path) -> None:
    jobs = looked_after(tmp_path, Policy(), AGAIN)
    for moment, text in SHOWN.items():
        turn(moment)
        assert describe(await jobs.news(), date(2026, 11, 23)).text == text
    jobs.stop()


async def test_lost_node_of_a_job_that_keeps_the_others_is_named(turn: Turn) -> None:
    turn(DOWN)
    listed = {"1": JobStatus(JobState.RUNNING, "COMPLETING", trouble="in state COMPLETING")}
    before = {"1": ("node3", "node4")}
    assert (await on_lost_nodes(Slurm(), listed, (), before))["1"].trouble == "node4 is down: Not responding"
    assert await on_lost_nodes(Slurm(), listed, (), {}) == listed


@pytest.mark.parametrize(("job_id", "code"), [(ONE, ""), (TWO, ", exit code 143")])
async def test_a_job_that_ended_with_its_node_names_it(turn: Turn, job_id: str, code: str, tmp_path: Path) -> None:
    """Of two nodes, too, of which squeue does not say which one was lost."""
    turn(DOWN)
    jobs = looked_after(tmp_path, Policy(), job_id)
    with pytest.raises(JobError) as caught:
        await jobs.news()
    jobs.stop()
    ended = f"job {job_id} has ended: NODE_FAIL (NodeDown, node4 is down: Not responding){code}; "
    assert str(caught.value).startswith(ended)


async def test_member_job_shows_its_lost_node(turn: Turn, tmp_path: Path) -> None:
    seen: list[str] = []

    def look() -> None:
        seen.extend(describe(member, date(2026, 11, 23)).text for member in owned.members)

    owned = make_run(tmp_path / "run", Slurm())
    owned.add([Job(id=AGAIN, expected=1)])
    owned.target = 1
    policy = Policy(patience=Patience(ask_s=0.05, news_s=0.05))
    fleet = make_fleet(owned, policy, JobSpec(name="x", argv=("true",)), changed=look)
    for moment, text in SHOWN.items():
        turn(moment)
        await asyncio.to_thread(until, lambda text=text: text in seen, text)
    fleet.stop()


# --- scale and adapt in the words of Dask's and dask-jobqueue's users


@pytest.mark.parametrize(
    ("settings", "cores", "memory", "least", "most"),
    [
        (NODE, 32, None, 4, 4),
        (NODE, 33, None, 5, 4),
        (NODE, None, "32GiB", 2, 2),
        (NODE, None, 40 * GIB, 3, 2),
        (NODE, 8, "64GiB", 4, 1),
        (NODE, 0, None, 0, 0),
        (NODE, np.int64(16), None, 2, 2),
        (Settings(gpus_per_node=4, cores_per_gpu=8, workers_per_gpu=2), 32, None, 8, 8),
        (Settings(nthreads=4, sources=MappingProxyType({"nthreads": "keyword"})), 16, None, 4, 4),
        (Settings(memory_limit=Limit(8 * GIB)), None, "32GiB", 4, 4),
    ],
)
def test_cores_and_memory_become_workers(
    settings: Settings, cores: float | None, memory: Any, least: int, most: int
) -> None:
    assert workers_with(settings, cores, memory) == least
    assert workers_with(settings, cores, memory, most=True) == most


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cores": 8}, r"the number of cores of a worker is unknown; .* cores_per_gpu=.*scale\(jobs=n\)"),
        ({"memory": "8GB"}, r"the memory of a worker is unknown; .* memory= .*memory_limit="),
        ({"cores": "many"}, "cores='many' is no number of cores"),
        ({"cores": math.inf}, "cores=inf is no number of cores"),
        ({"memory": "much"}, "'much' is not a size"),
    ],
)
def test_workers_with_refuses_what_is_unknown(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workers_with(Settings(gpus_per_node=4), given.get("cores"), given.get("memory"))


def test_check_scale_takes_exactly_one_size() -> None:
    for n, jobs, cores, memory in ((0, None, None, None), (None, 2, None, None), (None, None, 8, None)):
        check_scale(n, jobs, cores, memory)
    check_scale(None, None, None, "1GB")
    check_scale(None, None, 8, "1GB")
    for wrong in ((), (2, 1), (2, None, 8, "1"), (2, None, 8), (-1,), (2.5,), ("2",), (True,), (None, -1), (None, 1.5)):
        with pytest.raises(ConfigError, match=r"^scale\(.*\); give one of them, 0 or more: n workers, jobs, or cores"):
            check_scale(*(*wrong, None, None, None, None)[:4])


def test_bounds_of_adapt() -> None:
    def of(**options: Any) -> dict[str, Any]:
        return bounds(NODE, 4, 2, options)

    assert of(minimum=1, maximum=9, interval="1s") == {"minimum": 1, "maximum": 9, "interval": "1s"}
    assert of(minimum_jobs=1, maximum_jobs=3) == {"minimum": 6, "maximum": 10}
    assert of(minimum_cores=9, maximum_cores=79) == {"minimum": 2, "maximum": 9}
    assert of(maximum_memory="64GiB", minimum=None) == {"maximum": 4}
    for wrong in ({"minimum": 5, "maximum": 2}, {"minimum": -1}, {"maximum": "9"}):
        with pytest.raises(ConfigError, match=r"adapt: minimum .*, maximum .*; give 0 or more"):
            of(**wrong)
    with pytest.raises(ConfigError, match="adapt: maximum is given in two ways"):
        of(maximum=3, maximum_jobs=3)
    with pytest.raises(ConfigError, match=r"minimum_jobs='2' is no number of jobs"):
        of(minimum_jobs="2")


# --- one end for all jobs


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, state: str, scancel: str) -> None:
    """Put a squeue that knows job 7 in this state, and a scancel."""
    program(folder / "squeue", f"[ -e {folder}/over ] || echo '7|{state}|0|N/A||None|'")
    program(folder / "scancel", scancel)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def close(job: Job, said: list[str], grace_s: float, limit_s: float = 60.0) -> None:
    if grace_s:
        asyncio.run(ending.close_head(Slurm(), job, said.append, grace_s=grace_s, limit_s=limit_s))
    else:
        asyncio.run(ending.close(Slurm(), [job], limit_s, said.append))


def test_close_refused_cancel_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, "RUNNING", "echo 'scancel: error: Invalid user' >&2; exit 1")
    job = Job(id="7", log="", exit_file=str(tmp_path / "exit"))
    limit_s = scaled(1.5)  # all of it passes each time; a busy machine starts both programs within it
    for grace_s in (0.0, 0.1):
        with pytest.raises(SubmitError, match=r"job 7 may still exist: .*hpcgpu stop 7"):
            close(job, [], grace_s, limit_s)
    Path(job.exit_file).write_text("0\n")
    close(job, [], 0.1, limit_s)
    with pytest.raises(SubmitError, match="job 7 may still exist"):
        close(job, [], 0.0, limit_s)


@pytest.mark.parametrize(("state", "grace_s"), [("PENDING", 600.0), ("RUNNING", 0.1), ("RUNNING", 0.0)])
def test_close_cancels_a_job_after_its_grace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, grace_s: float
) -> None:
    programs(tmp_path, monkeypatch, state, f"touch {tmp_path}/over")
    said: list[str] = []
    close(Job(id="7", log=""), said, grace_s)
    assert (tmp_path / "over").exists()
    assert said == []


async def test_a_job_that_ends_by_itself_is_not_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, "RUNNING", f"touch {tmp_path}/cancelled")
    closing = asyncio.create_task(ending.close_head(Slurm(), Job(id="7", log=""), print, grace_s=60.0))
    await asyncio.sleep(0.2)
    (tmp_path / "over").touch()
    await closing
    assert not (tmp_path / "cancelled").exists()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A squeue that never answers, and the file with its processes' ids."""
    program(tmp_path / "squeue", f"echo $$ >> {tmp_path}/asked\nexec sleep 600")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "asked"


async def test_a_job_has_ended_with_its_script_though_nobody_answers(asked: Path, tmp_path: Path) -> None:
    said: list[str] = []
    exit_file = tmp_path / "exit"
    job = Job(id="7", exit_file=str(exit_file))
    closing = asyncio.create_task(ending.close_head(Slurm(), job, said.append))
    await asyncio.to_thread(until, asked.exists, "squeue is asked")
    exit_file.write_text("0\n")  # from here on the file is the only sign of the end
    assert not await asyncio.wait_for(closing, scaled(30))  # squeue alone is waited for for a minute
    assert said == ["job 7: its script has ended with exit code 0; the batch system does not answer"]
    (pid,) = asked.read_text().split()
    await when(lambda: not Path(f"/proc/{pid}").exists())  # squeue has been ended


# --- what the batch system is asked


@pytest.mark.parametrize(
    ("system", "submits", "job_id", "lost"),
    [
        (Slurm(), "sbatch", "8", ("SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_GPUS", "SBATCH_WAIT")),
        (Slurm(), "sbatch", "8", ("SBATCH_GPUS_PER_TASK", "SBATCH_TRES_PER_TASK", "SBATCH_CPUS_PER_GPU")),
        (Pbs(), "qsub", "8.login01", ("PBS_DPREFIX", "PBS_SHELL")),
    ],
)
async def test_submit_with_variables_of_the_shell_lets_options_win(
    system: Any, submits: str, job_id: str, lost: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sbatch ranks SBATCH_* above the script; an account without a keyword stays the shell's."""
    program(tmp_path / submits, f"env > {tmp_path}/seen; echo {job_id}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in (*lost, "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "5")
    lines: list[str] = []
    spec = JobSpec(name="a", argv=("b",), queue="main", walltime_s=1200, gpus_per_node=2, cpus_per_task=1)
    for _ in range(2):
        assert await submit(system, spec, system.script(spec), lines.append, Patience()) == (job_id,)
    seen = (tmp_path / "seen").read_text()
    assert "SBATCH_ACCOUNT=5" in seen
    assert [name for name in lost if f"{name}=" in seen] == []
    assert len(lines) == 1
    assert all(name in lines[0] for name in lost)


async def test_squeue_with_variables_of_the_shell_lists_all_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(tmp_path / "squeue", f'env > {tmp_path}/seen; echo "8|RUNNING|0:0|N/A|n1|None"')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("SQUEUE_PARTITION", "SQUEUE_USERS", "SLURM_TIME_FORMAT", "SLURM_CONF"):
        monkeypatch.setenv(name, "low")
    assert (await batch_client.ask(Slurm(), ["8"]))["8"].state is JobState.RUNNING
    seen = (tmp_path / "seen").read_text()
    assert "SQUEUE_" not in seen
    assert "SLURM_TIME_FORMAT" not in seen
    assert "SLURM_CONF=low" in seen

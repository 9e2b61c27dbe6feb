"""Jobs that come and go at sites whose programs refuse, answer late, or answer in sentences: Slurm's and PBS's."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fleets import Silent, make_fleet, make_run
from programs import program
from recordings import block, listing
from waiting import when

from hpcgpu.batch import BatchSystem, Pbs, Slurm
from hpcgpu.deploy.jobs import batch_client, ending
from hpcgpu.deploy.jobs.fleet import Fleet
from hpcgpu.errors import SubmitError
from hpcgpu.model import JobSpec, Patience
from hpcgpu.plan.jobs.job import Job
from hpcgpu.plan.jobs.reconcile import Policy

SOON = Policy(patience=Patience(ask_s=0.05, news_s=0.05, refused_s=0.05, retries_s=(0.0, 0.0)))
SPEC = JobSpec(name="x", argv=("true",), mark="hpcgpu-0123456789abcdef")
REFUSED = "too many requests"


@dataclass(frozen=True)
class Site:
    """A site's programs, which answer from files of a folder."""

    folder: Path
    system: BatchSystem
    submit: str
    poll: str
    find: str  # what it prints of job 1 for a search by name and mark
    sentence: str

    def list(self, **states: str) -> None:
        """Let the programs list jobs ``_1=...`` in these states, ``R`` or ``F``."""
        jobs = {name.removeprefix("_"): state for name, state in states.items()}
        words = {"R": "RUNNING|0|N/A|node1", "F": "CANCELLED|15|N/A|"}
        text = "".join(f"1:00:00|{i}|{words[s]}|None|\n" for i, s in jobs.items())
        if self.poll == "qstat":
            fields = {"Exit_status": "271"}  # a recorded job, with a walltime of an hour
            text = listing("release", [block("release", f"{i}.login01", s, fields) for i, s in jobs.items()])
        (self.folder / "new").write_text(text)
        (self.folder / "new").rename(self.folder / "listed")

    def id(self, number: int) -> str:
        return str(number) if self.poll == "squeue" else f"{number}.login01"

    @property
    def submissions(self) -> int:
        file = self.folder / "submitted"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def refuse(self, program_name: str, words: str = REFUSED) -> None:
        (self.folder / f"{program_name}.refuses").write_text(words)


@pytest.fixture(params=["slurm", "pbs"])
def site(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    slurm = Site(tmp_path, Slurm(), "sbatch", "squeue", f"1|{SPEC.mark}|", "Your job 1 is on its way, have fun")
    pbs = Site(tmp_path, Pbs(), "qsub", "qstat", "1.login01", "Job 1.login01 has been submitted")
    at = slurm if request.param == "slurm" else pbs
    (tmp_path / "found").write_text("")
    at.list()
    fails = '[ ! -e "$0.refuses" ] || { cat "$0.refuses" >&2; exit 1; }'
    count = f"echo >> {tmp_path}/submitted; n=$(wc -l < {tmp_path}/submitted)"
    answer = "echo $n" if at is slurm else "echo $n.login01"
    search = f"echo >> {tmp_path}/searches; cat {tmp_path}/found"
    poll = f'echo "$QSCACHE_BYPASS" >> {tmp_path}/exact; cat {tmp_path}/listed'
    bodies = {at.submit: f"{count}; [ ! -e {tmp_path}/says ] || {{ cat {tmp_path}/says; exit 0; }}; {answer}"}
    bodies[at.poll] = f'case "$*" in *--me*) {search};; *) {poll};; esac'
    bodies |= {"qselect": search, **dict.fromkeys(("sinfo", "pbsnodes", "scancel", "qdel", "sacct"), "true")}
    for name, body in bodies.items():
        program(tmp_path / name, f"{fails}\n{body}")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return at


async def with_a_running_job(site: Site, said: list[str]) -> Fleet:
    fleet = make_fleet(make_run(site.folder / "run", site.system), SOON, SPEC, say=said.append)
    site.list(_1="R")
    await fleet.scale(1)
    await when(lambda: fleet.run.not_ended == [site.id(1)])
    return fleet


async def test_refused_polls_end_no_replacement(site: Site) -> None:
    said: list[str] = []
    fleet = await with_a_running_job(site, said)
    site.refuse(site.poll)
    await when(lambda: any(REFUSED in line for line in said))
    assert fleet.error is None  # wait_for_workers would raise it
    site.list(_1="F", _2="R")
    (site.folder / f"{site.poll}.refuses").unlink()
    await when(lambda: fleet.run.not_ended == [site.id(2)])
    fleet.stop()
    assert sum(REFUSED in line for line in said) == 1


async def test_walltime_of_the_batch_system_is_told_and_kept(site: Site) -> None:
    said: list[str] = []
    fleet = make_fleet(make_run(site.folder / "run", site.system), SOON, SPEC, say=said.append)
    site.list(_1="R")
    await fleet.scale(1)
    await when(lambda: [job.limit_s for job in fleet.run.members] == [3600])
    await when(lambda: bool(said))
    fleet.stop()
    assert said == [f"job {site.id(1)} has a walltime of 01:00:00, though none was requested"]


async def test_worker_of_a_retired_job_that_comes_late_leaves_too(site: Site) -> None:
    """The first worker of two had registered when the job was retired."""
    asked: list[str] = []

    class Retiring(Silent):
        async def hpcgpu_retire(self, workers: list[str]) -> None:
            asked.extend(workers)

    workers: dict[str, Any] = {}
    calls = {"scheduler": Retiring, "workers": lambda: workers}
    fleet = make_fleet(make_run(site.folder / "run", site.system), SOON, SPEC, **calls)
    site.list(_1="R")
    await fleet.scale(1)
    workers["first"] = {"name": f"{site.id(1)}-0"}
    await fleet.scale(0)
    await when(lambda: asked == ["first"])
    workers["late"] = {"name": f"{site.id(1)}-1"}
    fleet.alarm.ring()
    await when(lambda: asked == ["first", "late"])
    fleet.stop()


async def submit(site: Site, said: list[str], past_ids: Any = ()) -> tuple[str, ...]:
    script = site.system.script(SPEC)
    return await batch_client.submit(site.system, SPEC, script, said.append, SOON.patience, past_ids)


async def test_sentence_without_an_id_is_searched_for(site: Site) -> None:
    said: list[str] = []
    (site.folder / "says").write_text(f"{site.sentence}\n")
    with pytest.raises(SubmitError) as caught:
        await submit(site, said)
    assert caught.value.unsure
    assert site.sentence in str(caught.value)
    (site.folder / "found").write_text(f"{site.find}\n")
    site.list(_1="R")
    assert await submit(site, said) == (site.id(1),)
    assert site.submissions == 2  # each once
    assert "searches for it" in said[0]
    assert "1" in (site.folder / "exact").read_text().split()


async def test_job_found_but_not_listed_is_not_submitted_twice(site: Site) -> None:
    (site.folder / "says").write_text(f"{site.sentence}\n")
    (site.folder / "found").write_text(f"{site.find}\n")
    with pytest.raises(SubmitError):
        await submit(site, [])
    with pytest.raises(SubmitError, match="does not list it yet"):
        await batch_client.look(site.system, SPEC.name, SPEC.mark, ())
    assert site.submissions == 1


def lose_answers(site: Site, name: str = "", count: str = "submitted") -> str:
    """Let a program, the submission's, fail though it may have done its work; return its message."""
    unsure = "Zero Bytes were transmitted or received" if site.submit == "sbatch" else "qsub: Batch Protocol error"
    code = 183 if site.submit == "qsub" else 1
    program(site.folder / (name or site.submit), f'echo >> {site.folder}/{count}; echo "{unsure}" >&2; exit {code}')
    return unsure


async def test_job_of_a_lost_answer_is_awaited_in_cached_lists(site: Site) -> None:
    unsure, said = lose_answers(site), list[str]()
    cached = replace(SOON, patience=replace(SOON.patience, unlisted_s=300.0))
    fleet = make_fleet(make_run(site.folder / "run", site.system), cached, SPEC, say=said.append)
    for _ in range(2):
        with pytest.raises(SubmitError, match=unsure):
            await fleet.scale(1)
    await when(lambda: (site.folder / "searches").read_text().count("\n") > 5)
    assert site.submissions == 1
    assert not any(unsure in line for line in said[2:])  # after the first call's two searches only calls raise it
    (site.folder / "found").write_text(f"{site.find}\n")  # the list is renewed
    site.list(_1="R")
    await when(lambda: fleet.run.not_ended == [site.id(1)])
    fleet.stop()


async def test_lost_submission_is_repeated_when_no_list_has_its_job(site: Site) -> None:
    lose_answers(site)
    soon = replace(SOON, patience=replace(SOON.patience, unlisted_s=0.05))
    fleet = make_fleet(make_run(site.folder / "run", site.system), soon, SPEC)
    with pytest.raises(SubmitError):
        await fleet.scale(1)
    await when(lambda: site.submissions == 2)
    fleet.stop()


async def test_submission_is_not_repeated_if_the_search_is_refused(site: Site) -> None:
    unsure = lose_answers(site)
    site.refuse("squeue" if site.submit == "sbatch" else "qselect")
    with pytest.raises(SubmitError, match=unsure):
        await submit(site, [])
    assert site.submissions == 1


async def test_refusal_shows_all_that_a_wrapper_says(site: Site) -> None:
    program(site.folder / site.submit, "echo 'line 1'; echo 'line 2'; echo 'see above' >&2; exit 1")
    with pytest.raises(SubmitError, match="see above\nline 1\nline 2\n"):
        await submit(site, [])


async def test_arrays_shrink_to_what_the_queue_takes(site: Site) -> None:
    array = "0-[3-9]"
    refusal = (
        "Invalid job array specification" if site.submit == "sbatch" else "Array job exceeds server or queue size limit"
    )
    body = f'grep -q -e "{array}" && {{ echo "{refusal}" >&2; exit 3; }}; echo >> {site.folder}/submitted'
    number = f"n=$(wc -l < {site.folder}/submitted)"
    program(site.folder / site.submit, f"{body}; {number}; echo $n{'[].login01' if site.submit == 'qsub' else ''}")
    many = Slurm(array_limit=100) if site.submit == "sbatch" else Pbs(array_limit=100)
    submitter = batch_client.Submitter(many, SPEC, print, SOON.patience)
    assert [len(jobs) async for jobs in submitter.submit(9, ())] == [2, 2, 2, 2, 1]
    assert [len(jobs) async for jobs in submitter.submit(3, ())] == [2, 1]
    limited = batch_client.Submitter(replace(many, array_limit=2), SPEC, print, SOON.patience)
    assert [len(jobs) async for jobs in limited.submit(3, ())] == [2, 1]


async def test_end_of_jobs_is_asked_for_past_caches(site: Site) -> None:
    site.list(_1="F")
    await ending.close(site.system, [Job(id=site.id(1))], 5.0, print)
    assert (site.folder / "exact").read_text().split() == ["1"]


async def test_job_cancelled_without_an_answer_ends_on_request(site: Site) -> None:
    """The program may have been killed, or one of several cancels refused: the job ends, and not by itself."""
    said: list[str] = []
    fleet = await with_a_running_job(site, said)
    unsure = lose_answers(site, "scancel" if site.submit == "sbatch" else "qdel", "cancels")
    with pytest.raises(SubmitError, match=unsure):
        await fleet.scale(0)
    await when(lambda: (site.folder / "cancels").read_text().count("\n") > 1)  # as long as it is listed
    site.list(_1="F")
    await when(lambda: not fleet.run.members)
    fleet.stop()
    assert any(line.startswith(f"job {site.id(1)}: ended on request (") for line in said)
    assert not fleet.run.gone

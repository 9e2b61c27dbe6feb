"""The contract of every batch system: scripts as golden files and as they run, readers on every recorded output."""

import json
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from golden import check_golden
from hypothesis import example, given, settings
from hypothesis import strategies as st
from paths import BATCH
from programs import program
from recordings import Record, records
from waiting import scaled

from hpcgpu import batch
from hpcgpu.batch import BatchSystem, Pbs, Slurm, slurm
from hpcgpu.cli.commands import plan
from hpcgpu.config.sites.read import read_site
from hpcgpu.deploy.cluster import classes as clusters
from hpcgpu.deploy.site_files import templates
from hpcgpu.errors import ConfigError, SubmitError
from hpcgpu.host.run import run_sync
from hpcgpu.model import JobSpec, JobState, Result, site
from hpcgpu.plan.jobs.job_text import format_status

SYSTEMS = sorted(batch.SYSTEMS)
FILES = [(name, path) for name in SYSTEMS for path in sorted((BATCH / name).glob("*/*.txt"))]
# Of another form: each qdel of two ids, one of them unknown, ended the server.
FILES = [(name, path) for name, path in FILES if path.stem != "17-qdel-many"]
SPEC = JobSpec(
    name="svd",
    argv=("/opt/env/bin/hpcgpu", "launch", "--document", '{"shape": "gang", "what": "it\'s $HOME"}'),
    **{"nodes": 2, "tasks_per_node": 4, "cpus_per_task": 8, "gpus_per_node": 4, "memory_per_node_bytes": 200 << 30},
    **{"queue": "gpu", "account": "proj", "walltime_s": 7200},
    prologue=("module load cuda",),
    log_directory="/scratch/user1/logs",
    exit_file="/scratch/user1/logs/exit",
)
DIALECTS: dict[str, BatchSystem] = {
    "slurm": Slurm(),
    "slurm-gres": Slurm(gpus="gres", gpu_type="a100", cpus=False),
    "slurm-whole-nodes": Slurm(gpus="none", memory="none"),
    "pbs": Pbs(),
    "pbs-whole-nodes": Pbs(gpus="none", mpiprocs=False, resources="system=polaris"),
    "pbs-totals": Pbs(select=False, cpus_multiple_of=12, direct_output=False, resources="storage=gdata/a1"),
}
INDEXES = st.sets(st.integers(0, 1000), min_size=1)
OPEN = ("transient", "over_limit", "unsure", "over_size")
SLURMS = sorted(path.parent.name for path in (BATCH / "slurm").glob("*/squeue.json"))
TOO_LARGE, TOO_MANY = "22.05.8/02-sbatch-refused.txt", "22.05.8/03-sbatch-limit.txt"
DOWN = next(r for r in records(BATCH / "pbs/release/33-server-trouble.txt") if "pbs_server down" in r.command)
CODES = {"768": 3, "9": 137, "0:15": 143, "2:0": 2, "": None}
# Of a held array, one element of which a node has refused: another one, which never was there, has its comment.
SICK = "Job Array Held, too many failed attempts to run subjob 7[4].a"
RESERVED = "ReqNodeNotAvail, Reserved for maintenance"
WAITS = "Not Running: Job would conflict with reservation or top job"
SHORTER = "a shorter walltime=, or another queue="
LEAVES = {"state": JobState.RUNNING, "is_ending": True}
WORDS = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12)
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
NASTY = [
    *("$(id)", "`id`", "it's", 'say "hi"', "a\\b\\", "two  words", "$HOME", "!!"),
    *("é日本", "-n", "a\nb", "*", "~", "#x", ""),
]
# A rank: it says that it listens, says each signal, and ends with the code of its last argument when told so.
RANK = """
import os, signal, sys
signals = {signal.SIGUSR1, signal.SIGTERM}
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
with open(sys.argv[1], "w") as out:
    print("listens", file=out, flush=True)
    for _ in range(int(sys.argv[2])):
        print(signal.Signals(signal.sigwait(signals)).name, file=out, flush=True)
sys.exit(int(sys.argv[3]))
"""
REPLAYED = [
    ("slurm", "22.05.8/02-sbatch-refused.txt", "nosuch", "Invalid partition name specified"),
    ("slurm", "22.05.8/12-controller-hangs.txt", "sbatch", "Socket timed out"),
    ("pbs", "head/02-qsub-bad-queue.txt", "nosuch", "Unknown queue"),
    ("pbs", "release/02-qsub-bad-queue.txt", "closed", "Queue is not enabled"),
    ("pbs", "release/03-qsub-bad-resource.txt", "has space", "illegal -N value"),
]


def options(script: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in script.splitlines() if line.startswith(("#SBATCH ", "#PBS "))]


@pytest.mark.parametrize("name", [*DIALECTS, "slurm-array", "pbs-array"])
def test_script(name: str) -> None:
    spec = replace(SPEC, count=16, warn_s=600, nodes=1) if name.endswith("-array") else SPEC
    script = DIALECTS[name.removesuffix("-array")].script(spec)
    check_golden(BATCH / "golden" / "scripts" / f"{name}.sh", script)


def said(system: BatchSystem, record: Record) -> list[str]:
    """What the readers make of one record, as lines for a golden file."""
    result = Result(tuple(record.command.split()), record.returncode, record.stdout, record.stderr)
    lines = [f"$ {record.command.splitlines()[0][:100]}"]
    if "--test-only" in record.command:
        try:
            lines.append(f"  would start {system.read_test(result)}")
        except SubmitError as error:
            lines.append(f"  refused: {error}")
    elif re.search("qsub|sbatch", record.command) and not re.match(r"[A-Z]=\$\(|cd ", record.command):
        try:
            lines.append(f"  submitted: {system.read_submit(result)}")
        except SubmitError as error:
            words = "\n".join(str(error).splitlines()[:3])
            lines.append(f"  {'passes' if error.transient else 'unsure' if error.unsure else 'refused'}: {words}")
    try:
        for job_id, s in system.read_status(result).items():
            starts = f" starts {s.starts}" if s.starts else ""
            instead = f" instead {s.advice}" if s.advice else ""
            trouble = f" trouble {s.trouble}" if s.trouble else ""
            said = f"{s.state.name} ({s.native}) exit {s.exit_code} {s.reason}{starts}{instead}{trouble}"
            lines.append(f"  {job_id}: {said}".rstrip())
    except SubmitError as error:
        if re.search("squeue|sacct|qstat", record.command):
            lines.append(f"  {'no answer' if error.transient else 'refused'}: {error}")
    if "sinfo --noheader --Node" in record.command:
        lines += [f"  {words}" for words in system.read_nodes(result).values()]
    elif record.command.startswith("sinfo"):
        lines += [f"  {offer}" for offer in system.read_offers(result)]
    if re.match(r"(SLURM_CONF=\S+ )?(scancel|qdel)", record.command):
        try:
            lines.append("  cancelled" if system.read_cancel(result) else "  gone already")
        except SubmitError as error:
            lines.append(f"  not cancelled: {error}")
    return lines


@pytest.mark.parametrize(("name", "path"), FILES, ids=[f"{n}-{p.parent.name}-{p.stem}" for n, p in FILES])
def test_every_recorded_output_is_read(name: str, path: Path) -> None:
    lines = [line for record in records(path) for line in said(batch.get(name), record)]
    check_golden(BATCH / "golden" / name / path.parent.name / path.name, "\n".join(lines) + "\n")


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(
    "text", ["", "garbage", "\x00\ufffd", "|||", "{", '"1.x": {', "Job id\n---\n", "1|X|y|N/A|n|z|\n"]
)
def test_whatever_is_said_is_read(name: str, text: str) -> None:
    system = batch.get(name)
    assert all(isinstance(s.state, JobState) for s in system.read_status(Result((), 0, text, text)).values())
    for returncode in (0, 1, 124, 127, 255):
        with pytest.raises(SubmitError):
            system.read_submit(Result((), returncode, text, text))


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_program_that_failed_is_said_in_its_words(name: str) -> None:
    system = batch.get(name)
    for read in (system.read_submit, system.read_status, system.read_cancel):
        late = Result(("x",), 124, "", "x: no answer in 60 s; it was killed")
        with pytest.raises(SubmitError, match="no answer in 60 s") as caught:
            read(late)
        assert caught.value.transient
        with pytest.raises(SubmitError, match="no such program") as caught:
            read(Result(("x",), 127, "", "x: there is no such program on this machine"))
        assert not caught.value.transient


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_batch_system_is_known_in_all_rooms(name: str) -> None:
    """What CONTRIBUTING.md says under "To add one"."""
    assert list((BATCH / name).glob("*/*.txt")), "no recorded outputs"
    assert issubclass(batch.SYSTEMS[name], site.DIALECTS[name])
    assert read_site(f"version: 2\nname: x\nbatch: {name}\n", "x").batch == name
    assert [c for c in vars(clusters).values() if getattr(c, "batch", None) == name], "no cluster class"
    assert name in next(p for p in plan.params if p.name == "batch").type.choices
    assert any(template.startswith(name) for template in templates()), "no template"


@given(INDEXES, INDEXES)
def test_elements_are_asked_for_by_their_array(some: set[int], others: set[int]) -> None:
    for name in SYSTEMS:
        for command in (batch.get(name).status(["1.a", "2.b"]), batch.get(name).history(["1.a", "2.b"])):
            assert {"1.a", "2.b"} <= set(re.split("[ ,=]", " ".join(command.argv)))
    slurm = ["9", *(f"12_{i}" for i in some), *(f"13_{i}" for i in others)]
    for question in (Slurm().status, Slurm().history):
        assert "--jobs=9,12,13" in question(slurm).argv
    pbs = ["9.a", *(f"12[{i}].a" for i in some), *(f"13[{i}].b-1.c" for i in others)]
    for question in (Pbs().status, Pbs().history):
        assert question(pbs).argv[-4:] == ("json", "9.a", "12[].a", "13[].b-1.c")
        assert "-t" in question(pbs).argv


@given(INDEXES, INDEXES)
def test_cancel_names_all_jobs_in_few_safe_commands(some: set[int], others: set[int]) -> None:
    (command,) = Slurm().cancel(["9", *(f"12_{i}" for i in some), *(f"13_{i}" for i in others)])
    assert command.argv[:2] == ("scancel", "9")
    assert [named(word) for word in command.argv[2:]] == [{f"12_{i}" for i in some}, {f"13_{i}" for i in others}]
    given = ["9.a", *(f"12[{i}].a" for i in some), *(f"13[{i}].a" for i in others)]
    words = [command.argv[1] for command in Pbs().cancel(given) if len(command.argv) == 2]
    assert len(words) == len(Pbs().cancel(given)) == 1 + holes(some) + holes(others)
    assert set().union(*map(named, words)) == set(given)


def named(word: str) -> set[str]:
    """Return the ids that ``12_[1-3,5]`` or ``12[1-3].a`` names."""
    found = re.fullmatch(r"(\d+_?)\[([\d,-]+)\](.*)", word)
    if not found:
        return {word}
    ends = [run.split("-") for run in found[2].split(",")]
    a, z = ("", "") if "_" in word else ("[", "]")
    return {f"{found[1]}{a}{i}{z}{found[3]}" for run in ends for i in range(int(run[0]), int(run[-1]) + 1)}


def holes(indexes: set[int]) -> int:
    return sum(i - 1 not in indexes for i in indexes)


def test_elements_of_an_array_by_their_index() -> None:
    assert all(batch.get(name).cancel([]) == () for name in SYSTEMS)
    assert Slurm().elements("12", 2) == ("12_0", "12_1")
    assert Pbs().elements("12[].a", 2) == ("12[0].a", "12[1].a")
    assert Slurm().elements("12", 1) == Pbs().elements("12", 1) == ("12",)


def recorded(name: str, path: str, words: str, nth: int = 0) -> Result:
    record = [r for r in records(BATCH / name / path) if words in r.command][nth]
    return Result(tuple(shlex.split(record.command)), record.returncode, record.stdout, record.stderr)


@pytest.mark.parametrize("version", SLURMS)
def test_array_elements_cancelled_before_start_have_ended(version: str) -> None:
    """Slurm lists no trace of them; the others of their array are there."""
    path = f"{version}/14-array-cancel.txt"
    first, other = re.findall(r"\d+", recorded("slurm", path, "squeue").argv[4])
    elements = Slurm().elements(first, 10)
    found = Slurm().read_status(recorded("slurm", path, "squeue"), (*elements, other, "999"))
    alive = [i for i in range(10) if found[f"{first}_{i}"].state is JobState.HELD]
    assert alive == [0, 4, 6, 7]
    assert {found[job_id].state for job_id in elements} == {JobState.HELD, JobState.ENDED}
    assert found[other].state is JobState.ENDED
    assert "999" not in found
    # Cancelled to the last one, the array itself is what is left in the list.
    found = Slurm().read_status(recorded("slurm", path, "squeue", 1), elements)
    assert {found[job_id].state for job_id in elements} == {JobState.ENDED}
    # What accounting does not list may run: it says of a running element that its array is pending (13).
    assert set(Slurm().read_status(recorded("slurm", path, "sacct"), elements)) == {other}


@pytest.mark.parametrize("build", ["head", "release"])
def test_the_state_of_a_pbs_array_is_not_that_of_its_elements(build: str) -> None:
    path = f"{build}/14-array.txt"
    parent = recorded("pbs", path, 'qstat -f -F json "$(cat .ja)"')
    array = Pbs().read_submit(recorded("pbs", path, "qsub -N arr"))
    elements = Pbs().elements(array, 10)
    assert f'"{array}"' in parent.stdout
    assert Pbs().read_status(parent, elements) == {}
    listed = Pbs().read_status(recorded("pbs", path, "qstat -t -f -F json"), elements)
    states = [listed[job_id].state for job_id in elements]
    assert (states[3], listed[elements[3]].exit_code) == (JobState.ENDED, 7)
    assert states.count(JobState.RUNNING) == 8
    assert set(listed) == set(elements)
    # Once the array is over the history has its elements; without one nothing names them, but they are gone with it.
    assert Pbs().read_status(recorded("pbs", path, 'qstat "$(cat .ja)"'), elements) == {}
    gone = Pbs().read_status(Result((), 153, "", f"qstat: Unknown Job Id {array}\n"), elements)
    assert {gone[job_id].state for job_id in elements} == {JobState.ENDED}
    if build == "head":
        ended = Pbs().read_status(recorded("pbs", path, 'qstat -xt -f -F json "$(cat .ja)"'))
        assert (ended[elements[3]].exit_code, ended[elements[7]].exit_code) == (7, 143)  # 271 is 256 + SIGTERM
        assert ended[elements[7]].reason.endswith("terminated by user1@login01")


def test_what_an_element_waits_for_is_its_own() -> None:
    """Its comment may be that of its array's start, and the state of a held array's element is Q."""
    listed = Pbs().read_status(recorded("pbs", "head/14-array.txt", "qstat -t -f -F json"))
    assert (listed["1031[9].login01"].state, listed["1031[9].login01"].reason) == (JobState.PENDING, "")
    held = Pbs().read_status(recorded("pbs", "run/43-elastic-held.txt", "qstat"))
    waits = [held[f"43[{i}].login01"] for i in (3, 4)]
    assert {(s.state, s.native) for s in waits} == {(JobState.HELD, "Q")}
    assert {s.reason for s in waits} == {"Job held by user1 on Sun Nov 22 06:15:57 2026"}
    assert [held[f"43[{i}].login01"].state for i in range(3)] == [JobState.RUNNING] * 3
    stuck, pending = ("head/37-held-too-many-attempts", "release/04-qsub-too-large"), ("release/06-qstat-json-Q",)
    for names, state in ((stuck, JobState.STUCK), (pending, JobState.PENDING)):
        for name in names:
            assert {s.state for s in Pbs().read_status(recorded("pbs", f"{name}.txt", "json")).values()} == {state}


def test_fields_of_a_job_become_words() -> None:
    answers = [r for r in records(BATCH / "pbs/run/70-waits-and-limits.txt") if r.command.startswith("qstat")]
    by_depend, held, later, runs, over, again, _ = (
        next(iter(Pbs().read_status(Result(("qstat",), r.returncode, r.stdout, r.stderr)).values())) for r in answers
    )
    assert format_status(by_depend) == "H, its dependency: afterok:3.login01@login01"
    assert format_status(held) == "H, by its user"
    assert (later.state, later.native, later.starts) == (JobState.PENDING, "W", "2026-11-28T06:41:00")
    assert (runs.limit_s, again.limit_s, over.limit_s) == (90, 90, None)
    assert format_status(over) == "F, its dependency was not met: afterok:3.login01@login01"

    def status(**fields: object) -> str:
        text = "".join(f'\n    "{k}":{json.dumps(v)},' for k, v in fields.items())
        return format_status(Pbs().read_status(Result((), 0, f'"7.a":{{{text}\n}}'))["7.a"])

    last_life = "Job run at Sat Nov 28 at 04:41 on (node1:ncpus=1)"
    assert status(job_state="Q", comment=last_life, run_count=5) == "Q, started 5 times"
    assert status(job_state="F", Exit_status=-17) == "F, Exit_status -17: a hook on its node rejected it"
    assert status(job_state="F", comment="x", Exit_status=-29) == "F, x, Exit_status -29: its walltime was over"
    assert status(job_state="X", comment="Subjob finished", Exit_status=1) == "X, Subjob finished"  # its array's code
    assert status(job_state="F", Exit_status=-99) == "F, Exit_status -99: PBS ended it"


def test_nodes_that_are_down_are_named_with_what_is_said_of_them() -> None:
    answers = [recorded("pbs", "run/66-pbsnodes-down.txt", "pbsnodes", nth) for nth in range(4)]
    down = {"node2": "node2 is down"}
    assert [Pbs().read_nodes(answer) for answer in answers] == [{}, down, down, {}]
    everything = recorded("pbs", "run/50-node-lost.txt", "pbsnodes")
    assert Pbs().read_nodes(everything) == {"node03": "node03 is down,job-exclusive"}
    running = Pbs().read_status(everything)
    assert (running["90[1].login01"].hosts, running["91.login01"].hosts) == (("node03",), ())
    gang = Pbs().read_status(recorded("pbs", "run/51-gang-two-hosts-running.txt", "qstat"))
    assert gang["89.login01"].hosts == ("node01", "node02")


def test_lost_node_is_named_for_jobs_in_each_state() -> None:
    """Running ones name theirs until Slurm gives the node up; of several nodes only sinfo says which; see 17."""
    path, (again, gone, both) = "22.05.8/17-node-died.txt", ("41", "42", "43")
    jobs = [Slurm().read_status(recorded("slurm", path, "squeue", nth)) for nth in range(3)]
    for listed in jobs[:2]:
        hosts = {i: s.hosts for i, s in listed.items()}
        assert hosts == {again: ("node4",), gone: ("node4",), both: ("node3", "node4")}
        assert not any(s.trouble for s in listed.values())
    assert jobs[2][both].hosts == ("node3", "node4")
    assert {i: format_status(s) for i, s in jobs[2].items()} == {
        gone: "NODE_FAIL, NodeDown, on node4",
        both: "exit code 143, NODE_FAIL, NodeDown, on node[3-4]",
        again: "PENDING, BeginTime",
    }
    nodes = [Slurm().read_nodes(recorded("slurm", path, "sinfo", nth)) for nth in range(3)]
    silent, down = {"node4": "node4 does not answer Slurm"}, {"node4": "node4 is down: Not responding"}
    assert nodes == [{}, silent, down]
    others = Result(("sinfo",), 0, "n1|down|none\nn2|idle|none\nn3|draining@|a|b\n")
    assert Slurm().read_nodes(others) == {"n1": "n1 is down"}
    assert Slurm().read_nodes(Result(("sinfo",), 1, "n1|down*|x\n", "Unable to contact slurm controller")) == {}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        *(("", ()), ("(null)", ()), ("None assigned", ()), ("login1", ("login1",))),
        ("n[1-2,07-08],m3", ("n1", "n2", "n07", "n08", "m3")),
        ("r[1-2]n[09-10]-ib", ("r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib")),
        ("n[x-]", ("n[x-]",)),
    ],
)
def test_a_list_of_nodes_is_that_of_their_names(text: str, nodes: tuple[str, ...]) -> None:
    assert slurm.node_names(text) == nodes


def number(field: Any) -> int:
    """Return a number of squeue's JSON, an object since 24.11; 0: not set."""
    return (field["number"] if field["set"] else 0) if isinstance(field, dict) else field or 0


def in_json(job: dict[str, Any]) -> Iterator[tuple[str, tuple[object, ...]]]:
    """Yield each id of a job of squeue's JSON, with what its text says of it."""
    state = job["job_state"] if isinstance(job["job_state"], str) else job["job_state"][0]
    code, array, index = job["exit_code"], number(job["array_job_id"]), job["array_task_id"]
    if isinstance(code, dict):
        killed = number(code["signal"]["id"])
        exit_code = 128 + killed if killed else number(code["return_code"])
    else:
        exit_code = 128 + code if 0 < code < 128 else code >> 8
    start, running = number(job["start_time"]), state == "RUNNING"
    facts = (
        state,
        job["state_reason"].replace("None", ""),
        None if running or state == "PENDING" else exit_code,
        datetime.fromtimestamp(start, UTC).isoformat()[:19] if start and state == "PENDING" else "",
        slurm.node_names(job["nodes"]) if running else (),
        number(job["time_limit"]) * 60 or None,
    )
    first, _, last = job["array_task_string"].partition("%")[0].partition("-")
    if first:
        yield from ((f"{array}_{i}", facts) for i in range(int(first), int(last) + 1))
    else:
        yield f"{array}_{number(index)}" if array else str(job["job_id"]), facts


@pytest.mark.parametrize("version", SLURMS)
def test_text_of_squeue_is_read_as_its_json(version: str) -> None:
    jobs = json.loads((BATCH / "slurm" / version / "squeue.json").read_text())
    listed = Slurm().read_status(recorded("slurm", f"{version}/21-squeue.txt", "--states=all"))
    of_text = {
        i: (s.native, s.reason.partition(":")[0], s.exit_code, s.starts, s.hosts, s.limit_s) for i, s in listed.items()
    }
    assert of_text == dict(pair for job in jobs for pair in in_json(job))
    assert len(of_text) == 9
    # and no comment is cut: a run's mark is one
    marked = [str(job["job_id"]) for job in jobs if job["comment"] == "c" * 200]
    comments = recorded("slurm", f"{version}/21-squeue.txt", "Comment")
    assert marked == [*Slurm().read_found(comments, "c" * 200)] != []


@pytest.mark.parametrize("version", SLURMS)
def test_expected_start_of_a_pending_job_is_slurms(version: str) -> None:
    (before, after) = (recorded("slurm", f"{version}/18-starts.txt", "squeue", nth) for nth in (0, 1))
    (job_id,) = Slurm().read_status(before)
    assert Slurm().read_status(before)[job_id].starts == ""
    assert re.fullmatch(r"2026-\d\d-\d\dT[\d:]{8}", Slurm().read_status(after)[job_id].starts)


def test_expected_start_of_a_pending_job_is_that_of_pbs() -> None:
    text = '"7.a":{\n  "job_state":"Q",\n  "estimated":{\n    "exec_vnode":"(n1)",\n    "start_time":1795208245\n  }\n}'
    assert Pbs().read_status(Result((), 0, text))["7.a"].starts == datetime.fromtimestamp(1795208245).isoformat()
    text = text.replace("1795208245", '"Fri Nov 20 20:57:25 2026"')
    assert Pbs().read_status(Result((), 0, text))["7.a"].starts == "2026-11-20T20:57:25"


def test_jobs_are_found_by_their_mark_and_by_no_other_text() -> None:
    listed = "8_0|hpcgpu-a.b|\n8_1|hpcgpu-a.b|\n9|(null)|\n10|hpcgpu-axb|\n11|12|hpcgpu-a.b|\n12|my hpcgpu-a.b|\n"
    assert Slurm().read_found(Result(("squeue",), 0, listed), "hpcgpu-a.b") == ("8_0", "8_1")
    with pytest.raises(SubmitError, match="Unable to contact slurm controller"):
        Slurm().read_found(Result(("squeue",), 1, "", "slurm_load_jobs error: Unable to contact slurm controller"), "a")
    spec = JobSpec(name="x", argv=("true",), mark="hpcgpu-a.b")
    assert "#SBATCH --comment=hpcgpu-a.b\n" in Slurm().script(spec)


def test_jobs_of_pbs_are_found_by_a_name_of_their_own() -> None:
    spec = JobSpec(name="svd", argv=("true",), mark="hpcgpu-0123456789abcdef")
    assert "#PBS -N svd-89abcdef\n" in Pbs().script(spec)
    assert Pbs().log(spec, "12.a") == "svd-89abcdef.o12"
    assert Pbs().find(spec.name, spec.mark).argv == ("qselect", "-N", "svd-89abcdef")
    listed = Result(("qselect",), 0, "12.a\n13[].b-1.c\n14.a@b.c\n")
    assert Pbs().read_found(listed, spec.mark) == ("12.a", "13[].b-1.c", "14.a")
    assert Pbs().status(["13[].b-1.c"]).argv[1] == "-t"
    with pytest.raises(SubmitError, match="qselect did not answer: Connection refused"):
        Pbs().read_found(Result(("qselect",), 162, "", "Connection refused\n"), spec.mark)


@pytest.mark.parametrize("answer", ["12", "12;big", "Submitted batch job 12", "Submitted batch job 12 on cluster big"])
def test_sbatchs_answer_is_read_between_a_wrappers_lines(answer: str) -> None:
    pages = f"Welcome to job 7\n--> Verifying valid ssh keys...OK\n{answer}\nHave fun\n"
    assert Slurm().read_submit(Result(("sbatch",), 0, pages)) == "12"


def sbatch(message: str) -> Result:
    return Result(("sbatch",), 1, "", f"sbatch: error: {message}\n")


def qsub(code: int, message: str = "trouble") -> Result:
    return Result(("qsub",), code, "", f"qsub: {message}\n")


REFUSALS = [
    (recorded("slurm", TOO_LARGE, "--array=0-1001"), "Invalid job array specification", "over_size"),
    (recorded("slurm", TOO_MANY, "--qos=one --hold --array"), "QOSMaxSubmitJobPerUserLimit", "transient over_limit"),
    (recorded("slurm", TOO_MANY, "--hold --array=0-1 ", -1), "AssocMaxSubmitJobLimit", "over_limit"),
    (sbatch("Unable to contact slurm controller (connect failure)"), "connect failure", "transient"),
    (sbatch("Slurm temporarily unable to accept job, sleeping and retrying"), "temporarily", "transient"),
    (sbatch("Unable to contact slurm controller (receive failure)"), "receive failure", "transient unsure"),
    (sbatch("Socket timed out on send/recv operation"), "timed out", "transient unsure"),
    (recorded("pbs", "run/70-waits-and-limits.txt", "qsub"), "Array job exceeds", "over_size"),
    *((qsub(code), "trouble", "transient over_limit") for code in (38, 39)),
    (qsub(159, "cannot connect to server login01 (errno=15007)"), "cannot connect", "transient"),
    (qsub(162, DOWN.stderr), "cannot connect", "transient"),
    (qsub(170), "trouble", ""),
    *((qsub(code), "trouble", "transient unsure") for code in (124, 183)),
]


@pytest.mark.parametrize(("result", "message", "flags"), REFUSALS)
def test_refused_submission_tells_what_is_left_open(result: Result, message: str, flags: str) -> None:
    system = Slurm() if result.argv[0] == "sbatch" else Pbs()
    with pytest.raises(SubmitError, match=message) as caught:
        system.read_submit(result)
    assert [flag for flag in OPEN if getattr(caught.value, flag)] == flags.split()


def fields(**of_job: object) -> str:
    """Return qstat's lines for job 7.a."""
    return '"7.a":{\n' + "".join(f"    {json.dumps(k)}:{json.dumps(v, indent=8)},\n" for k, v in of_job.items()) + "}\n"


STATUSES: list[tuple[str, dict[str, object]]] = [
    *((f"|7|FAILED|{code}|N/A|n1|None|", {"exit_code": exit_code}) for code, exit_code in CODES.items()),
    ("1:30:00|7|RUNNING|0|N/A|n1|None|", {"state": JobState.RUNNING, "limit_s": 5400}),
    ("2-00:00:00|7|RUNNING|0|N/A|n1|None|", {"limit_s": 172800}),
    *((f"{limit}|7|RUNNING|0|N/A|n1|None|", {"limit_s": None}) for limit in ("UNLIMITED", "Partition_Limit")),
    (f"1:00|7|PENDING|0|N/A||{RESERVED}|", {"state": JobState.PENDING, "advice": SHORTER}),
    (fields(job_state="Q", comment=WAITS), {"state": JobState.PENDING, "advice": SHORTER}),
    (fields(job_state="H").replace("7.a", "7[].a") + fields(job_state="Q", comment=SICK), {"state": JobState.STUCK}),
    ("7|DREAMING|0|N/A||None|", {"state": JobState.UNKNOWN}),
    (fields(job_state="%", comment='a "b"'), {"state": JobState.UNKNOWN, "native": "%", "reason": 'a "b"'}),
    # variables of a job's environment are no facts about it
    (fields(job_state="F", Env={"comment": "no", "Exit_status": 1}), {"reason": "", "exit_code": None}),
    # for long in a slow epilog, or where the output cannot be written; and shortly when the job is requeued
    ("7|COMPLETING|15|N/A|node1|None|", LEAVES | {"trouble": "in state COMPLETING", "hosts": ()}),
    (fields(job_state="E"), LEAVES | {"trouble": "in state E"}),
]


@pytest.mark.parametrize(("text", "facts"), STATUSES)
def test_status_has_what_the_answer_tells(text: str, facts: dict[str, object]) -> None:
    (status,) = (Pbs() if '"' in text else Slurm()).read_status(Result(("squeue",), 0, text)).values()
    assert {name: getattr(status, name) for name in facts} == facts


@pytest.mark.parametrize(
    ("system", "extra", "skip", "there", "gone"),
    [
        (Slurm(), ("--constraint=a100", "-C x"), (), ["--constraint=a100", "--constraint=x"], []),
        (Slurm(), ("--tres-per-task=license/x:1", "--gres=nvme:1"), (), ["--gres=nvme:1", "--gpus-per-node=4"], []),
        (Slurm(), ("-A other",), (), ["--account=other"], ["--account=proj"]),
        (Slurm(), ("--exclusive", "-q debug -N 3"), (), ["--exclusive", "--qos=debug", "--nodes=3"], ["--nodes=2"]),
        (Slurm(), ("--time=30",), (), ["--time=30"], ["--time=02:00:00"]),  # sbatch's own words
        (Slurm(), ('--comment="two words"',), (), ['--comment="two words"'], []),
        (Slurm(), (), ("-N", "--mem"), ["--ntasks-per-node=4", "--job-name=big-N-mem"], ["--nodes=2", "--mem=204800M"]),
        (Slurm(), (), ("-n",), ["--job-name=big-N-mem", "--ntasks-per-node=4", "--partition=gpu"], []),
        (Pbs(), (), ("-n",), ["-N big-N-mem", "-q gpu", "-l place=scatter"], []),
        (Slurm(), (), ("--mem=4G",), [], ["--mem=204800M"]),
        (Pbs(), ("-l filesystems=home:eagle",), (), ["-l filesystems=home:eagle", "-l place=scatter"], []),
        (Pbs(), ("-l place=free",), (), ["-l place=free"], ["-l place=scatter"]),
        (Pbs(), ("-l walltime=1:00,place=free",), (), ["-l walltime=1:00", "-l place=free"], ["-l place=scatter"]),
        (Pbs(), (), ("-l walltime",), ["-l place=scatter"], ["-l walltime=02:00:00"]),
        (Pbs(), (), ("-l",), ["-N big-N-mem"], ["-l walltime=02:00:00", "-l place=scatter"]),
    ],
)
def test_options_are_compared_as_options(
    system: BatchSystem, extra: tuple[str, ...], skip: tuple[str, ...], there: list[str], gone: list[str]
) -> None:
    spec = replace(SPEC, name="big-N-mem", extra_directives=extra, skipped_directives=skip)
    found = options(system.script(spec))
    assert [o for o in there if o not in found] == []
    assert [o for o in gone if o in found] == []


@pytest.mark.parametrize(
    ("extra", "mine", "instead"),
    [
        ("--gpus-per-task=1", "--gpus-per-node=4", "gpus_per_node="),
        ("--tres-per-task=gres/gpu:a100:1", "--gpus-per-node=4", "gpus_per_node="),
        ("--gres=nvme:1,gpu:2", "--gpus-per-node=4", "gpus_per_node="),
        ("--tres-per-task=cpu=2", "--cpus-per-task=8", "cores_per_gpu="),
        ("--cpus-per-gpu=2", "--cpus-per-task=8", "cores_per_gpu="),
        ("--ntasks-per-gpu=2", "--ntasks-per-node=4", "workers_per_gpu="),
    ],
)
def test_option_that_rivals_hpcgpus_own_is_refused(extra: str, mine: str, instead: str) -> None:
    spec = replace(SPEC, extra_directives=(extra,))
    with pytest.raises(ConfigError) as refused:
        Slurm().script(spec)
    assert f"'{extra}' requests what hpcgpu requests by '{mine}'" in str(refused.value)
    assert f"leave it out, and give {instead}; or" in str(refused.value)
    option = mine.partition("=")[0]
    assert f"job_directives_skip=['{option}']" in str(refused.value)
    lines = options(Slurm().script(replace(spec, skipped_directives=(option,))))
    assert (extra in lines, mine in lines) == (True, False)


@pytest.mark.parametrize("text", ["", "constraint=a100", "--comment=two words", "--a\n#SBATCH --b", '--a="b', "- x"])
def test_what_is_no_option_is_refused(text: str) -> None:
    for system in (Slurm(), Pbs()):
        for field in ("extra_directives", "skipped_directives"):
            with pytest.raises(ConfigError):
                system.script(replace(SPEC, **{field: (text,)}))


@pytest.mark.parametrize(
    ("system", "options", "words"),
    [
        (Slurm(), ["-a 1-3", "--array=1-3", "-a1-3%2"], "how many jobs there are is said by nodes="),
        (Slurm(), ["-W", "--wait"], "when the job has ended"),
        (Slurm(), ["--wrap=true"], "the job's command is the cluster's"),
        (Pbs(), ["-J 1-3", "-J1-3"], "how many jobs there are is said by nodes="),
        (Pbs(), ["-I"], "hpcgpu launch starts the ranks"),
        (Pbs(), ["-W block=true", "-W umask=022,block=true"], "when the job has ended"),
        (Pbs(), ["-z"], "the job's id"),
    ],
)
def test_options_that_a_clusters_job_cannot_have_are_refused(
    system: BatchSystem, options: list[str], words: str
) -> None:
    for option in options:
        with pytest.raises(ConfigError, match=f"job_extra_directives: '.*' is not for this: .*{words}"):
            system.script(replace(SPEC, extra_directives=(option,)))


def test_totals_are_asked_for_where_there_is_no_select() -> None:
    gadi = Pbs(select=False, cpus_multiple_of=12)
    asked = options(gadi.script(replace(SPEC, cpus_per_task=None, memory_per_node_bytes=90 << 30)))
    assert asked[3:7] == ["-l ncpus=96", "-l ngpus=8", "-l mem=184320mb", "-l walltime=02:00:00"]
    assert not [o for o in asked if "select" in o or "place" in o]
    one = options(gadi.script(replace(SPEC, nodes=1, gpus_per_node=1, tasks_per_node=1, cpus_per_task=13)))
    assert "-l ncpus=24" in one
    whole = options(Pbs(cpus_multiple_of=12).script(replace(SPEC, tasks_per_node=1, cpus_per_task=None)))
    assert "-l select=2:ncpus=48:mpiprocs=1:ngpus=4:mem=204800mb" in whole
    own = options(gadi.script(replace(SPEC, extra_directives=("-l ncpus=7,jobfs=1GB",))))
    assert [o for o in own if "ncpus" in o] == ["-l ncpus=7"]


def test_what_is_asked_for_sparely_is_said() -> None:
    sparse = replace(SPEC, cpus_per_task=None, memory_per_node_bytes=None)
    (said,) = Pbs().notes(sparse)
    assert "cores_per_gpu= asks for more" in said
    assert "memory= asks for it" in said
    assert "cores_per_gpu" not in Pbs().notes(replace(sparse, cpus_per_task=8))[0]
    full = replace(sparse, extra_directives=("-l select=2:ncpus=8:ngpus=4:mem=1gb",))
    for spec in (SPEC, full, replace(sparse, gpus_per_node=0)):
        assert Pbs().notes(spec) == ()
    assert Pbs(gpus="none").notes(sparse) == Slurm().notes(sparse) == ()


def test_names_that_an_option_cannot_carry_are_refused() -> None:
    for system in (Slurm(), Pbs()):
        for field in ("name", "queue", "account", "log_directory"):
            with pytest.raises(ConfigError, match=re.escape(repr("a\n#PBS")[1:-1])):
                system.script(replace(SPEC, **{field: "a\n#PBS"}))
    with pytest.raises(ConfigError, match="cannot carry 'two words'"):
        Pbs().script(replace(SPEC, account="two words"))
    with pytest.raises(ConfigError, match="for a host"):
        Pbs().script(replace(SPEC, log_directory="/a:b"))
    for field, values in {"name": "a:b a/b a@b é a=b a~b", "queue": "é a/b a#b", "log_directory": "é"}.items():
        for value in values.split():  # as qsub does, 23.06.06
            with pytest.raises(ConfigError, match=f"cannot carry '{value}/?'; allowed: ASCII letters"):
                Pbs().script(replace(SPEC, **{field: value}))
    with pytest.raises(ConfigError, match="makes a name of 231 characters; allowed: 230"):
        Pbs().script(replace(SPEC, name="a" * 222, mark="12345678"))
    with pytest.raises(ConfigError, match="no backslash"):
        Slurm().script(replace(SPEC, log_directory="/a\\b"))


@given(WORDS, st.sampled_from([("name", 0), ("queue", 1), ("account", 2)]))
def test_any_name_stands_in_one_option_or_is_refused(value: str, field: tuple[str, int]) -> None:
    """Read as a shell would; that sbatch reads them alike is in names.json."""
    for system, names in ((Slurm(), ("--job-name=", "--partition=", "--account=")), (Pbs(), ("-N", "-q", "-A"))):
        try:
            script = system.script(replace(SPEC, **{field[0]: value}))
        except ConfigError:
            continue
        words = [shlex.split(option) for option in script.partition("\n\n")[0].split("\n")[1:]]
        option = names[field[1]]
        assert words.count(["#SBATCH", option + value] if option[1] == "-" else ["#PBS", option, value]) == 1
        assert len(words) == len(options(system.script(SPEC)))


def test_sbatch_keeps_names_and_the_id_after_a_wrappers_output() -> None:
    """What a real sbatch made of the line that our script still has."""
    assert Slurm().read_submit(Result((), 0, "--> Verifying 1 node...OK\n\n123;cluster\n")) == "123"
    assert Pbs().read_submit(Result((), 0, "Welcome 12\n123.pbs-01.site.edu\n")) == "123.pbs-01.site.edu"
    for version in SLURMS:
        recorded = json.loads((BATCH / "slurm" / version / "names.json").read_text())
        assert len(recorded) > 100
        for line, name in recorded.items():
            assert line in Slurm().script(replace(SPEC, name=name)).splitlines()


@pytest.mark.parametrize(
    "change",
    [
        *({"nodes": 0}, {"count": 0}, {"gpus_per_node": -1}),
        *({"name": "\ud800"}, {"name": ""}, {"queue": "a\0"}, {"argv": ("\udfff",)}, {"argv": ()}, {"argv": ("a\0",)}),
    ],
)
def test_a_job_that_cannot_be_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(SPEC, **change)


def test_logs_stand_where_the_script_says() -> None:
    here, folder = replace(SPEC, log_directory=None), "/scratch/user1/logs"
    assert [Slurm().log(SPEC, i) for i in ("7", "7_3")] == [f"{folder}/slurm-7.out", f"{folder}/slurm-7_3.out"]
    assert [Pbs().log(SPEC, i) for i in ("7.a", "7[3].a")] == [f"{folder}/7.a.OU", f"{folder}/7[3].a.OU"]
    assert [Pbs().log(here, i) for i in ("7.a", "7[3].a")] == ["svd.o7", "svd.o7.3"]  # as recorded: 14-array
    for text, log in {"-o a-%A_%a.%x": "a-7_3.svd", "--error=e%%%A -o x": "e%7"}.items():
        assert Slurm().log(replace(SPEC, extra_directives=(text,)), "7_3") == log
    for text, log in {"-o out": "out", "-o h:/x/": "/x/7[3].a.OU", "-j n": "svd.e7.3", "-o ^array_index^": "3"}.items():
        assert Pbs().log(replace(here, extra_directives=(text,)), "7[3].a") == log  # as tests/pbs finds them


def test_systems_by_name() -> None:
    assert batch.get("slurm", gpus="none") == Slurm(gpus="none")
    with pytest.raises(ConfigError, match="'slrum'; allowed: slurm, pbs"):
        batch.get("slrum")


@pytest.mark.parametrize(
    ("system", "vain", "written"),
    [
        (Slurm(memory="none", cpus=False), ["memory=", "cores_per_gpu="], []),
        (Slurm(memory="none"), ["memory="], []),
        (Pbs(gpus="none", cpus=False), ["cores_per_gpu="], []),
        (Pbs(cpus=False, memory="none"), ["memory=", "cores_per_gpu="], ["-l select=2:mpiprocs=4:ngpus=4"]),
        (Slurm(gpus="gpus"), [], ["--gpus=8"]),
        (Slurm(gpus="gpus", gpu_type="v100-32"), [], ["--gpus=v100-32:8"]),
        (Slurm(memory="mem-per-cpu"), [], ["--mem-per-cpu=6400M"]),  # 200 GiB / (4 x 8), together not over a node's
        (Slurm(memory="mem-per-gpu"), [], ["--mem-per-gpu=51200M"]),
        (Slurm(queue="qos"), [], ["--qos=gpu"]),
        (Pbs(account="-P"), [], ["-P proj"]),
    ],
)
def test_dialect_writes_its_options_and_notes_the_others(
    system: BatchSystem, vain: list[str], written: list[str]
) -> None:
    assert [note.partition(" ")[0] for note in system.notes(SPEC)] == vain
    lines = options(system.script(SPEC))
    assert [word for word in written if word not in lines] == []
    assert "--mem" not in system.script(SPEC) or "memory=" not in vain


def test_chunks_are_gpus_of_one_node() -> None:
    sophia = Pbs(gpus="none", mpiprocs=False, cpus=False, memory="none", gpu_chunks=("gpu",))
    assert "-l select=4" in options(sophia.script(replace(SPEC, nodes=1)))
    assert "-l select=2" in options(sophia.script(replace(SPEC, queue="by-node")))
    with pytest.raises(ConfigError, match=r"nodes=2, but a job of queue gpu is GPUs of one node"):
        sophia.script(SPEC)


# --- scripts and commands as they run: real bash, real processes, and programs that replay


def bash(script: str, cwd: Path | None = None) -> subprocess.CompletedProcess[bytes]:
    assert subprocess.run(["bash", "-n"], input=script.encode(), timeout=scaled(20)).returncode == 0
    return subprocess.run(["bash", "-s"], input=script.encode(), capture_output=True, cwd=cwd, timeout=scaled(20))


@settings(deadline=None, max_examples=25)
@given(st.lists(TEXT, max_size=4))
@example([*NASTY, "it's $(id)\n`x` \\"])
def test_values_come_through_bash_unharmed(values: list[str]) -> None:
    shown = ("bash", "-c", 'printf "%s\\0" "$0" "$@"', "x", *values)
    spec = JobSpec(name="x", argv=shown, warn_s=60)
    done = [bash(batch.get(name).script(spec)) for name in SYSTEMS]
    expected = "".join(f"{value}\0" for value in ("x", *values)).encode()
    assert [(d.stdout, d.stderr, d.returncode) for d in done] == [(expected, b"", 0)] * len(SYSTEMS)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(
    ("prologue", "argv", "exit_code"),
    [
        ((), ("true",), 0),
        ((), ("bash", "-c", "exit 7"), 7),
        (("false", "no-such-module-command"), ("true",), 0),
        (("exit 3",), ("true",), 3),
        ((), ("no-such-program",), 127),
        ((), ("bash", "-c", "kill -9 $$"), 137),
    ],
)
def test_the_exit_code_is_the_commands_and_is_left_in_its_file(
    name: str, prologue: tuple[str, ...], argv: tuple[str, ...], exit_code: int, tmp_path: Path
) -> None:
    file = tmp_path / "it's a $(file)"
    spec = JobSpec(name="x", argv=argv, prologue=prologue, exit_file=str(file))
    assert bash(batch.get(name).script(spec)).returncode == exit_code
    assert file.read_text() == f"{exit_code}\n"
    assert bash(batch.get(name).script(replace(spec, exit_file=""))).returncode == exit_code


def test_an_exit_code_that_comes_as_a_wait_for_it_ends_is_kept(tmp_path: Path) -> None:
    """The wait took the code and left the line's end, which was then taken for no code: in a quarter of such ends."""
    spec = JobSpec(name="x", argv=("sh", "-c", 'sleep "$LASTS_S"; exit 23'), warn_s=60)
    seldom, often = "read -r -t 5 ", "read -r -t 0.001 "
    script = tmp_path / "job.sh"
    script.write_text(batch.get("slurm").script(spec).replace(seldom, often))
    assert often in script.read_text()
    for i in range(100, 400, 7):
        environ = {**os.environ, "LASTS_S": f"0.0{i:03}"}
        assert subprocess.run(["bash", script], env=environ, timeout=scaled(20)).returncode == 23


@pytest.mark.parametrize(
    ("prologue", "handler", "exit_code"),
    [(True, "exit 9", 143), (False, "echo late >&2; exit 9", 9), (False, "-", 143)],
    ids=["in-the-prologue", "command-that-drains", "command-that-dies"],
)
def test_a_job_that_is_cancelled_leaves_its_exit_code(
    prologue: bool, handler: str, exit_code: int, tmp_path: Path
) -> None:
    """As batch systems do, every process of the job gets the signal."""
    fifo, file = tmp_path / "fifo", tmp_path / "exit"
    os.mkfifo(fifo)
    waits = ("bash", "-c", 'trap "$2" TERM; sleep 60 & echo > "$1"; wait; exit 0', "x", str(fifo), handler)
    spec = JobSpec(name="x", argv=("true",) if prologue else waits, exit_file=str(file))
    spec = replace(spec, prologue=(shlex.join(waits),) if prologue else ())
    script = batch.get("slurm").script(spec)
    job = subprocess.Popen(["bash", "-c", script], start_new_session=True, stderr=subprocess.PIPE)
    fifo.read_text()
    os.killpg(job.pid, 15)
    job.communicate(timeout=scaled(20))
    assert file.read_text() == f"{exit_code}\n"
    assert job.returncode == exit_code


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(("exit_code", "warnings"), [(0, 1), (3, 3)])
def test_a_warning_reaches_the_command_whose_exit_code_is_kept(
    name: str, exit_code: int, warnings: int, tmp_path: Path
) -> None:
    """Slurm sends it to the script alone."""
    fifo, file = tmp_path / "fifo", tmp_path / "exit"
    os.mkfifo(fifo)
    argv = (sys.executable, "-S", "-c", RANK, str(fifo), str(warnings), str(exit_code))
    spec = JobSpec(name="x", argv=argv, exit_file=str(file), warn_s=60)
    job = subprocess.Popen(["bash", "-c", batch.get(name).script(spec)], stderr=subprocess.PIPE)
    with fifo.open() as said:
        assert said.readline() == "listens\n"
        for _ in range(warnings):
            job.send_signal(signal.SIGUSR1)
            # One that comes while bash is not done with the one before is lost (bash 5.2.15).
            while not select.select([said], [], [], 1)[0]:
                job.send_signal(signal.SIGUSR1)
            assert said.readline() == "SIGUSR1\n"
    _, wrong = job.communicate(timeout=scaled(20))
    assert (job.returncode, file.read_text(), wrong) == (exit_code, f"{exit_code}\n", b"")


@pytest.fixture
def waits(tmp_path: Path) -> tuple[str, ...]:
    """A command that opens a fifo, and goes on when a line comes by another."""
    fifo, more = tmp_path / "fifo", tmp_path / "more"
    os.mkfifo(fifo)
    os.mkfifo(more)
    return ("bash", "-c", 'echo > "$1"; read line < "$2"; exit "$3"', "x", str(fifo), str(more))


def warned(script: str, waits: tuple[str, ...], times: int) -> tuple[int, bytes]:
    """Run a script, and warn it each time that the command waits; return its exit code and its errors."""
    *_, fifo, more = map(Path, waits)
    job = subprocess.Popen(["bash", "-c", script], stderr=subprocess.PIPE)
    for _ in range(times):
        fifo.read_text()
        job.send_signal(signal.SIGUSR1)
        more.write_text("go on\n")
    _, wrong = job.communicate(timeout=scaled(20))
    return job.returncode, wrong


def test_warning_signal_ends_no_prologue_and_no_command(waits: tuple[str, ...]) -> None:
    spec = JobSpec(name="x", argv=(*waits, "0"), prologue=(shlex.join((*waits, "0")),), warn_s=60)
    assert warned(batch.get("slurm").script(spec), waits, 2) == (0, b"")


@pytest.mark.parametrize("prologue", [(), ("set -euo pipefail",)], ids=["", "set -e"])
def test_command_that_ends_at_the_warning_keeps_its_exit_code(
    prologue: tuple[str, ...], waits: tuple[str, ...]
) -> None:
    """Of a bash that waits itself, one in nine loses it."""
    script = batch.get("slurm").script(JobSpec(name="x", argv=(*waits, "3"), prologue=prologue, warn_s=60))
    assert {warned(script, waits, 1) for _ in range(40)} == {(3, b"")}


@pytest.mark.parametrize(("name", "variable"), [("slurm", "SLURM_ARRAY_TASK_ID"), ("pbs", "PBS_ARRAY_INDEX")])
def test_each_element_leaves_an_exit_code_of_its_own(name: str, variable: str, tmp_path: Path) -> None:
    file = tmp_path / "it's a $(file)"
    argv = ("bash", "-c", f'exit "${variable}"')
    script = batch.get(name).script(JobSpec(name="x", argv=argv, exit_file=str(file), count=12))
    for index in (0, 11):
        assert bash(f"export {variable}={index}\n{script}").returncode == index
        assert Path(f"{file}.{index}").read_text() == f"{index}\n"
    assert not file.exists()


def test_command_reads_stdin_and_not_the_script(tmp_path: Path) -> None:
    spec = JobSpec(name="x", argv=("bash", "-c", "cat > /dev/null; exit 3"), exit_file=str(tmp_path / "exit"))
    assert bash(batch.get("slurm").script(spec)).returncode == 3
    script = batch.get("slurm").script(JobSpec(name="x", argv=("cat",), exit_file=str(tmp_path / "exit")))
    done = subprocess.run(["bash", "-c", script], input=b"given", capture_output=True, timeout=scaled(20))
    assert done.stdout == b"given"


def test_options_end_before_commands_and_pbs_changes_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    folder.mkdir()
    script = f"export PBS_O_WORKDIR='{folder}'\n{batch.get('pbs').script(JobSpec(name='x', argv=('pwd',)))}"
    assert bash(script, cwd=tmp_path).stdout.decode() == f"{folder}\n"
    spec = JobSpec(name="x", argv=("echo", "a\n#SBATCH --nodes=9\n#PBS -l select=9"), prologue=("true\n#PBS -q evil",))
    for name in ("slurm", "pbs"):
        lines = batch.get(name).script(spec).splitlines()
        assert all(line.startswith("#") for line in lines[: lines.index("")])
        assert "#PBS -q evil" in lines[lines.index("") :]


@pytest.mark.parametrize(("name", "path", "word", "said"), REPLAYED, ids=[f"{n}-{p}" for n, p, *_ in REPLAYED])
def test_a_refusal_reaches_the_caller(
    name: str, path: str, word: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program of the batch system's name prints what was recorded; the script reaches its standard input."""
    record = next(r for r in records(BATCH / name / path) if word in r.command and r.returncode)
    system = batch.get(name)
    spec = JobSpec(name="x", argv=("true",))
    command = system.submit(system.script(spec), spec)
    (tmp_path / "said").write_text(record.stderr)
    path = tmp_path / command.argv[0]
    program(path, f'cat > "$0.script"\ncat "${{0%/*}}/said" >&2\nexit {record.returncode}')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SubmitError, match=said) as caught:
        system.read_submit(run_sync(command))
    assert record.stderr.partition("\nusage:")[0].strip() in str(caught.value)
    assert path.with_suffix(".script").read_text() == command.stdin


@pytest.mark.parametrize(
    ("system", "argv", "stderr"),
    [
        (Slurm(), ("scontrol", "requeue", "12"), "Requested operation is presently disabled for job 12"),
        (Pbs(), ("qrerun", "12.login01"), "qrerun: Unauthorized Request  12.login01"),
    ],
)
def test_refused_requeue_is_told_in_their_words(system: BatchSystem, argv: tuple[str, ...], stderr: str) -> None:
    assert system.requeue(argv[-1]).argv == argv
    system.read_requeue(Result(argv, 0))
    with pytest.raises(SubmitError, match=re.escape(stderr)):
        system.read_requeue(Result(argv, 1, "", stderr))


def test_job_that_may_be_requeued_says_so_in_its_script() -> None:
    spec = JobSpec(name="x", argv=("true",))
    assert "#SBATCH --requeue\n" in Slurm().script(replace(spec, requeue=True))
    assert "--requeue" not in Slurm().script(spec)


def test_job_of_a_template_is_submitted_again_after_its_end() -> None:
    answer = recorded("pbs", "run/01-template-waits-for-gpus.txt", "json")
    command = Pbs().resubmit(answer, "12.login01")
    assert command is not None
    assert command.argv[:2] == ("env", "-C")
    folder = command.argv[2]
    again = ("qsub", "-W", "depend=afterany:12.login01", "-v", "SCRIPT=my_script.py", f"{folder}/jobscripts/pbs.sh")
    assert command.argv[3:] == again
    assert Pbs().resubmit(Result(("qstat",), 1, "", "qstat: no answer"), "12.login01") is None


def test_kill_of_a_signalled_job_is_when_its_batch_system_says() -> None:
    """Of Slurm the end of a GraceTime, as tests/lab/test_requeue.py sees it; else of KillWait. Of PBS its queue's."""
    start, end = "2026-11-29T09:14:21", datetime(2026, 11, 29, 9, 15, 21)
    partitions = Result((), 0, "PartitionName=main GraceTime=0 B=1\nPartitionName=low A=1 GraceTime=60 B=1\n")
    config = Result((), 0, "KillOnBadExit = 0\nKillWait   = 30 sec\n")
    for answer, then_s in (
        (f"{start} {end.isoformat()} main\n", end.timestamp()),
        (f"{start} NONE                low       \n", end.timestamp()),
        (f"N/A                 {end.isoformat()} low\n", 130.0),
        ("", 130.0),
    ):
        assert Slurm().read_killed_s((Result((), 0, answer), partitions, config), 100.0) == then_s
    silent = Result((), 1, "", "no answer")
    assert Slurm().read_killed_s((silent, silent, silent), 100.0) == 100.0
    job = recorded("pbs", "run/01-template-waits-for-gpus.txt", "json")
    delayed, plain = (f'{{"Queue": {{"workq": {{{text}}}}}}}' for text in ('"kill_delay": 60', '"enabled": "True"'))
    for text, then_s in ((delayed, 160.0), (plain, 100.0), ("", 100.0), ("[]", 100.0)):
        assert Pbs().read_killed_s((job, Result((), 0, text)), 100.0) == then_s


def test_preempted_slurm_job_asks_for_its_requeue() -> None:
    """Slurm 24.11.5 requeues it, if its partition's PreemptMode is REQUEUE; asked, too, it would do so twice."""
    job = Result((), 0, "2026-11-29T09:14:21 NONE                low\n")
    config = "PreemptType             = preempt/partition_prio\nSLURM_VERSION           = {}\n"
    by_qos = config.replace("partition_prio", "qos")
    for mode, text, version, asks in (
        ("REQUEUE", config, "24.11.5", False),
        ("REQUEUE", config, "26.05.5", False),
        ("REQUEUE", config, "22.05.8", True),
        ("CANCEL", config, "24.11.5", True),
        ("REQUEUE", by_qos, "24.11.5", True),
    ):
        partitions = Result((), 0, f"PartitionName=low PreemptMode={mode} B=1\nPartitionName=x PreemptMode=REQUEUE\n")
        told = (partitions, Result((), 0, text.format(version)))
        assert slurm.read_needs_requeue((job, *told)) is asks
        assert not slurm.read_needs_requeue((Result((), 0, ""), *told))


def test_end_of_a_slurm_job_is_read() -> None:
    assert slurm.ask_end("12").argv == ("squeue", "--noheader", "--jobs=12", "--Format=EndTime")
    assert "--states=running" in slurm.ask_preemption("12").argv
    end = datetime(2026, 11, 28, 18, 25, 17)
    assert slurm.read_end_s(Result(("squeue",), 0, f"{end.isoformat()} \n")) == int(end.timestamp())
    assert slurm.read_end_s(Result(("squeue",), 0, "N/A\n")) is None

"""Jobs of a real OpenPBS that end in the middle and go on: what a checkpoint has is not computed a second time."""

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from paths import ROOT
from pbs_lab import HOME, PYTHON, PbsLab
from requeues import BEGUN, CHUNKS, OUTSIDE
from waiting import until

FOLDER = HOME / "requeue"
PLACE = "-l select=2:ncpus=1:mpiprocs=1:mem=1gb -l place=scatter -j oe"
OPTIONS = 'nodes=2, gpus="sim:1", memory="1GB", cores_per_gpu=1, walltime="100s", requeue=True, dashboard=False'


@pytest.fixture(autouse=True)
def folder() -> Iterator[Path]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    shutil.chown(FOLDER, "labuser")
    yield FOLDER
    shutil.rmtree(FOLDER)


def submit(lab: PbsLab, options: str, launch: str, seconds: int) -> str:
    """Submit the template, whose script is a file, with ``examples/resume.py``."""
    words = f"--gpus sim:1 --no-dashboard {launch}"
    template = (
        (ROOT / "jobscripts" / "pbs.sh").read_text().replace("hpcgpu launch", f"{PYTHON} -m hpcgpu launch {words}")
    )
    (FOLDER / "pbs.sh").write_text(template.replace('\n: "', '\necho start >> ran\n: "', 1))
    arguments = f"--chunks {CHUNKS} --seconds {seconds} --folder run --ran ran"
    variables = f"SCRIPT={ROOT / 'examples' / 'resume.py'} ARGS={shlex.quote(arguments)}"
    line = f"cd {FOLDER}; {variables} qsub -v SCRIPT,ARGS {PLACE} {options} pbs.sh"
    return lab.on("login01", line).strip()


def read(name: str) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(FOLDER.glob(name)))


def lives() -> list[list[str]]:
    """Return the chunks that each start of the job has computed."""
    return [life.split() for life in read("ran").split("start")[1:]]


def wait_for(more: int) -> None:
    enough = sum(map(len, lives())) + more
    until(lambda: sum(map(len, lives())) >= enough, f"{enough} chunks are computed", limit_s=120, every_s=0.5)


def wait_end(lab: PbsLab) -> None:
    until(lambda: not lab.states(), "all jobs have ended", limit_s=300, every_s=1)


def check(log: str, starts: int) -> None:
    """Assert that the result is right, that each start found more, and that no start computed what was there."""
    before = [int(count) for count in BEGUN.findall(log)]
    assert "the sum is right" in log, log
    assert before == sorted(set(before)), log
    assert len(before) == len(lives()) >= starts, log
    for number, count in enumerate(before):
        assert len(set().union(*lives()[number:])) == CHUNKS - count, (before, lives())
    print(before, lives())


def test_job_run_again_twice_computes_no_chunk_twice(lab: PbsLab) -> None:
    job = submit(lab, "-k oed -o log -l walltime=00:10:00", "", 2)
    for _ in range(2):
        wait_for(4)
        lab.on("login01", f"qrerun {job} || :", user="root")  # it may end before the job has
    wait_end(lab)
    check(read("log*"), starts=3)


@pytest.fixture
def express(lab: PbsLab) -> Iterator[str]:
    """A queue whose jobs take the place of others, which are run again."""
    begin = ("create queue express queue_type=e,enabled=t,started=t,Priority=200", "set sched preempt_order=R")
    for lines in (begin, ("delete queue express", "unset sched preempt_order")):
        lab.on("login01", "; ".join(f"qmgr -c {shlex.quote(line)}" for line in lines), user="root")
        if lines is begin:
            yield "express"


def test_preempted_job_goes_on_where_it_was(lab: PbsLab, express: str) -> None:
    submit(lab, "-k oed -o log -l walltime=00:10:00", "", 2)
    wait_for(4)
    lab.on("login01", f"echo sleep 5 | qsub -q {express} -l select=4:ncpus=8 -l place=scatter")
    wait_end(lab)
    check(read("log*"), starts=2)


def test_job_without_the_right_to_requeue_submits_itself_again(lab: PbsLab) -> None:
    first = submit(lab, "-k oed -l walltime=00:00:50", "--requeue", 4)
    log = f"*.o{first.partition('.')[0]}"
    until(lambda: "follows this one" in read(log), "another job follows", limit_s=200, every_s=1)
    wait_end(lab)
    check(read("*.o*"), starts=2)


def test_script_outside_its_job_goes_on_in_another_one(lab: PbsLab) -> None:
    with lab.client() as client:
        client(f"import os; os.chdir({str(HOME)!r})\n{OUTSIDE}cluster = PBSGPUCluster({OPTIONS})")
        first = client("cluster.job_id")
        client.send("run()")
        assert client.answer(300) == 2.0 * sum(range(24))
        print(client("errors"))
        assert client("cluster.job_id") != first
        assert "follows job" in client.said
        assert len(set((FOLDER / "outside.ran").read_text().split())) == 24
        client("checkpoint.close(); cluster.close()")

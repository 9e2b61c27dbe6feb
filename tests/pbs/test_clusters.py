"""Clusters in jobs of a real OpenPBS: a gang, and jobs that come and go, beside each other.

What is broken is broken for both, since most of the time is waited for: PBS finds a lost node after seconds, an
epilogue and a qrerun take theirs.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from clients import Client
from paths import ROOT
from pbs_lab import HOME, PbsLab
from programs import COUNT_HOSTS
from waiting import scaled, until

from hpcgpu.batch import Pbs
from hpcgpu.model import JobSpec

EACH = {
    **{"gpus": "sim:1x64MiB", "walltime": "00:10:00", "client_grace": 5},
    "job_extra_directives": ["-l place=scatter:excl"],  # the lab's four nodes, and nobody shares one
}
GANG = {**EACH, "nodes": 2}
ELASTIC = {**EACH, "shape": "elastic", "scheduler": "here", "ranks": "node", "launcher": "fork"}
CLOSE = "client.close(); cluster.close()"
WORK = "client.gather(client.map(abs, range(20), pure=False))"
DONE = list(range(20))
REFUSES = """#!/bin/sh
[ ! -e "$HOME/work/refuse" ] || { echo 'too many requests' >&2; exit 1; }
exec /opt/pbs/bin/qstat "$@"
"""
SENTENCE = """#!/bin/sh
id=$(/opt/pbs/bin/qsub "$@") && echo "Job $id has been submitted"
"""
APPTAINER = '#!/bin/bash\n[ "$1 $2 $3" = "exec --nv my.sif" ] && exec "${@:4}"\n'


def _client(lab: PbsLab) -> Iterator[Client]:
    """A client that has no cluster yet."""
    with lab.client() as client:
        yield client


gang, elastic = (pytest.fixture(_client, name=name) for name in ("gang", "elastic"))


def start(client: Client, options: dict[str, object], **more: object) -> str:
    """Start a cluster in the client, and return the id of its job."""
    client(f"cluster = PBSGPUCluster(**{options | more}); client = Client(cluster)")
    return str(client("cluster.job_id"))


def scale(client: Client, jobs: int) -> list[str]:
    client(f"cluster.scale(jobs={jobs}); client.wait_for_workers({jobs}, timeout=90)")
    return members(client)


def members(client: Client) -> list[str]:
    """Return the jobs that come and go."""
    return client("[row.id for row in cluster.jobs.rows if row.has == 'workers']")


def workers(client: Client) -> int:
    return int(client("len(cluster.scheduler_info['workers'])"))


def test_a_gang_from_start_to_end_with_a_slow_epilogue(lab: PbsLab, gang: Client, elastic: Client) -> None:
    job_id, attached = start(gang, GANG), elastic
    assert lab.states() == {job_id: "R"}
    assert gang(WORK) == DONE
    assert len(set(gang("list(client.run(__import__('socket').gethostname).values())"))) == 2
    log = Path(gang("cluster.jobs.rows[0].log"))  # it is there while the job runs
    assert log.parent == HOME / "work"
    assert "2 workers on 2 nodes ready" in log.read_text()
    assert lab.hpcgpu("logs", job_id) == log.read_text()
    assert job_id in lab.hpcgpu("ps")
    attached(f"cluster = PBSGPUCluster.attach({job_id!r}); client = Client(cluster)")
    assert attached(WORK) == DONE
    attached(CLOSE)
    lab.breaks("epilogue", "14")  # longer than close() waits before it cancels
    gang(CLOSE)
    assert "qdel failed" not in gang.said
    assert lab.run_folders() == []


def test_what_is_deleted_or_run_again(lab: PbsLab, gang: Client, elastic: Client) -> None:
    start(elastic, ELASTIC)
    first, second = scale(elastic, 2)
    only = start(gang, GANG)
    lab.on("login01", f"qdel {only}; qdel '{first}'")
    until(lambda: first not in members(elastic) and workers(elastic) == 2, "it is replaced", every_s=1)
    lab.on("login01", f"qrerun '{second}'", user="root")
    again = "[w['name'] for w in cluster.scheduler_info['workers'].values()]"
    until(lambda: f"{second}-0r1" in elastic(again), "it joins again under another name", every_s=1)
    elastic("client.wait_for_workers(2, timeout=90)")
    assert elastic(WORK) == DONE
    until(lambda: "the cluster is lost" in gang.said, "the loss of the gang is said")
    assert f"job {only} has ended: F (Job run at" in gang.said
    assert "terminated by labuser@login01" in gang.said
    gang(CLOSE)
    lab.breaks("epilogue", "6")
    elastic(CLOSE)
    assert "qdel failed" not in elastic.said
    assert lab.run_folders() == []


def test_without_a_server_nothing_is_lost_or_submitted_twice(lab: PbsLab, gang: Client, elastic: Client) -> None:
    only = start(gang, GANG)
    # on a busy machine a server comes back after more than the 11 s for which qsub is tried again by default
    elastic("from hpcgpu.model import Patience; PBSGPUCluster.patience = Patience(retries_s=(1.0,) * 120)")
    start(elastic, ELASTIC)
    scale(elastic, 1)
    lab.breaks("hold-server", "4")
    scale(elastic, 2)
    lab.breaks("server-stop")
    elastic.send("cluster.scale(jobs=3)")
    assert gang(WORK) == DONE
    until(lambda: "hpcgpu tries again in" in elastic.said, "qsub is tried again")
    lab.breaks("server-start")
    elastic.answer()
    until(lambda: len(lab.states()) == 4, "there are the gang's job and three", every_s=1)
    *run, waits = (lab.states()[job_id] for job_id in (only, *members(elastic)))
    assert run == ["R"] * 3
    assert waits in ("Q", "R")  # once a busy server that had just started gave it a node of others
    lab.breaks("server-kill")
    assert (gang(WORK), elastic(WORK)) == (DONE, DONE)
    gang(CLOSE)  # its goodbye goes to the scheduler, not to PBS
    lab.breaks("server-start")
    elastic(CLOSE)
    until(lambda: lab.run_folders() == [], "a guard has seen that PBS does not run the gang's job again", every_s=1)


def test_broken_nodes_stop_neither_ends_nor_work(lab: PbsLab, gang: Client, elastic: Client) -> None:
    only = start(gang, GANG)
    start(elastic, ELASTIC)
    (kept, silent), (lost, off) = ((job_id, lab.node_of(job_id)) for job_id in scale(elastic, 2))
    first = lab.node_of(only)
    (other,) = {*lab.nodes} - {silent, off, first}
    lab.breaks("kill-mom", silent)  # its job's processes live on
    lab.breaks("off", off)
    lab.breaks("cut", other)
    assert elastic(WORK) == DONE
    until(lambda: f"{off} is down" in elastic("str(cluster.jobs)"), "the node is named", limit_s=90, every_s=1)
    until(lambda: workers(gang) == 1, "the gang's other worker is gone", limit_s=90, every_s=1)
    assert gang(WORK) == DONE
    lab.breaks("heal", other)
    lab.breaks("off", first)
    until(lambda: f"{first} is down" in gang.said, "its first node is named", limit_s=90, every_s=1)
    assert lab.states()[only] == "R"
    until(lambda: lost not in members(elastic) and len(members(elastic)) == 2, "it is replaced", limit_s=150, every_s=1)
    assert lost not in lab.states()
    assert lab.states()[kept] == "R"
    lab.breaks("start-mom", silent)
    assert elastic(WORK) == DONE
    lab.breaks("kill-mom", silent)
    gang.send("cluster.close()")
    elastic(CLOSE)
    gang.answer()
    assert lab.states() == {}


def test_killed_clients_leave_no_job(lab: PbsLab, gang: Client, elastic: Client) -> None:
    node = lab.node_of(start(gang, GANG))
    start(elastic, ELASTIC)
    scale(elastic, 2)
    elastic("cluster.scale(jobs=4)")
    until(lambda: sorted(lab.states().values()) == ["Q", "Q", "R", "R", "R"], "two wait", every_s=1)
    lab.breaks("kill-mom", node)
    lab.kill(gang)
    lab.kill(elastic)
    over = "their guards have ended all"
    until(lambda: lab.states() == {} and lab.run_folders() == [], over, limit_s=90, every_s=1)


def test_a_job_hands_over_before_its_time_is_over(lab: PbsLab, elastic: Client) -> None:
    """PBS looks at the time by and by: here 2 s after its end and more, and it warns nobody."""
    start(elastic, ELASTIC, walltime=f"{scaled(30):.0f} s")
    first, *_ = scale(elastic, 1)  # on a slow machine its successor is there already
    elastic("kept = client.scatter(list(range(4)), broadcast=False)")
    until(lambda: first not in lab.states(), "the first job is over", limit_s=120, every_s=1)
    assert elastic("client.gather(kept)") == [0, 1, 2, 3]
    elastic(CLOSE)


def test_walltime_and_memory_are_those_that_pbs_has_given(lab: PbsLab, gang: Client, elastic: Client) -> None:
    """Nothing is asked for: the queue's walltime ends a job, and its memory is less than the node's."""
    limit = f"resources_default.walltime={scaled(40):.0f},default_chunk.mem=900mb"
    lab.on("login01", f"qmgr -c 'create queue brief queue_type=e,enabled=t,started=t,{limit}'", user="root")
    brief = {"queue": "brief", "walltime": None, "drain": 5}
    only = start(gang, {k: v for k, v in GANG.items() if k != "walltime"} | brief)
    start(elastic, {k: v for k, v in ELASTIC.items() if k != "walltime"} | brief)
    first, *_ = scale(elastic, 1)
    assert "though none was requested" in elastic.said
    limits = elastic("[w['memory_limit'] for w in cluster.scheduler_info['workers'].values()]")
    assert 0 < max(limits) < 900 << 20
    elastic("kept = client.scatter(list(range(4)), broadcast=False)")
    log = Path(gang("cluster.jobs.rows[0].log"))
    until(lambda: "ends in" in log.read_text(), "the gang is warned", limit_s=60, every_s=1)
    until(lambda: first not in lab.states(), "the first job is over", limit_s=120, every_s=1)
    assert elastic("client.gather(kept)") == [0, 1, 2, 3]
    assert only
    elastic(CLOSE)
    gang(CLOSE)


def test_programs_of_a_site_refuse_and_answer_in_sentences(lab: PbsLab, elastic: Client) -> None:
    for name, text in (("qstat", REFUSES), ("qsub", SENTENCE)):
        lab.on("login01", f"mkdir -p work/bin; cat > work/bin/{name} <<'E'\n{text}E\nchmod +x work/bin/{name}")
    elastic(f"import os; os.environ['PATH'] = '{HOME}/work/bin:' + os.environ['PATH']")
    start(elastic, ELASTIC)
    first, second = scale(elastic, 2)
    assert "qsub has named no job" in elastic.said
    lab.on("login01", "touch work/refuse")
    lab.on("login01", f"qdel '{first}'")
    until(lambda: "too many requests" in elastic.said, "a poll was refused", every_s=1)
    lab.on("login01", "rm work/refuse")
    until(lambda: first not in members(elastic) and workers(elastic) == 2, "it is replaced", limit_s=90, every_s=1)
    assert second in members(elastic)
    elastic(CLOSE)
    assert lab.states() == {}
    lab.on("login01", "rm -r work/bin")


def test_the_template_takes_a_script_and_its_arguments(lab: PbsLab) -> None:
    script = "import sys; from distributed import Client; Client().wait_for_workers(2); print(sys.argv[1:])"
    site = f"s/:ngpus=4//; s/ncpus=4:mpiprocs=4/ncpus=1:mpiprocs=1/; s,^hpcgpu launch,{lab.python} -m &  --gpus sim:1,"
    lines = (
        f"mkdir -p work; cd work; echo '{script}' > s.py; sed '{site}' {lab.template} > t.sh",
        "qsub -f -W block=true -N t -o t.out -v SCRIPT=s.py,ARGS='one two' t.sh || cat t.out >&2",
    )
    lab.on("login01", "; ".join(lines))
    assert "['one', 'two']" in (HOME / "work" / "t.out").read_text().splitlines()


def test_the_other_templates_run(lab: PbsLab) -> None:
    """All at once. The lab has no GPU to ask for, and no Apptainer: a program that runs the command stands in."""
    tmrsh, work = ROOT / "hpcgpu" / "host" / "pbs_ssh.sh", HOME / "work" / "templates"
    few = "s/:ngpus=4//; s/ncpus=4/ncpus=1/; s/mpiprocs=4/mpiprocs=1/"
    paths = f"s,^mpiexec,{lab.python.parent}/&,; s,apptainer exec,{work}/&,"  # a job's shell has the node's own PATH
    site = f"{few}; {paths}; s,hpcgpu \\(launch\\|run\\),{lab.python.parent}/& --gpus sim:1,"
    lab.on(
        "login01",
        f"rm -rf {work}; mkdir -p {work}; cat > {work}/s.py <<'E'\n{COUNT_HOSTS}E\n"
        f"cat > {work}/apptainer <<'E'\n{APPTAINER}E",
    )
    lab.on("login01", f"chmod +x {work}/apptainer; printf 'first 1\\nsecond 2' > {work}/runs.txt")
    jobs = {
        "full": "SCRIPT=s.py ARGS='its arguments'",
        "apptainer": f"IMAGE=my.sif SCRIPT=s.py PRTE_MCA_plm_ssh_agent={tmrsh}",
        "sweep": f"SCRIPT={ROOT}/examples/sweep.py ARGS='--grid rate=0.1,0.01'",
        "array": "RUNS=runs.txt SCRIPT=s.py",
    }
    for name, variables in jobs.items():
        names = ",".join(word.partition("=")[0] for word in re.findall(r"[A-Z]\w+=", variables))
        more = "-J 1-2" if name == "array" else f"-o {name}.out"
        submit = f"{variables} qsub -f {more} -N {name} -v {names} {name}.sh"
        lab.on("login01", f"cd {work}; sed '{site}' {ROOT}/jobscripts/pbs-{name}.sh > {name}.sh; {submit}")
    until(lambda: not lab.states(), "all have ended", limit_s=120, every_s=1)
    logs = {path.name.partition(".")[0]: path.read_text() for path in work.glob("*.out")}
    array = sorted(line for path in work.glob("array.o*") for line in path.read_text().splitlines() if "HOSTS" in line)
    assert "HOSTS 2 WORKERS 2 ARGUMENTS its arguments" in logs["full"]
    assert "HOSTS 2 WORKERS 2 ARGUMENTS" in logs["apptainer"], logs["apptainer"]
    assert "best of 2: rate=0.1, loss" in logs["sweep"]
    assert array == ["HOSTS 1 WORKERS 1 ARGUMENTS first 1", "HOSTS 1 WORKERS 1 ARGUMENTS second 2"]


def test_logs_are_where_the_options_of_jobs_put_them(lab: PbsLab) -> None:
    situations = (["-o joined"], ["-o logs/"], ["-o logs/a^array_index^"], ["-j n"], ["-j n", "-e logs/"])
    situations += (["-j eo", "-e login01:/home/labuser/options/errors"],)
    argv, logs = ("bash", "-c", "echo its output; echo its errors >&2"), list[Path]()
    for options in situations:
        for count in (1, 2):
            spec = JobSpec(name="log", argv=argv, extra_directives=tuple(options), count=count)
            line = f"mkdir -p options/logs; cd options; qsub << 'END'\n{Pbs().script(spec)}\nEND"
            ids = Pbs().elements(lab.on("login01", line).strip(), count)
            logs += [HOME / "options" / Pbs().log(spec, job_id) for job_id in ids]
    until(lambda: not lab.states(), "all jobs have ended", limit_s=120, every_s=1)
    assert [log for log in logs if "its errors\n" not in log.read_text()] == []
    shutil.rmtree(HOME / "options")

# ruff: noqa: D103 - each part has the name of what it records
"""Record what a real Slurm prints, on the lab with accounting: ``record_slurm.py [part ...]``; without a part: all.

From the root of the checkout: ``ACCOUNTING=1 docker/lab.sh up``, then ``ACCOUNTING=1 PYTHONPATH=.:tests/support python
scripts/record_slurm.py``. The lab must be idle; a node of it is killed and started again. The text goes to
``tests/data/batch/slurm``.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable

from lab import NUMBER, Lab
from paths import BATCH
from waiting import scaled, until

from hpcgpu.batch import Slurm, questions
from hpcgpu.batch.slurm import ask_offers
from hpcgpu.model import Command, JobSpec

SUBMIT = "sbatch --parsable -A project -o /dev/null "
REFUSED = (
    "--partition=nosuch", "--account=nosuch", "--qos=nosuch", "--no-such-option", "--nodes=99", "--time=1h",
    "--gpus-per-node=9", "--gres=nosuch:1", "--mem=99T", "--constraint=nosuch", "--mem=1G --mem-per-cpu=1G",
    "--array=0-1001", "--array=x",
)  # fmt: skip
# The fields of squeue's JSON that its text has for hpcgpu, and what identifies a job.
OF_JSON = (
    "job_id", "array_job_id", "array_task_id", "array_task_string", "time_limit", "job_state", "exit_code",
    "start_time", "nodes", "state_reason", "comment",
)  # fmt: skip
LAB = Lab(accounting=True)
BLOCKS: list[str] = []


def shell(command: str, user: str = "hpc", stdin: str = "") -> subprocess.CompletedProcess[str]:
    return LAB.exec(LAB.login, ["bash", "-c", command], user=user, timeout=scaled(90), stdin=stdin)


def run(command: str, user: str = "hpc") -> str:
    """Run a shell line, record it, and return what it printed."""
    done = shell(command, user)
    head = f"$ {command}\n[user {user}] [exit {done.returncode}]\n"
    BLOCKS.append(f"{head}--- stdout\n{done.stdout}--- stderr\n{done.stderr}===\n")
    return done.stdout.strip()


def wait(job_id: str, *words: str, absent: str = "nothing") -> None:
    """Wait until squeue's rows of the job have all of these words, and not ``absent``."""
    squeue = f"squeue -h -r -t all -j {job_id} -O 'JobArrayID:|,State:|,Reason:|,StartTime:|'"

    def is_so() -> bool:
        rows = shell(squeue).stdout
        return absent not in rows and all(word in rows for word in words)

    until(is_so, f"{job_id} is {words}", limit_s=150, every_s=0.1)


def save(name: str) -> None:
    (BATCH / "slurm" / VERSION / f"{name}.txt").write_text("".join(BLOCKS))
    BLOCKS.clear()


def line(command: Command) -> str:
    return shlex.join(command.argv)


def ask(*job_ids: str) -> None:
    run(line(Slurm().status(job_ids)))
    run(line(Slurm().history(job_ids)))


def submit(*options: str) -> list[str]:
    """Submit a job for each of these options, unrecorded, and return the ids."""
    return [shell(SUBMIT + each).stdout.strip() for each in options]


def submissions() -> None:
    job_id = run(SUBMIT + "--wrap true")
    run("printf '#!/bin/bash\\n#SBATCH --account=project --output=/dev/null\\ntrue\\n' | sbatch --parsable")
    save("01-sbatch-ok")
    for option in REFUSED:
        run(SUBMIT + f"--wrap true {option}")
    run("printf 'true\\n' | sbatch --parsable")
    run("printf '#!/bin/bash\\r\\ntrue\\r\\n' | sbatch --parsable")
    run("sbatch --parsable < /dev/null")
    save("02-sbatch-refused")
    ask(job_id)
    save("04-just-submitted")


def limits() -> None:
    """A user's limits on submitted jobs: of a QOS, and of the association."""
    for change in ("add qos one", "modify qos one set maxsubmitjobsperuser=1", "modify user hpc set qos=normal,one"):
        shell(f"sacctmgr -i {change}", "root")
    one = run(SUBMIT + "--qos=one --hold --wrap true")
    run(SUBMIT + "--qos=one --hold --wrap true")
    run(f"scancel {one}")
    run(SUBMIT + "--qos=one --hold --array=0-1 --wrap true")
    shell("sacctmgr -i modify user hpc set maxsubmitjobs=0", "root")
    run(SUBMIT + "--hold --array=0-1 --wrap true")
    shell("sacctmgr -i modify user hpc set maxsubmitjobs=-1", "root")
    save("03-sbatch-limit")


def states() -> None:
    whole = "-N4 --exclusive --wrap"
    running, pending, held = submit(f"{whole} 'sleep 300'", f"{whole} true", "--hold --wrap true")
    dependent, later = submit(f"-d afterok:{running} --wrap true", "--begin=now+1hour --wrap true")
    for job_id, word in ((running, "RUNNING"), (pending, "Resources"), (dependent, "Dependency"), (later, "BeginTime")):
        wait(job_id, word)
    time.sleep(5)  # slurmdbd is told a little later
    ask(running, pending, held, dependent, later)
    save("05-alive")
    run(f"scancel {running}")
    wait(running, "CANCELLED")
    run(f"scancel {running}")
    run("scancel 999999")
    run(f"scancel {pending} 999999")
    run(f"scancel {held} {dependent} {later}")
    save("06-scancel")
    ask(running, pending, held)
    save("07-cancelled")


def ends() -> None:
    jobs = submit(*(f"--wrap '{script}'" for script in ("true", "exit 3", "kill -9 $$", "no-such-program")))
    (out,) = submit("-t 1 --wrap 'sleep 300'")
    wait(out, "RUNNING")
    shell(f"scontrol update jobid={out} EndTime=now+2", "root")
    wait(out, "TIMEOUT")
    ask(*jobs, out)
    save("08-ended")
    again, kept = submit(*["--requeue --wrap 'sleep 300'"] * 2)
    for job_id, verb in ((again, "requeue"), (kept, "requeuehold")):
        wait(job_id, "RUNNING")
        run(f"scontrol {verb} {job_id}")
        wait(job_id, "PENDING")
    ask(again, kept)
    run(f"scancel {again} {kept}")
    save("09-requeued")
    ask("999999")
    ask("999998", jobs[0])
    save("10-unknown")


def trouble() -> None:
    shell("sed s/^SlurmctldPort=.*/SlurmctldPort=9/ /etc/slurm/slurm.conf > slurm.conf")
    status = line(Slurm().status(["1"]))
    for command in (SUBMIT + "--wrap true", status, "scancel 1"):
        run(f"SLURM_CONF=$PWD/slurm.conf {command}")
    shell("rm slurm.conf")
    save("11-controller-down")
    shell("kill -STOP $(pgrep -x slurmctld)", "root")
    try:
        for command in (SUBMIT + "--wrap true", status):
            run(f"timeout 80 {command}")
    finally:
        shell("kill -CONT $(pgrep -x slurmctld)", "root")
    save("12-controller-hangs")


def arrays() -> None:
    array = run(SUBMIT + "--array=0-2%1 --wrap '[ $SLURM_ARRAY_TASK_ID != 0 ] || exit 3; sleep 300'")
    wait(array, "_0|FAILED", "_1|RUNNING", "_2|PENDING|JobArrayTaskLimit")
    ask(*Slurm().elements(array, 3))
    run(f"scancel {array}_[1-2]")
    wait(array, "_1|CANCELLED", absent="PENDING")  # 26.05.5 lists no element that was cancelled while it waited
    ask(*Slurm().elements(array, 3))
    save("13-array")
    big, other = submit("--array=0-9 --hold --wrap true", "--hold --wrap true")
    run(line(*Slurm().cancel([f"{big}_{i}" for i in (1, 2, 3, 5)])))
    run(line(*Slurm().cancel([f"{big}_3", f"{big}_8", f"{big}_9", other])))
    run(f"scancel {big}_77")
    ask(*Slurm().elements(big, 10), other)
    run(line(*Slurm().cancel(Slurm().elements(big, 10))))
    ask(*Slurm().elements(big, 10), other)
    save("14-array-cancel")


def suspended() -> None:
    (job,) = submit("--wrap 'sleep 300'")
    wait(job, "RUNNING")
    run(f"scontrol suspend {job}")
    run(f"scontrol suspend {job}", "root")
    ask(job)
    run(f"scontrol resume {job}", "root")
    ask(job)
    run(f"scancel {job}")
    save("15-suspended")


def preempted() -> None:
    again, gone = submit(*(f"-p low -N2 --exclusive --{x}requeue --wrap 'sleep 300'" for x in ("", "no-")))
    for job_id in (again, gone):
        wait(job_id, "RUNNING")
    (high,) = submit("-p high -N4 --exclusive --wrap 'sleep 300'")
    wait(high, "RUNNING")
    ask(again, gone, high)
    run(f"scancel {again} {high}")
    save("16-preempted")


def node_died() -> None:
    places = ("-w node4 --requeue", "-w node4 --no-requeue", "-N2 -w node[3-4] --no-requeue")
    again, gone, both = submit(*(f"{place} --wrap 'sleep 300'" for place in places))
    for job_id in (again, gone, both):
        wait(job_id, "RUNNING")
    nodes = line(Slurm().nodes(["node3", "node4"]))
    subprocess.run(["docker", "kill", f"hpcgpu{NUMBER}-node4"], check=True, timeout=scaled(60))
    try:
        for state in ("", "*|", "down"):  # nothing is noticed yet; it does not answer; it is given up
            until(lambda s=state: s in shell(nodes).stdout, f"node4 is {state}", limit_s=150, every_s=0.1)
            if state == "down":
                wait(again, "PENDING")
                wait(gone, "NODE_FAIL")
                wait(both, "NODE_FAIL")
            ask(again, gone, both)
            run(nodes)
        run(f"scancel {again}")
        save("17-node-died")
    finally:
        LAB.up()


def starts() -> None:
    """When a pending job is expected to start: the backfill scheduler says it, every 30 s."""
    running, pending = submit("-N4 --exclusive -t 60 --wrap 'sleep 300'", "-N4 --exclusive -t 5 --wrap true")
    wait(running, "RUNNING")
    ask(pending)
    wait(pending, "|2")
    ask(pending)
    run(f"scancel {pending} {running}")
    save("18-starts")


def offers() -> None:
    """What sinfo says of nodes and limits, and why jobs wait that ask for more."""
    shell("scontrol update partitionname=low MaxTime=1:30:00 MaxNodes=2", "root")
    for queue in (None, "low", "low,high", "nosuch"):
        run(line(ask_offers(queue)))
    more = submit(*(f"{x} --wrap true" for x in ("-N5", "-p low -N3", "-p low -t 120", "-c 99", "-p low,high -N5")))
    shell("scontrol update nodename=node4 state=drain reason=test", "root")
    more += submit("-N4 --wrap true")
    awaited = ("PENDING", "PENDING", "PartitionTimeLimit", "PartitionConfig", "PENDING", "DOWN")
    for job_id, word in zip(more, awaited, strict=True):
        if job_id:  # 24.11.5 refuses more CPUs than a node has, 22.05.8 lets the job wait
            wait(job_id, word)
    more = [*filter(None, more)]
    ask(*more)
    run(f"scancel {' '.join(more)}")
    shell("scontrol update nodename=node4 state=resume", "root")
    shell("scontrol update partitionname=low MaxTime=UNLIMITED MaxNodes=UNLIMITED", "root")
    save("19-offers")


def names() -> None:
    """What becomes of job names as our scripts write them: every ASCII character, blanks, quotes, letters of others."""
    each = [f"a{chr(c)}b" for c in range(33, 127)]
    written = {}
    for name in ("$(id)", "it's", 'say "hi"', "a\\", " two  words ", "a #b", "#x", "-n", "tab\tx", "é日本", *each):
        script = Slurm().script(JobSpec(name=name, argv=("true",), account="project", extra_directives=("--hold",)))
        shown = shell("scontrol show job $(sbatch --parsable)", stdin=script).stdout
        option = next(line for line in script.splitlines() if "--job-name" in line)
        written[option] = next(line for line in shown.splitlines() if "JobName=" in line).partition("JobName=")[2]
    shell("scancel --me --state=PENDING")
    text = json.dumps(written, indent=0, ensure_ascii=False)
    (BATCH / "slurm" / VERSION / "names.json").write_text(f"{text}\n")


def inventory() -> None:
    """What a draft of a site file is made of, and a partition that is not there."""
    for command in questions("slurm"):
        run(line(command))
    run("scontrol show partition --oneliner nosuch")
    save("20-inventory")


def as_json() -> None:
    """Jobs in several states as squeue writes them in text, and the same fields of its JSON: each job on a line."""
    two = "-N2 --exclusive --gpus-per-node=2 -t 5"
    running, failed, killed = submit(f"{two} --wrap 'sleep 300'", "--wrap 'exit 3'", "--wrap 'kill -9 $$'")
    held, dependent = submit("--hold --wrap true", f"-d afterok:{running} --wrap true")
    later, array = submit(f"--begin=now+1hour --comment={'c' * 200} --wrap true", "--array=0-2%1 --wrap 'sleep 300'")
    ended = ((failed, "FAILED"), (killed, "FAILED"))
    for job_id, word in (*ended, (running, "RUNNING"), (dependent, "Dependency"), (later, "BeginTime")):
        wait(job_id, word)
    wait(array, "_0|RUNNING", "_1|PENDING|JobArrayTaskLimit")
    jobs = json.loads(shell("squeue --json --states=all").stdout)["jobs"]
    run(line(Slurm().status([running, failed, killed, held, dependent, later, *Slurm().elements(array, 3)])))
    run(line(Slurm().find("", "")))
    run(f"scancel {running} {held} {dependent} {later} {array}")
    save("21-squeue")
    # The lab is idle, but has jobs that ended; an array's elements have numbers after its own.
    lines = [json.dumps({name: job[name] for name in OF_JSON}) for job in jobs if job["job_id"] >= int(running)]
    text = ",\n".join(lines)
    (BATCH / "slurm" / VERSION / "squeue.json").write_text(f"[\n{text}\n]\n")


def tested() -> None:
    for option in ("-N2 --gpus-per-node=2", "-p nosuch"):
        run(f"sbatch --test-only -A project {option} --wrap true")
    save("22-test-only")


PARTS: tuple[Callable[[], None], ...] = (
    submissions, limits, states, ends, trouble, arrays, suspended, preempted, node_died, starts, offers, names,
    inventory, as_json, tested,
)  # fmt: skip

if __name__ == "__main__":
    parts = {part.__name__: part for part in PARTS}
    if unknown := [name for name in sys.argv[1:] if name not in parts]:
        sys.exit(f"no such part: {', '.join(unknown)}; there are {', '.join(parts)}")
    VERSION = shell("sbatch --version").stdout.split()[1]
    (BATCH / "slurm" / VERSION).mkdir(exist_ok=True)
    for name in sys.argv[1:] or parts:
        print(name, flush=True)
        parts[name]()

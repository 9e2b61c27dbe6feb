"""Record what a real Slurm prints: ``record.py USER FOLDER``, as root, where two nodes are idle.

The cluster needs accounting (slurmdbd) with ``AccountingStorageEnforce=associations,limits,qos``, 4 GPUs a node, a
partition ``cpu``, an account ``proj`` for USER, and a QOS ``one`` with ``MaxSubmitJobsPerUser=1``. FOLDER is USER's to
write; names of machine and user are replaced in what is written here.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path

from hpcgpu.batch import Slurm
from hpcgpu.model import JobSpec

SQUEUE = "squeue --noheader --states=all --jobs={} '--Format=JobID:|,State:|,exit_code:|,Reason:|'"
SACCT = "sacct --noheader --parsable --allocations --format=JobIDRaw,State,ExitCode,Reason --jobs={}"
SUBMIT = "sbatch --parsable -A proj -o /dev/null "
REFUSED = (
    "--partition=nosuch", "--account=nosuch", "--qos=nosuch", "--no-such-option", "--nodes=99", "--time=1h",
    "--gpus-per-node=9", "--gres=nosuch:1", "--mem=99T", "--constraint=nosuch", "--mem=1G --mem-per-cpu=1G",
)  # fmt: skip


def run(command: str, *, wait: str = "") -> str:
    """Run a shell line as USER, record it, and return what it printed; ``wait`` waits for a state of that job first."""
    deadline = time.monotonic() + 60
    while wait and wait.split()[1] not in shell(f"squeue -h -t all -j {wait.split(maxsplit=1)[0]} -o '%T %r'").stdout:
        assert time.monotonic() < deadline, wait
        time.sleep(0.1)
    done = shell(command)
    head = f"$ {command}\n[user user1] [exit {done.returncode}]\n"
    BLOCKS.append(f"{head}--- stdout\n{done.stdout}--- stderr\n{done.stderr}===\n")
    return done.stdout.strip()


def shell(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["runuser", "-u", USER, "--", "bash", "-c", command], cwd=FOLDER, capture_output=True, text=True, timeout=90
    )


def save(name: str) -> None:
    text = "".join(BLOCKS).replace(str(FOLDER), "/home/user1").replace(USER, "user1")
    (Path(__file__).parent / VERSION / f"{name}.txt").write_text(text)
    BLOCKS.clear()


def ask(name: str, *job_ids: str) -> None:
    run(SQUEUE.format(",".join(job_ids)))
    run(SACCT.format(",".join(job_ids)))
    save(name)


def submissions() -> None:
    ok = run(SUBMIT + "--wrap true")
    run("printf '#!/bin/bash\\n#SBATCH --account=proj --output=/dev/null\\ntrue\\n' | sbatch --parsable")
    save("01-sbatch-ok")
    for option in REFUSED:
        run(SUBMIT + f"--wrap true {option}")
    run("printf 'true\\n' | sbatch --parsable")
    run("printf '#!/bin/bash\\r\\ntrue\\r\\n' | sbatch --parsable")
    run("sbatch --parsable < /dev/null")
    save("02-sbatch-refused")
    one = run(SUBMIT + "--qos=one --hold --wrap true")
    run(SUBMIT + "--qos=one --hold --wrap true")
    run(f"scancel {one}")
    save("03-sbatch-limit")
    ask("04-just-submitted", ok)


def states() -> None:
    running = run(SUBMIT + "-N2 --exclusive --wrap 'sleep 300'")
    pending = run(SUBMIT + "-N2 --exclusive --wrap true")
    held = run(SUBMIT + "--hold --wrap true")
    dependent = run(SUBMIT + f"-d afterok:{running} --wrap true")
    later = run(SUBMIT + "--begin=now+1hour --wrap true")
    run("true", wait=f"{running} RUNNING")
    BLOCKS.clear()
    time.sleep(3)  # the scheduler's next turn gives the pending job its reason
    ask("05-alive", running, pending, held, dependent, later)
    run(f"scancel {running}")
    run(f"scancel {running}", wait=f"{running} CANCELLED")
    run("scancel 999999")
    run(f"scancel {pending} 999999")
    run(f"scancel {held} {dependent} {later}")
    save("06-scancel")
    ask("07-cancelled", running, pending, held)


def ends() -> None:
    ok, failed, killed, missing = (
        run(SUBMIT + f"--wrap '{script}'") for script in ("true", "exit 3", "kill -9 $$", "no-such-program")
    )
    out = run(SUBMIT + "-t 1 --wrap 'sleep 300'")
    BLOCKS.clear()
    run(SQUEUE.format(out), wait=f"{out} RUNNING")
    subprocess.run(["scontrol", "update", f"jobid={out}", "EndTime=now+2"], check=True)
    run(SQUEUE.format(out), wait=f"{out} TIMEOUT")
    BLOCKS.clear()
    ask("08-ended", ok, failed, killed, missing, out)
    again, kept = (run(SUBMIT + "--requeue --wrap 'sleep 300'") for _ in range(2))
    BLOCKS.clear()
    for job_id, verb in ((again, "requeue"), (kept, "requeuehold")):
        run("true", wait=f"{job_id} RUNNING")
        subprocess.run(["scontrol", verb, job_id], check=True)
    run("true", wait=f"{kept} PENDING")
    BLOCKS.clear()
    run(SQUEUE.format(f"{again},{kept}"))
    run(SACCT.format(f"{again},{kept}"))
    run(f"scancel {again} {kept}")
    save("09-requeued")
    run(SQUEUE.format(999999))
    run(SQUEUE.format(f"999998,{ok}"))
    run(SACCT.format(999999))
    save("10-unknown")


def trouble() -> None:
    run("sed s/^SlurmctldPort=.*/SlurmctldPort=9/ $SLURM_CONF > slurm.conf")
    BLOCKS.clear()
    for command in (SUBMIT + "--wrap true", SQUEUE.format(1), "scancel 1"):
        run(f"SLURM_CONF=$PWD/slurm.conf {command}")
    save("11-controller-down")
    pid = subprocess.run(["pgrep", "-x", "slurmctld"], capture_output=True, text=True, check=True).stdout.split()[0]
    subprocess.run(["kill", "-STOP", pid], check=True)
    try:
        for command in (SUBMIT + "--wrap true", SQUEUE.format(1)):
            run(f"timeout 80 {command}")
    finally:
        subprocess.run(["kill", "-CONT", pid], check=True)
    save("12-controller-hangs")


def names() -> None:
    """What becomes of job names as our scripts write them: every ASCII character, blanks, quotes, letters of others."""
    each = [f"a{chr(c)}b" for c in range(33, 127)]
    found = {}
    for name in ("$(id)", "it's", 'say "hi"', "a\\", " two  words ", "a #b", "#x", "-n", "tab\tx", "é日本", *each):
        script = Slurm().script(JobSpec(name=name, argv=("true",), account="proj", extra_directives=("--hold",)))
        shown = shell(f"scontrol show job $(sbatch --parsable <<< {shlex.quote(script)})").stdout
        line = next(line for line in script.splitlines() if "--job-name" in line)
        found[line] = next(line for line in shown.splitlines() if "JobName=" in line).partition("JobName=")[2]
        shell("scancel --me --state=PENDING")
    (Path(__file__).parent / VERSION / "names.json").write_text(json.dumps(found, indent=0, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    USER, FOLDER, BLOCKS = sys.argv[1], Path(sys.argv[2]), list[str]()
    VERSION = shell("sbatch --version").stdout.split()[1]
    (Path(__file__).parent / VERSION).mkdir(exist_ok=True)
    submissions()
    states()
    ends()
    trouble()
    names()

"""Our job scripts on a real Slurm: the warning before the end, and a cancellation."""

import re
import shlex
from dataclasses import replace

import pytest
from lab import Lab

from hpcgpu.batch import Slurm
from hpcgpu.model import Command, JobSpec, Result

RANK = """
import os, signal, time
me = os.environ.get("SLURM_PROCID") if "OMPI_COMM_WORLD_RANK" not in os.environ else os.environ["OMPI_COMM_WORLD_RANK"]
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
print("listens", me, flush=True)
print(signal.Signals(signal.sigwait({signal.SIGUSR1})).name, me, flush=True)
exit(3)
"""
LAUNCHERS = {
    "srun": ("srun", "--unbuffered"),
    "mpirun": ("/usr/bin/mpirun",),
    "mpirun-5": ("/opt/venv-wheel/bin/mpirun", "--bind-to", "none"),
}


def run(lab: Lab, command: Command) -> Result:
    done = lab.exec(lab.login, command.argv, timeout=command.timeout_s, stdin=command.stdin)
    return Result(command.argv, done.returncode, done.stdout, done.stderr)


def submit(lab: Lab, spec: JobSpec) -> str:
    slurm = Slurm()
    return slurm.read_submit(run(lab, slurm.submit(slurm.script(spec), spec)))


def heard(log: str, word: str) -> list[str]:
    return sorted(re.findall(rf"^{word} (\d)$", log, re.M))


@pytest.mark.parametrize(("launcher", "signal"), [*((name, "USR1") for name in LAUNCHERS), ("srun", "TERM")])
def test_a_warned_or_cancelled_job_reaches_every_rank(slurm_lab: Lab, launcher: str, signal: str) -> None:
    """The script passes a warning on; of a job that is cancelled Slurm sends SIGTERM to all ranks."""
    slurm_lab.write("rank.py", RANK.replace("USR1", signal))
    argv = (*LAUNCHERS[launcher], "python3", "/home/hpc/rank.py")
    spec = JobSpec(name="x", argv=argv, nodes=2, tasks_per_node=2, walltime_s=600, exit_file="ended", warn_s=60)
    spec = replace(spec, extra_directives=("-o %x%%%j.%A",))
    job = submit(slurm_lab, spec)
    log = Slurm().log(spec, job)
    follow = f"until [ $(grep -c listens {shlex.quote(log)}) = 4 ]; do sleep 0.1; done"
    slurm_lab.wait_job(job, {"RUNNING"})
    slurm_lab.exec(slurm_lab.login, ["bash", "-c", follow], check=True)
    if signal == "USR1":
        slurm_lab.exec(slurm_lab.login, ["scancel", "--batch", "--signal=USR1", job], check=True)
    else:
        (command,) = Slurm().cancel([job])
        assert Slurm().read_cancel(run(slurm_lab, command))
    facts = slurm_lab.wait_job(job)
    slurm_lab.wait_idle()
    text = slurm_lab.read(log)
    assert heard(text, f"SIG{signal}") == ["0", "1", "2", "3"], text
    assert slurm_lab.read("ended") == "3\n"
    if signal == "USR1":
        assert facts["ExitCode"] == "3:0", text


def test_slurm_warns_before_the_time_limit(slurm_lab: Lab) -> None:
    """It looks twice a minute, and may be a minute early. Without a request the limit is the partition's."""
    slurm_lab.write("rank.py", RANK)
    spec = JobSpec(name="x", argv=("srun", "python3", "/home/hpc/rank.py"), walltime_s=120, warn_s=60)
    default = replace(spec, walltime_s=None, queue="low")
    slurm_lab.root("scontrol", "update", "PartitionName=low", "DefaultTime=2")
    jobs = {submit(slurm_lab, asked): asked for asked in (spec, default)}
    slurm_lab.root("scontrol", "update", "PartitionName=low", "DefaultTime=UNLIMITED")
    listed = Slurm().read_status(run(slurm_lab, Slurm().status(list(jobs))))
    assert [listed[job].limit_s for job in jobs] == [120, 120]
    for job, asked in jobs.items():
        facts = slurm_lab.wait_job(job)
        assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "3:0")
        assert heard(slurm_lab.read(Slurm().log(asked, job)), "SIGUSR1") == ["0"]

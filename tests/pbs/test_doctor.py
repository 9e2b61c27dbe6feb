"""``hpcgpu doctor`` on a real OpenPBS: a job that does well, and faults that were prepared on its machines."""

import contextlib
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import ailing
from ailing import Found, check
from pbs_lab import HOME, PYTHON, PbsLab
from waiting import scaled

AILING = "/home/labuser/ailing"
FULL = "/dev/shm"
JOB = ("--submit", "--batch", "pbs", "--gpus-per-node", "1", "--cores-per-gpu", "2", "--memory", "1GB")
# As sites do it, with the words of this hook: who may charge which account.
ACCOUNTS = """
import pbs
job = pbs.event().job
if str(job.Account_Name or "project") != "project":
    pbs.event().reject("account %s is not yours to charge" % job.Account_Name)
"""


def doctor(lab: PbsLab, *words: str) -> tuple[Found, str]:
    """Return what a doctor on the login node finds, by the names of its checks, and what it says meanwhile."""
    line = shlex.join([str(PYTHON), "-m", "hpcgpu", "doctor", "--json", *words])
    output = lab.on("login01", f"mkdir -p work; cd work; {line} 2> doctor.err || :")
    meanwhile = lab.on("login01", "cat work/doctor.err; rm work/doctor.err")
    assert output, meanwhile
    assert not [path for path in (HOME / ".hpcgpu" / "runs").glob("*/record") if "hpcgpu-doctor" in path.read_text()]
    return ailing.read(output), meanwhile


def as_root(lab: PbsLab, machine: str, line: str) -> None:
    lab.on(machine, line, user="root")


@contextlib.contextmanager
def broken(lab: PbsLab, machine: str, breaks: str, mends: str) -> Iterator[None]:
    """Break a machine by a line of root's, and mend it by another."""
    as_root(lab, machine, breaks)
    try:
        yield
    finally:
        as_root(lab, machine, mends)


def test_a_job_that_does_well(lab: PbsLab) -> None:
    findings, stderr = doctor(lab, *JOB)
    assert "RUNNING" in stderr
    assert "it asks PBS for" not in stderr
    check(findings, "job request", "ok", "it took job")
    assert findings["job"]["seen"].endswith(" ran on node1, node2")
    for name in ("home", "versions"):  # a warning if this machine is too busy to write or import fast
        assert findings[name]["verdict"] == "ok" or "slow" in findings[name]["advice"], findings[name]
    check(findings, "node to node", "ok")
    check(findings, "here to nodes", "ok")
    check(findings, "clocks", "ok")
    check(findings, "launcher and MPI", "ok", "mpirun", "3 ranks of", "met")
    check(findings, "GPUs", "failed", "0 of 1 GPUs")


def test_ten_faults_of_one_job_are_named(lab: PbsLab, tmp_path: Path) -> None:
    """The clock, the network card and the mask are stand-ins: this PBS has one machine's clock and no cgroups."""
    unpack = ["runuser", "-u", "labuser", "--", "sh", "-c", f"mkdir {AILING}; base64 -d | tar xz -C {AILING}"]
    subprocess.run(unpack, input=ailing.tarball(tmp_path), text=True, check=True, timeout=scaled(60))
    prologue = f"taskset -cp 0 $$; {ailing.prologue(AILING, late='node2')}"
    options = ("--local-directory", FULL, "--launcher", "/opt/pbs/bin/pbsdsh --")
    fill = f"mount -t tmpfs -o size=1m,mode=1777 tmpfs {FULL} && cat /dev/zero > {FULL}/fills-it || :"
    rule = "OUTPUT -p tcp --syn -d $(getent hosts node2 | cut -d ' ' -f 1) --dport 20000:65535 -j DROP"
    with (
        broken(lab, "node1", f"iptables -A {rule}", f"iptables -D {rule}"),
        broken(lab, "node2", fill, f"umount {FULL}"),
        broken(lab, "login01", ":", f"rm -r {AILING}"),
    ):
        findings, _ = doctor(lab, *JOB, *options, "--job-script-prologue", prologue)
    ailing.check_prepared(findings)
    check(findings, "launcher and MPI", "failed", "/opt/pbs/bin/pbsdsh")
    check(findings, "clocks", "warning", "the clock of ", "node2")


def test_an_account_that_is_not_ones_own_is_named(lab: PbsLab) -> None:
    hook = f"qmgr -c 'create hook accounts event=queuejob' && cat > /tmp/accounts.py << 'END'\n{ACCOUNTS}END\n"
    install = "qmgr -c 'import hook accounts application/x-python default /tmp/accounts.py'"
    with broken(lab, "login01", f"{hook}{install}", "qmgr -c 'delete hook accounts'"):
        findings, _ = doctor(lab, *JOB, "--account", "nobody")
    check(findings, "job", "failed", "account nobody is not yours to charge", "--account NAME")

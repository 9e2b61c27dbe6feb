"""The Slurm lab of ``docker/`` as an object: run commands on its machines, wait for its jobs."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

LAB_SH = Path(__file__).parents[1] / "docker" / "lab.sh"
UNAVAILABLE = 3  # exit code of lab.sh
ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
}
# Labs beside each other: HPCGPU_LAB=1 to 4 names another one, with a network of its own.
NUMBER = os.environ.get("HPCGPU_LAB", "")
NETWORK = f"10.77.{NUMBER or 0}"
WITH_ACCOUNTING = str(int(NUMBER or 0) + 5)  # the number of the lab with slurmdbd beside it
CHECKOUT = "/opt/hpcgpu"  # where the containers see this checkout, read-only


class LabUnavailable(Exception):
    """The lab cannot be had on this machine; the text says why."""


class Lab:
    """Login container, compute nodes, and what runs on them."""

    login = "slurmctld"
    nodes = ("node1", "node2", "node3", "node4")
    gpus_per_node = 4

    def __init__(self, number: str = NUMBER, accounting: bool = False) -> None:
        """Take the lab of that number, with slurmdbd or without."""
        self.number, self.accounting = number, accounting

    def lab_sh(self, word: str, timeout: float) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "HPCGPU_LAB": self.number} | ({"ACCOUNTING": "1"} if self.accounting else {})
        return subprocess.run([LAB_SH, word], capture_output=True, text=True, timeout=timeout, env=env)

    def up(self) -> None:
        """Build what is not built and start what is not started.

        Raises
        ------
        LabUnavailable
            If this machine has no Docker, no compose, or no way to a base image.
        """
        done = self.lab_sh("up", timeout=850)
        if done.returncode == UNAVAILABLE:
            raise LabUnavailable(done.stderr.strip().removeprefix("slurm lab: "))
        assert done.returncode == 0, done.stderr

    def down(self) -> None:
        done = self.lab_sh("down", timeout=120)
        assert done.returncode == 0, done.stderr

    def is_up(self) -> bool:
        try:
            return self.exec(self.login, ["sinfo"], timeout=10).returncode == 0
        except FileNotFoundError:
            return False

    def exec(
        self,
        container: str,
        argv: Sequence[str],
        user: str = "hpc",
        timeout: float = 60,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, from the user's home; after ``timeout`` seconds it is ended, exit code 124."""
        done = subprocess.run(
            self.command(container, argv, user, timeout, env),
            capture_output=True,
            text=True,
            input=stdin,
            timeout=timeout + 30,
        )
        assert not check or done.returncode == 0, f"{argv}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def start(
        self, container: str, argv: Sequence[str], timeout: float = 120, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command of the user in a container and hand its process out, to talk to or to wait for."""
        pipe = subprocess.PIPE
        argv = self.command(container, argv, "hpc", timeout, env)
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, text=True)

    def command(
        self, container: str, argv: Sequence[str], user: str, timeout: float, env: Mapping[str, str] | None
    ) -> list[str]:
        home = "/home/hpc" if user == "hpc" else "/"
        variables = [f"--env={name}={value}" for name, value in (env or {}).items()]
        # Ending `docker exec` leaves its command running in the container: the limit must be in there.
        limit = ["timeout", "-k", "5", str(timeout)]
        place = f"hpcgpu{self.number}-{container}"
        return ["docker", "exec", "-i", "-u", user, "-w", home, *variables, place, *limit, *argv]

    def write(self, path: str, text: str) -> None:
        """Write a file of the user in the shared home."""
        self.exec(self.login, ["sh", "-c", f'mkdir -p "$(dirname {path})" && cat > {path}'], stdin=text, check=True)

    def read(self, path: str) -> str:
        return self.exec(self.login, ["cat", path], check=True).stdout

    def submit(self, script: str, *options: str) -> str:
        """Give a batch script to sbatch and return the job id."""
        return self.exec(self.login, ["sbatch", "--parsable", *options], stdin=script, check=True).stdout.strip()

    def jobs(self) -> dict[str, str]:
        """Return the state of every job that has not ended, of any user."""
        out = self.exec(self.login, ["squeue", "-h", "-o", "%i %T"], check=True).stdout
        return dict(line.split() for line in out.splitlines())

    def job(self, job_id: str) -> dict[str, str]:
        """Return the facts that ``scontrol show job`` has, by their names there."""
        out = self.exec(self.login, ["scontrol", "--oneliner", "show", "job", job_id], check=True).stdout
        return dict(word.split("=", 1) for word in out.split() if "=" in word)

    def wait_job(self, job_id: str, states: frozenset[str] | set[str] = ENDED, timeout: float = 60) -> dict[str, str]:
        """Wait until the job is in one of the states (default: it ended) and return its facts."""
        deadline = time.monotonic() + timeout
        while (facts := self.job(job_id))["JobState"] not in states:
            assert facts["JobState"] not in ENDED, f"job {job_id} ended before it was {states}: {facts}"
            assert time.monotonic() < deadline, f"job {job_id} is not {states} after {timeout} s: {facts}"
            time.sleep(0.1)
        return facts

    def processes(self, user: str = "hpc") -> set[str]:
        """Return ``container: pid command`` of all processes of the user, on all machines."""
        found: set[str] = set()
        for container in (self.login, *self.nodes):
            out = self.exec(container, ["ps", "-o", "pid=,args=", "-u", user], user="root").stdout
            found |= {f"{container}: {line.strip()}" for line in out.splitlines()}
        return found

    def wait_idle(self, before: set[str] = frozenset(), timeout: float = 15) -> list[str]:
        """Wait until no jobs and no new processes are left; return what still is after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while left := [*self.jobs().items(), *(self.processes() - before)]:
            if time.monotonic() > deadline:
                return [str(thing) for thing in left]
            time.sleep(0.2)
        return []

    def clean_up(self, before: set[str] = frozenset()) -> None:
        """End all jobs, and all processes of the user that were not there before."""
        self.exec(self.login, ["scancel", "--full", "-u", "hpc"])
        for line in self.processes() - before:
            container, rest = line.split(": ", 1)
            self.exec(container, ["kill", "-9", rest.split()[0]], user="root")
        self.wait_idle(before)

    @contextmanager
    def closed_ports(self) -> Iterator[None]:
        """Let the login container reach no port of the compute nodes but slurmd's, as on sites with a firewall."""
        to_nodes = ["-p", "tcp", "--syn", "-d", f"{NETWORK}.8/29", "!", "--dport", "6818", "-j", "DROP"]
        self.exec(self.login, ["iptables", "-A", "OUTPUT", *to_nodes], user="root", check=True)
        try:
            yield
        finally:
            self.exec(self.login, ["iptables", "-D", "OUTPUT", *to_nodes], user="root", check=True)

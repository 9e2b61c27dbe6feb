"""The Slurm lab of ``docker/`` as an object: run commands on its machines, wait for its jobs."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from clients import LOOP, Client
from paths import ROOT
from waiting import STEADY, scaled

LAB_SH = ROOT / "docker" / "lab.sh"
UNAVAILABLE = 3  # exit code of lab.sh
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}
ENDED |= {"PREEMPTED", "BOOT_FAIL", "DEADLINE"}
# Labs beside each other, with networks of their own: HPCGPU_LAB names another one than that without a number, and each
# worker of pytest-xdist (gw0, gw1, ...) has the next one.
_BESIDE = int(os.environ.get("HPCGPU_LAB") or 0) + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
NUMBER = str(_BESIDE or "")
NETWORK = f"10.77.{_BESIDE}"
WITH_ACCOUNTING = str(_BESIDE + 5)  # the number of the lab with slurmdbd beside it
# How long a command or a wait may take while labs and tests beside it have all cores of a slow machine, in seconds.
PATIENCE_S = scaled(240)
CHECKOUT = "/opt/hpcgpu"  # where the containers see this checkout, read-only


# A venv of the lab's Python with the packages of one of this checkout, and its own command hpcgpu.
_MAKE = """
set -e
[ ! -e ~/{name} ] || exec ~/{name}/bin/python -c 'import hpcgpu, {modules}'
python3 -m venv --without-pip ~/{name}
printf '%s\\n' {below} {checkout} {packages} > $(echo ~/{name}/lib/python3*/site-packages)/{name}.pth
printf '#!/bin/sh\nexec ~/{name}/bin/python -m hpcgpu "$@"\n' > ~/{name}/bin/hpcgpu
chmod +x ~/{name}/bin/hpcgpu
~/{name}/bin/python -c 'import hpcgpu, {modules}'
"""

# Runs a command as `docker exec` would, which takes 0.2 s and 0.1 s of CPU for each, most of it docker's (20.10): in a
# session of its own, until its first process has ended; in files, since what that leaves may hold its output open.
_RUN_AS = """
import os, pwd, subprocess, tempfile

def run_as(argv, user, env, stdin):
    who = pwd.getpwnam(user)
    ids = dict(user=who.pw_uid, group=who.pw_gid, extra_groups=os.getgrouplist(user, who.pw_gid))
    place, env = who.pw_dir if who.pw_uid else "/", {**os.environ, "HOME": who.pw_dir, **env}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        pipes = dict(stdin=given, stdout=out, stderr=err)
        code = subprocess.call(argv, cwd=place, env=env, start_new_session=True, **ids, **pipes)
        for file in (out, err):
            file.seek(0)
        text = [file.read().decode(errors="replace") for file in (out, err)]
    return dict(code=code if code >= 0 else 128 - code, out=text[0], err=text[1])  # as a shell, and docker, has it
"""


class LabUnavailable(Exception):
    """The lab cannot be had on this machine; the text says why."""


class Lab:
    """Login container, compute nodes, and what runs on them."""

    login = "slurmctld"
    nodes = ("node1", "node2", "node3", "node4")

    def __init__(self, number: str = NUMBER, accounting: bool = False) -> None:
        """Take the lab of that number, with slurmdbd or without."""
        self.number, self.accounting = number, accounting
        self._roots: dict[str, Client] = {}
        self.others: set[str] = set()  # processes of the user that were there before the tests

    def has_pmix(self) -> bool:
        types = self.exec(self.login, ["srun", "--mpi=list"])
        return "pmix" in types.stdout + types.stderr

    def needs_pmix(self) -> None:
        """Skip a test of srun with MPI where Slurm is built without PMIx, as sid's 26.05.5."""
        if not self.has_pmix():
            pytest.skip("this Slurm is built without PMIx")

    def meeting(self, launcher: tuple[str, ...], options: tuple[str, ...] = ()) -> tuple[tuple[str, ...], ...]:
        """Return the words of a launcher and hpcgpu's options by which ranks meet here: by files without PMIx."""
        if "--mpi=pmix" not in launcher or self.has_pmix():
            return launcher, options
        return tuple(word.replace("=pmix", "=none") for word in launcher), (*options, "--rendezvous", "file")

    def lend(self, venv: str, name: str, modules: Sequence[str], below: str = "") -> None:
        """Make ``~/NAME``, a venv with the packages of the checkout's venv; ``below``: folders that go before them."""
        packages = self.packages_of(venv, modules[0])
        values = {"name": name, "below": below, "checkout": CHECKOUT, "packages": packages}
        done = self.exec(self.login, ["sh", "-c", _MAKE.format(**values, modules=", ".join(modules))])
        if done.returncode:
            why = done.stderr.strip().splitlines()[-1]
            raise LabUnavailable(f"{packages} is not of the lab's Python: {why}")

    def packages_of(self, venv: str, module: str) -> str:
        """Return where the lab sees the packages of a venv of the checkout."""
        packages = next((ROOT / venv / "lib").glob("python3*/site-packages"), None)
        if packages is None or not (packages / module).exists():
            raise LabUnavailable(f"{venv} has no {module}")
        return f"{CHECKOUT}/{packages.relative_to(ROOT)}"

    def lab_sh(self, word: str, timeout: float, typed: str = "") -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"capture_output": True, "text": True, "env": self._environment(), "input": typed}
        return subprocess.run([LAB_SH, word], timeout=timeout, **options)

    def _environment(self) -> dict[str, str]:
        more = {"PYTHON": sys.executable, "HPCGPU_LAB": self.number, "ACCOUNTING": "1" if self.accounting else ""}
        return {**os.environ, **more}

    def build(self) -> None:
        """Build what is not built."""
        done = self.lab_sh("build", timeout=850)
        if done.returncode == UNAVAILABLE:
            raise LabUnavailable(done.stderr.strip().removeprefix("slurm lab: "))
        assert done.returncode == 0, done.stderr

    def up(self) -> None:
        """Start what is not started; raise as ``build``."""
        done = self.lab_sh("up", timeout=300)
        assert done.returncode == 0, done.stderr

    @contextmanager
    def down_at_the_end(self) -> Iterator[None]:
        """Take it down at the end, also when this process is killed: then its end of a pipe is closed."""
        argv = ["sh", "-c", 'cat > /dev/null; exec "$0" down', LAB_SH]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        waiting = subprocess.Popen(argv, text=True, env=self._environment(), process_group=0, **pipes)
        try:
            yield
        finally:
            self.close()
            output, _ = waiting.communicate(timeout=120)
            assert waiting.returncode == 0, output

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
        timeout: float = PATIENCE_S,
        env: Mapping[str, str] | None = None,
        stdin: str = "",
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, from the user's home; after ``timeout`` seconds it is ended, exit code 124."""
        limited = ["timeout", "-k", "5", str(timeout), *argv]
        errand = {"argv": limited, "user": user, "env": {**STEADY, **(env or {})}, "stdin": stdin}
        try:
            answer = self._run(container, timeout + 30, errand)
        except EOFError as e:
            answer = {"code": 1, "out": "", "err": str(e)}
        done = subprocess.CompletedProcess(argv, answer["code"], answer["out"], answer["err"])
        assert not check or done.returncode == 0, f"{argv}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def _run(self, container: str, limit_s: float, errand: dict[str, Any]) -> dict[str, Any]:
        if client := self._roots.pop(container, None):
            with contextlib.suppress(EOFError):  # the container has been stopped and started, so has what ran in it
                return self._run_in(container, client, limit_s, errand)
        argv = ["docker", "exec", "-i", f"hpcgpu{self.number}-{container}", "/usr/bin/python3", "-I", "-c", LOOP]
        client = Client(argv)
        client(_RUN_AS)
        return self._run_in(container, client, limit_s, errand)

    def _run_in(self, container: str, client: Client, limit_s: float, errand: dict[str, Any]) -> dict[str, Any]:
        try:
            client.send(f"run_as(**{errand!r})")
            answer = client.answer(limit_s)
        except BaseException:
            client.kill()
            raise
        self._roots[container] = client
        return answer

    def close(self) -> None:
        """Let go of the containers; they are opened again when they are needed."""
        while self._roots:
            self._roots.popitem()[1].kill()

    def argv(
        self, container: str, argv: Sequence[str], timeout: float = PATIENCE_S, env: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return the command line by which a command of the user's runs in a container."""
        # Ending `docker exec` leaves its command running in the container: the limit must be in there.
        limit = ["timeout", "-k", "5", str(timeout)]
        variables = [f"--env={name}={value}" for name, value in {**STEADY, **(env or {})}.items()]
        place = ["-u", "hpc", "-w", "/home/hpc", *variables, f"hpcgpu{self.number}-{container}"]
        return ["docker", "exec", "-i", *place, *limit, *argv]

    def start(self, container: str, argv: Sequence[str], timeout: float = PATIENCE_S) -> subprocess.Popen[str]:
        """Start a command of the user in a container and hand its process out, to talk to or to wait for."""
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(self.argv(container, argv, timeout), **pipes, text=True)

    @contextmanager
    def client(self, container: str = login, timeout: float = 2 * PATIENCE_S, **env: str) -> Iterator[Client]:
        """A Python of the user's that runs what it is sent, and has imported what a client needs."""
        client = Client(self.argv(container, ["python", "-c", LOOP], timeout, env))
        try:
            client("import os; from distributed import Client; from hpcgpu import SLURMGPUCluster")
            yield client
        finally:
            print(client.said)  # shown if the test fails
            client.end()

    def write(self, path: str, text: str) -> None:
        """Write a file of the user in the shared home."""
        self.exec(self.login, ["sh", "-c", f'mkdir -p "$(dirname {path})" && cat > {path}'], stdin=text, check=True)

    def read(self, path: str) -> str:
        return self.exec(self.login, ["cat", path], check=True).stdout

    def root(self, *argv: str, container: str = login) -> str:
        """Run a command as root, on the login node or another machine; return its output."""
        return self.exec(container, argv, user="root", check=True).stdout

    def python(self, code: str, *words: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run code by a Python of the login node; ``words`` replace ``python -u``."""
        self.write("script.py", textwrap.dedent(code))
        container = options.pop("container", self.login)
        return self.exec(container, [*(words or ("python", "-u")), "script.py"], check=check, **options)

    def facts(self, code: str, *words: str, **options: Any) -> Any:
        """Run code that prints ``FACTS`` and JSON; return the JSON."""
        done = self.python(code, *words, **options)
        print(done.stdout, done.stderr)  # shown if the test fails
        return json.loads(done.stdout.partition("FACTS")[2])

    def runs(self) -> list[str]:
        """Return the folders of runs in the user's home."""
        return self.exec(self.login, ["ls", ".hpcgpu/runs"], check=True).stdout.split()

    def forget_runs(self) -> None:
        """Remove folders of runs whose guard was killed with a failed test."""
        self.exec(self.login, ["sh", "-c", "rm -rf .hpcgpu/runs; mkdir -m 700 -p .hpcgpu/runs"], check=True)

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

    def wait_job(
        self, job_id: str, states: frozenset[str] | set[str] = ENDED, timeout: float = PATIENCE_S
    ) -> dict[str, str]:
        """Wait until the job is in one of the states (default: it ended) and return its facts."""
        deadline = time.monotonic() + timeout
        while (facts := self.job(job_id))["JobState"] not in states:
            assert facts["JobState"] not in ENDED, f"job {job_id} ended before it was {states}: {facts}"
            assert time.monotonic() < deadline, f"job {job_id} is not {states} after {timeout} s: {facts}"
            time.sleep(0.8)  # each look costs 20 ms of CPU
        return facts

    def processes(self, user: str = "hpc") -> set[str]:
        """Return ``container: pid command`` of all processes of the user, on all machines."""

        def there(container: str) -> set[str]:
            out = self.exec(container, ["ps", "-o", "pid=,args=", "-u", user], user="root").stdout
            return {f"{container}: {line.strip()}" for line in out.splitlines()}

        with ThreadPoolExecutor() as pool:
            return set().union(*pool.map(there, (self.login, *self.nodes)))

    def wait_idle(self, timeout: float = 60) -> list[str]:
        """Wait until no jobs and no new processes are left; return what still is after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        # Processes come last: they are a ps on each machine, 100 ms of CPU.
        while left := [*map(str, self.jobs().items())] or [*(self.processes() - self.others)]:
            if time.monotonic() > deadline:
                return left
            time.sleep(0.6)
        return []

    def clean_up(self) -> None:
        """End all jobs, and all processes of the user that were not there before."""
        self.exec(self.login, ["scancel", "--full", "-u", "hpc"])
        for line in self.processes() - self.others:
            container, rest = line.split(": ", 1)
            self.exec(container, ["kill", "-9", rest.split()[0]], user="root")
        self.wait_idle()

    @contextmanager
    def dropped(self, container: str, rule: str) -> Iterator[None]:
        """Let a container drop the TCP packets of an iptables rule: ``OUTPUT -d ADDRESS``."""
        chain, *match = rule.split()
        options = [chain, "-p", "tcp", *match, "-j", "DROP"]
        self.root("iptables", "-A", *options, container=container)
        try:
            yield
        finally:
            self.root("iptables", "-D", *options, container=container)

    def closed_ports(self, container: str = login, target: str = f"{NETWORK}.8/29") -> AbstractContextManager[None]:
        """Close all ports of the compute nodes but slurmd's for a container, as a site's firewall does."""
        return self.dropped(container, f"OUTPUT -d {target} --syn ! --dport 6818")

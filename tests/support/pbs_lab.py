"""A real OpenPBS in namespaces of this machine as an object: what runs on its machines, and what breaks them.

It is another project's: ``HPCGPU_PBS_LAB`` is its folder, else ``../shared/pbs-lab`` beside the checkout.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paths import ROOT
from waiting import until

PYTHON = ROOT / ".venv/bin/python" if (ROOT / ".venv/bin/python").exists() else Path(sys.executable)
HOME = Path("/home/labuser")
# The checkout and its Python are shared by all machines of the lab; what lies in a folder that only root may enter, as
# /root, is shown again in one that everybody may.
EXPOSE = """
set -e
for path in "$@"; do
    i=$((i + 1)); keep=/run/hpcgpu/$i
    [ ! -d "$keep" ] || continue
    mkdir -p "$keep"; mount --rbind "$path" "$keep"
    shut= p=$path
    while [ "$p" != / ]; do p=$(dirname "$p"); [ "$((0$(stat -c %a "$p") & 1))" = 1 ] || shut=$p; done
    [ -z "$shut" ] || { mount -t tmpfs -o mode=755 tmpfs "$shut"; mkdir -p "$path"; mount --rbind "$keep" "$path"; }
done
"""
# A client on the login node: code comes in, what it returns goes out.
CLIENT = """
import json, os, sys
scope = {}
print(json.dumps(os.getpid()), flush=True)
for line in sys.stdin:
    code = json.loads(line)
    try:
        try:
            value = eval(compile(code, "<test>", "eval"), scope)
        except SyntaxError:
            value = exec(code, scope)
        print(json.dumps({"value": value}, default=str), flush=True)
    except BaseException as e:
        print(json.dumps({"error": f"{type(e).__name__}: {e}"}), flush=True)
"""


class PbsLabUnavailable(Exception):
    """It cannot be had on this machine; the text says why."""


class Client:
    """A Python on the login node, by :data:`CLIENT`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process, self._log = process, log
        self.pid = int(process.stdout.readline())

    def __call__(self, code: str) -> Any:
        """Run code there; return its value, if it is an expression."""
        self.send(code)
        return self.answer()

    def send(self, code: str) -> None:
        """Have code run there, and do not wait."""
        self._process.stdin.write(json.dumps(textwrap.dedent(code)) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the value of what was sent; fail if that raised an error."""
        line = self._process.stdout.readline()
        assert line, f"the client has ended: {self.said}"
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["value"]

    @property
    def said(self) -> str:
        """Its standard error."""
        return self._log.read_text()

    def end(self) -> None:
        """Have it end; its standard input is closed."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        finally:
            self._process.kill()
            self._process.wait()


class PbsLab:
    """The login node, four nodes, and what runs on them."""

    nodes = ("node1", "node2", "node3", "node4")
    python = PYTHON
    template = ROOT / "jobscripts" / "pbs.sh"

    def __init__(self, state: Path) -> None:
        folder = Path(os.environ.get("HPCGPU_PBS_LAB") or ROOT.parent / "shared" / "pbs-lab")
        if not (folder / "up.sh").exists():
            raise PbsLabUnavailable(f"no OpenPBS lab in {folder}; HPCGPU_PBS_LAB names its folder")
        if os.getuid() != 0:
            raise PbsLabUnavailable("it needs root for its namespaces")
        up = Path("/run/pbs-lab.dir")
        if up.exists() and (used := up.read_text().strip()):
            raise PbsLabUnavailable(f"one is up already, in {used}: PBSLAB_RUN={used} {folder}/down.sh")
        self._folder, self._state, self._clients, self._broken = folder, state, 0, False
        self._shown = [str(ROOT), str(Path(sys.base_prefix).resolve())]
        self._env = {**os.environ, "PBSLAB_RUN": str(state), "PBSLAB_SHARE": ":".join(self._shown)}
        self._env["PBSLAB_NODES"] = str(len(self.nodes))

    def run(self, program: str, *words: str, limit_s: float = 120) -> str:
        """Run one of the lab's programs; return its output."""
        options: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL, "env": self._env}
        done = subprocess.run([self._folder / program, *words], timeout=limit_s, **options)
        assert done.returncode == 0, f"{program} {shlex.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def up(self) -> None:
        """Start it."""
        try:
            try:
                self.run("up.sh", str(len(self.nodes)), limit_s=400)
            except AssertionError:  # its database gives up early on a machine that is busy
                self.run("up.sh", str(len(self.nodes)), limit_s=400)
        except AssertionError as e:
            raise PbsLabUnavailable(str(e)[:500]) from e
        for machine in ("login01", *self.nodes):
            self._expose(machine)

    def mend(self) -> None:
        """Mend what a test has broken."""
        if self._broken:
            self.breaks("epilogue", "none")
            self.up()
        self._broken = False

    def down(self) -> None:
        """Remove it."""
        self.run("down.sh", "--wipe")

    def _expose(self, machine: str) -> None:
        self.on(machine, f"bash -c {shlex.quote(EXPOSE)} x {shlex.join(self._shown)}", user="root")

    def breaks(self, verb: str, *words: str) -> None:
        """Break a machine, or mend it: ``off node2``."""
        self._broken = True
        self.run("plab.sh", verb, *words)
        if verb == "on":
            self._expose(words[0])

    def on(self, machine: str, line: str, user: str = "labuser") -> str:
        """Run a shell line on a machine; return its output."""
        return self.run("on", machine, "-u", user, line)

    def hpcgpu(self, *words: str) -> str:
        """Run a command of ours on the login node; return what it printed."""
        return self.on("login01", shlex.join([str(PYTHON), "-m", "hpcgpu", *words]))

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """A Python on the login node, which has imported what a client needs."""
        self._clients += 1
        log = self._state / f"client-{self._clients}.log"
        argv = [self._folder / "on", "login01", f"mkdir -p work; cd work; exec {PYTHON} -c {shlex.quote(CLIENT)}"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with log.open("w") as stderr:
            process = subprocess.Popen(argv, **pipes, stderr=stderr, env=self._env)
        client = Client(process, log)
        try:
            client("from pathlib import Path; from distributed import Client; from hpcgpu import PBSGPUCluster")
            yield client
        finally:
            client.end()

    def kill(self, client: Client) -> None:
        """Kill a client."""
        self.on("login01", f"kill -9 {client.pid}")

    def states(self) -> dict[str, str]:
        """Return the state of each job that has not ended; elements for their array."""
        jobs = json.loads(self.on("login01", "qstat -t -f -F json")).get("Jobs", {})
        return {i: job["job_state"] for i, job in jobs.items() if "[]" not in i and job["job_state"] not in "FX"}

    def node_of(self, job_id: str) -> str:
        """Return the first node of a running job."""
        jobs = json.loads(self.on("login01", f"qstat -t -f -F json '{job_id}'"))["Jobs"]
        return str(jobs[job_id]["exec_host"].partition("/")[0])

    def processes(self) -> list[str]:
        """Return the processes of the lab's user, but for shells that wait for a job."""
        ps = {m: self.on(m, "ps -u labuser -o pid=,args= || :", user="root") for m in ("login01", *self.nodes)}
        lines = [f"{machine}: {line}" for machine, text in ps.items() for line in text.splitlines()]
        return [line for line in lines if "hpcgpu" in line or "python" in line]

    def run_folders(self) -> list[Path]:
        """Return the folders of all runs."""
        runs = HOME / ".hpcgpu" / "runs"
        return sorted(runs.iterdir()) if runs.is_dir() else []

    def left(self) -> list[str]:
        """Return what is there of runs: jobs, processes, folders."""
        jobs = [f"job {i} is {state}" for i, state in self.states().items()]
        return [*jobs, *self.processes(), *map(str, self.run_folders())]

    def wait_idle(self, limit_s: float = 60) -> None:
        """Return when nothing is left of any run."""
        until(lambda: not self.left(), "nothing is left on the lab", limit_s=limit_s, every_s=0.5, shown=self.left)
